"""The nouns that cross the package: what is asked for, and what comes back.

Plain data, sent as they are over the wire between the server and the engine process (msgspec encodes dataclasses).
Token ids only: the engine never sees text. Every accepted `Request` ends in exactly one `Event` with `finish` set.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs
MAX_LOGIT_BIAS = 1024  # entries a request; the device keeps one sparse row of this width a slot
MAX_STOP_IDS = 64  # stop ids a request, the model's own included
STEP_TOKEN_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's
GREEDY_BELOW = 1e-4  # a temperature at or under this is greedy: dividing by it would overflow


GrammarKind = Literal["json_schema", "regex", "choice", "lark", "calls"]
ThoughtState = Literal["none", "may_open", "open"]


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What the text must be; exactly one of the first five. Names and meanings are vLLM's.

    `json`: a JSON schema, as an object or as its text. `grammar`: Lark (llguidance's dialect) or GBNF. Between the
    tokens of a JSON text up to 8 blanks are allowed, or what the regular expression `whitespace_pattern` matches, or
    none with `disable_any_whitespace`.
    """

    json: str | bool | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a request's tokens must spell, for the engine to enforce; and when that begins.

    `kind` says how to read `text`: a JSON schema, a regular expression, a JSON list of strings, or a Lark grammar with
    the rule `start`. `calls` are Lark rules with the rule `calls` (tool calls, written with token ids), which may be
    generated in place of the structure; of kind "calls" they are all there is and `text` is empty.

    `thought`: "none": the structure starts with the first token; "open": the prompt ends inside a thought, which runs
    until the token `closer`; "may_open": the first token is the structure's, or `opener`, and then the same. A thought
    holds no control tokens, so it cannot end the answer either. `param` is the request's field, for error messages.
    """

    kind: GrammarKind
    text: str
    calls: str = ""
    thought: ThoughtState = "none"
    opener: int = -1
    closer: int = -1
    whitespace: str | None = None
    param: str = "structured_outputs"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens; the names and meanings are OpenAI's and vLLM's.

    Order: softcap, logit_bias, penalties, bans (allowed_token_ids, min_tokens, grammar), temperature, top_k, top_p,
    min_p.
    presence and frequency penalties count generated tokens only, repetition_penalty prompt and generated.
    `logprobs` None: none; 0: of the chosen token; k: of the k best too. They are of the model's own distribution
    (after its softcap, before bias, penalties and temperature). `prompt_logprobs` likewise for the prompt.
    `stop` strings are found by the server (they are text); `n` choices are separate engine requests.

    With `structured_outputs` a stop id is possible only where the structure may end. Where nothing may follow it, it
    is the only choice left: min_tokens does not hold it back, and with ignore_eos the request ends there.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `stop_ids` already holds the model's own stop ids unless ignore_eos.

    `sampling.max_tokens` is a number here: len(prompt_ids) + max_tokens <= max_model_len was checked by the sender
    and is checked again on arrival. `sampling.seed` is set: fresh entropy where the user gave none. What the user
    asked for as `sampling.structured_outputs` travels as `grammar`.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of one token, and of the best ones at its position (best first)."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """News of one request: tokens since the last event, and at the end why it ended.

    `token_ids` includes a stop id that ended the request (as its last element; `stopped_by` repeats it): it is a
    generated token and is counted. `logprobs` is parallel to `token_ids` when asked for. `prompt_logprobs` comes once,
    with the first event: one entry a prompt token, None for the first, which has no prediction. So does `queued_s`, the
    seconds from submission until the request first had a place in a step.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: FinishReason | None = None
    stopped_by: int | None = None
    error: str | None = None
    error_code: str | None = None
    error_param: str | None = None
    queued_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine, sent with every batch of events; the server's gauges show the latest.

    Pages are counted over both pools; `kv_usage` is the fuller pool's used share, 0 to 1. `step_tokens` counts steps by
    how many tokens they took: one number an edge of STEP_TOKEN_EDGES (at most so many), and one for those above.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    pages_total: int = 0
    pages_free: int = 0
    preemptions: int = 0
    compiles_since_ready: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    packed_tokens: int = 0
    step_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the server must know of a ready engine to validate requests and describe it."""

    vocab_size: int
    max_model_len: int
    max_seqs: int
    kv_tokens: int
    device: str
    dtype: str
    load_seconds: float
    compile_seconds: float
    first_token_seconds: float
    page_size: int = 0
