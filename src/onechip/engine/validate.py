"""What a sampling request may ask for, and how it becomes engine requests.

One place for every range, used by the HTTP server, `LLM` and `Engine.submit`, so that no route is laxer than another.
It knows numbers and token ids, never text: stop strings are only counted and refused when empty.

Choices made where OpenAI and vLLM differ or are silent:
- temperature 0 to 2; at or under GREEDY_BELOW it is greedy. top_p is in (0, 1]: 0 is refused, as vLLM does.
- top_k 0 and -1 both mean off, and so does any top_k of the vocabulary's size or more.
- seed 0 to 2^63 - 1; a negative one is refused. Choice 0 of n draws with the seed itself, choice i with one mixed
  from (seed, i), so n=1 and the first of n=3 agree.
- structured_outputs says one thing (json, regex, choice, grammar or json_object), as in vLLM; `grammar_of` makes it the
  engine's `Grammar`, which the engine compiles: only there an unusable schema or expression is found.
- prompt + max_tokens beyond the context is refused, never clamped; max_tokens None runs to the end of the context.
"""

import json
import math
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from onechip.errors import ContextLengthExceeded, InvalidRequest
from onechip.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    EngineInfo,
    Grammar,
    GrammarKind,
    Request,
    SamplingParams,
    StructuredOutputsParams,
)

MAX_STOP_STRINGS = 16
MAX_CHOICES = 128
MAX_SEED = 2**63 - 1
MAX_GRAMMAR_CHARS = 1 << 18

_WISHES: dict[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
    "json_object": "json_schema",
}
_FLOATS = (  # name, lowest, highest, whether the lowest itself is allowed
    ("temperature", 0.0, 2.0, True),
    ("top_p", 0.0, 1.0, False),
    ("min_p", 0.0, 1.0, True),
    ("presence_penalty", -2.0, 2.0, True),
    ("frequency_penalty", -2.0, 2.0, True),
    ("repetition_penalty", 0.0, 10.0, False),
)
_INTS = (  # name, lowest, highest (None: no limit); a value of None means "not set" and passes
    ("top_k", -1, None),
    ("seed", 0, MAX_SEED),
    ("min_tokens", 0, None),
    ("max_tokens", 1, None),
    ("n", 1, MAX_CHOICES),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


def check(params: SamplingParams, *, vocab_size: int) -> None:
    """Raise InvalidRequest, with `param` set, for the first value no engine could honour."""
    for name, low, high, closed in _FLOATS:
        _check_float(name, getattr(params, name), low, high, closed)
    for name, low, high in _INTS:
        _check_int(name, getattr(params, name), low, high)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _bad("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")
    _check_stops(params.stop)
    _check_bias(params.logit_bias, vocab_size)
    check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty: no token could be chosen; leave it out to allow all",
                param="allowed_token_ids",
            )
        check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    if params.structured_outputs is not None:
        check_grammar(grammar_of(params.structured_outputs))


def grammar_of(wanted: StructuredOutputsParams, param: str = "structured_outputs") -> Grammar:
    """The grammar of a user's wish, without a thought before it. Raises InvalidRequest for none or two wishes."""
    given = {
        name: value for name in _WISHES if (value := getattr(wanted, name)) not in (None, False)
    }
    if isinstance(wanted.json, bool):
        given["json"] = wanted.json
    if len(given) != 1:
        raise InvalidRequest(
            f"{param} names {', '.join(given) or 'nothing'}: give exactly one of {', '.join(_WISHES)}",
            param=param,
        )
    ((name, value),) = given.items()
    blanks = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    kind = _WISHES[name]
    if name == "json_object":
        value = {"type": "object"}
    if name == "choice" and not all(isinstance(one, str) for one in value):
        raise InvalidRequest(f"{param}: choice must be a list of strings", param=param)
    if name == "choice" and not value:
        raise InvalidRequest(f"{param}: choice is empty: nothing could be said", param=param)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Grammar(kind, text, whitespace=blanks, param=param)


def check_grammar(grammar: Grammar) -> None:
    """Raise InvalidRequest for a grammar too long to compile or that cannot be sent."""
    size = len(grammar.text) + len(grammar.calls) + len(grammar.whitespace or "")
    if size > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{grammar.param} has {size} characters, the limit is {MAX_GRAMMAR_CHARS}; make it shorter",
            param=grammar.param,
        )
    try:
        (grammar.text + grammar.calls + (grammar.whitespace or "")).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{grammar.param} is no Unicode text: {error}", param=grammar.param
        ) from error


