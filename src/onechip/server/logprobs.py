"""Log probabilities in the three shapes clients know: OpenAI's chat, OpenAI's completions, and vLLM's for prompts."""

from collections.abc import Iterable, Sequence
from typing import Any

from onechip.chat.detokenize import Detokenizer
from onechip.chat.output import Entry, Scored, entry, scored
from onechip.chat.tokenizer import Tokenizer
from onechip.request import TokenLogprobs

LOWEST = -9999.0  # JSON has no infinity; vLLM writes the same number


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat_logprobs(entries: Iterable[Entry]) -> dict[str, Any]:
    """`choices[].logprobs` of chat: one `content` element a token."""
    content = [
        _chat_token(e.chosen) | {"top_logprobs": [_chat_token(t) for t in e.top]} for e in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: Scored) -> dict[str, Any]:
    return {"token": token.token, "logprob": finite(token.logprob), "bytes": list(token.raw)}


def completion_logprobs(entries: Iterable[Entry]) -> dict[str, list[Any]]:
    """`choices[].logprobs` of completions. The chosen token is always among its alternatives, as in OpenAI's."""
    shape: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for e in entries:
        shape["tokens"].append(e.chosen.token)
        shape["token_logprobs"].append(finite(e.chosen.logprob))
        shape["top_logprobs"].append(_alternatives(e))
        shape["text_offset"].append(e.offset)
    return shape


def _alternatives(e: Entry) -> dict[str, float]:
    """By text: where two tokens read the same, the likelier stays, and the chosen one always does."""
    best: dict[str, float] = {}
    for token in e.top:
        best.setdefault(token.token, finite(token.logprob))
    return best | {e.chosen.token: finite(e.chosen.logprob)}


def echo_logprobs(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    *,
    skip_special: bool,
) -> dict[str, list[Any]]:
    """The completions shape for an echoed prompt: its first token has no prediction, hence nulls."""
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    shape = completion_logprobs(())
    offset = 0
    for token, found in zip(ids, logprobs, strict=True):
        e = None if found is None else entry(tokenizer, found, offset)
        shape["tokens"].append(scored(tokenizer, token, 0.0).token)
        shape["token_logprobs"].append(None if e is None else finite(e.chosen.logprob))
        shape["top_logprobs"].append(None if e is None else _alternatives(e))
        shape["text_offset"].append(offset)
        offset += len(detokenizer.push((token,)))
    return shape


def join_completion_logprobs(
    first: dict[str, list[Any]], second: dict[str, list[Any]]
) -> dict[str, list[Any]]:
    return {key: first[key] + second[key] for key in first}


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """vLLM's shape: a map from token id to its numbers at every position; null for the first. `rank` is null for a
    prompt token that is not among the best asked for.
    """
    return [None if found is None else _ranked(tokenizer, found) for found in logprobs]


def _ranked(tokenizer: Tokenizer, found: TokenLogprobs) -> dict[str, Any]:
    ranks = {token: rank for rank, token in enumerate(found.top_ids, start=1)}
    values = dict(zip(found.top_ids, found.top_logprobs, strict=True))
    values = {found.token_id: found.logprob} | values
    return {
        str(token): {
            "logprob": finite(value),
            "rank": ranks.get(token),
            "decoded_token": scored(tokenizer, token, value).token,
        }
        for token, value in values.items()
    }
