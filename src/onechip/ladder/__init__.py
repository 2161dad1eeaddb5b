"""An HTTP client that measures any OpenAI-compatible server and says what a difference is worth.

It imports nothing of the engine, the server or the model, and never jax. Read in this order: `http` (bytes and their
times), `stream` and `client` (one answer and its marks), `figures` (what is computed from marks), `load` (many at
once), `record` and `journal` (what is kept), `stats` and `compare` (what it means), `report` (what is shown).

Beside that line stand two more: what a server answers (`gsm8k` and `bfcl` are the rules, `tasks` and `evaluation` ask
and score, `probes` and `probe_*` try capabilities), and servers in turn (`arm`, `process`, `climb`). `jobs` joins them.
"""
