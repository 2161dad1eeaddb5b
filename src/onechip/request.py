"""The nouns that cross the package: what is asked for, and what comes back.

Plain data, sent as they are over the wire between the server and the engine process (msgspec encodes dataclasses).
Token ids only: the engine never sees text. Every accepted `Request` ends in exactly one `Event` with `finish` set.
"""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs
MAX_LOGIT_BIAS = 1024  # entries a request; the device keeps one sparse row of this width a slot
MAX_STOP_IDS = 64  # stop ids a request, the model's own included
STEP_TOKEN_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's
GREEDY_BELOW = 1e-4  # a temperature at or under this is greedy: dividing by it would overflow


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens; the names and meanings are OpenAI's and vLLM's.

    Order: softcap, logit_bias, penalties, bans (allowed_token_ids, min_tokens), temperature, top_k, top_p, min_p.
    presence and frequency penalties count generated tokens only, repetition_penalty prompt and generated.
    `logprobs` None: none; 0: of the chosen token; k: of the k best too. They are of the model's own distribution
    (after its softcap, before bias, penalties and temperature). `prompt_logprobs` likewise for the prompt.
    `stop` strings are found by the server (they are text); `n` choices are separate engine requests.
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


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `stop_ids` already holds the model's own stop ids unless ignore_eos.

    `sampling.max_tokens` is a number here: len(prompt_ids) + max_tokens <= max_model_len was checked by the sender
    and is checked again on arrival. `sampling.seed` is set: fresh entropy where the user gave none.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()


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