def check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidRequest unless every id is an integer in [0, vocab_size)."""
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise _bad(param, token, f"token ids from 0 to {vocab_size - 1}")


def check_prompt(
    ids: Sequence[int], *, vocab_size: int, param: str = "prompt", refused: Collection[int] = ()
) -> None:
    """Raise InvalidRequest for an empty prompt, an id out of range, or a media placeholder id (`refused`)."""
    if not ids:
        raise InvalidRequest(f"{param} is empty: give at least one token", param=param)
    check_ids(param, ids, vocab_size)
    for token in refused:
        if token in ids:
            raise InvalidRequest(
                f"{param} holds token {token}, a placeholder for media: text prompts must not contain it",
                param=param,
            )


def prepare(
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    info: EngineInfo,
    eos_ids: Sequence[int],
    *,
    prompt_param: str = "prompt",
    refused: Collection[int] = (),
    grammar: Grammar | None = None,
) -> tuple[Request, ...]:
    """The n engine requests of one prompt, checked and complete: ids `{request_id}-{choice}`.

    `eos_ids` are the model's own stop ids; `refused` the ids a text prompt may not hold; `grammar` takes the place of
    `params.structured_outputs`. Raises InvalidRequest or ContextLengthExceeded.
    """
    check(params, vocab_size=info.vocab_size)
    check_prompt(prompt_ids, vocab_size=info.vocab_size, param=prompt_param, refused=refused)
    max_tokens = fit_context(len(prompt_ids), params, info.max_model_len, prompt_param)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    stop_ids = stop_ids_of(params, eos_ids)
    _check_something_is_left(params, stop_ids)
    top_k = 0 if params.top_k == -1 or params.top_k >= info.vocab_size else params.top_k
    if grammar is None and params.structured_outputs is not None:
        grammar = grammar_of(params.structured_outputs)
    ids = tuple(prompt_ids)
    one = replace(params, max_tokens=max_tokens, top_k=top_k, n=1, structured_outputs=None)
    return tuple(
        Request(
            id=f"{request_id}-{choice}",
            prompt_ids=ids,
            sampling=replace(one, seed=derive_seed(seed, choice)),
            stop_ids=stop_ids,
            grammar=grammar,
        )
        for choice in range(params.n)
    )


def check_request(request: Request, info: EngineInfo) -> None:
    """The same checks on arrival in the engine: nothing that reaches a device array is out of range."""
    check(request.sampling, vocab_size=info.vocab_size)
    check_prompt(request.prompt_ids, vocab_size=info.vocab_size)
    check_ids("stop_token_ids", request.stop_ids, info.vocab_size)
    if len(request.stop_ids) > MAX_STOP_IDS:
        raise _bad("stop_token_ids", len(request.stop_ids), f"at most {MAX_STOP_IDS} stop ids")
    _check_something_is_left(request.sampling, request.stop_ids)
    if request.grammar is not None:
        check_grammar(request.grammar)
    fit_context(len(request.prompt_ids), request.sampling, info.max_model_len, "prompt")


def fit_context(
    prompt_tokens: int, params: SamplingParams, max_model_len: int, prompt_param: str
) -> int:
    """How many tokens the request may generate; raises ContextLengthExceeded naming both numbers."""
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has {prompt_tokens}"
            " and at least one must be generated. Shorten the prompt.",
            param=prompt_param,
        )
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens, but {prompt_tokens + max_tokens} were"
            f" requested ({prompt_tokens} in the prompt, {max_tokens} to generate)."
            f" Shorten the prompt or ask for at most {room} tokens.",
            param="max_tokens",
        )
    if params.min_tokens > max_tokens:
        raise _bad("min_tokens", params.min_tokens, f"at most the {max_tokens} tokens that fit")
    return max_tokens


def stop_ids_of(params: SamplingParams, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """The model's stop ids (unless ignore_eos) united with the request's, in a stable order."""
    own = () if params.ignore_eos else tuple(eos_ids)
    united = tuple(dict.fromkeys(own + tuple(params.stop_token_ids)))
    if len(united) > MAX_STOP_IDS:
        raise _bad(
            "stop_token_ids", len(united), f"at most {MAX_STOP_IDS} with the model's {len(own)}"
        )
    return united


def derive_seed(seed: int, choice: int) -> int:
    """The seed of one choice: its own for choice 0, else splitmix64 of (seed, choice) cut to 63 bits."""
    if choice == 0:
        return seed
    x = (seed + choice * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) & MAX_SEED


def _check_something_is_left(params: SamplingParams, stop_ids: Collection[int]) -> None:
    """min_tokens bans the stop ids: among the allowed ids there must be another."""
    allowed = params.allowed_token_ids
    if params.min_tokens and allowed is not None and set(allowed) <= set(stop_ids):
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but all allowed_token_ids are stop ids: no token could be chosen; "
            "allow another or leave min_tokens out",
            param="min_tokens",
        )


def _check_float(name: str, value: object, low: float, high: float, closed: bool) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _bad(name, value, "a number " + _interval(low, high, closed))
    if not math.isfinite(value) or not low <= value <= high or (value == low and not closed):
        raise _bad(name, value, _interval(low, high, closed))


def _interval(low: float, high: float, closed: bool) -> str:
    return f"from {low:g} to {high:g}" if closed else f"above {low:g}, up to {high:g}"


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    if value is None and name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
        return
    limit = (
        f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    )
    if type(value) is not int or value < low or (high is not None and value > high):
        raise _bad(name, value, limit)


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise _bad("stop", len(stops), f"at most {MAX_STOP_STRINGS} strings")
    if not all(stops):
        raise InvalidRequest("stop holds an empty string: leave it out", param="stop")


def _check_bias(bias: dict[int, float], vocab_size: int) -> None:
    if len(bias) > MAX_LOGIT_BIAS:
        raise _bad("logit_bias", len(bias), f"at most {MAX_LOGIT_BIAS} entries")
    check_ids("logit_bias", bias, vocab_size)
    for value in bias.values():
        _check_float("logit_bias", value, -100.0, 100.0, True)


def _bad(param: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is {value!r:.80}; allowed: {allowed}", param=param)
