"""Whether two servers compute the same: next-token log probabilities and greedy text, prompt by prompt.

Owns the arithmetic, for what a server shows (the likeliest tokens) and for whole logits (two checkpoints).

Per prompt, with `ref` the first server and `got` the second:

- argmax: the likeliest next token is the same.
- top-10 overlap: how many of the ten likeliest are in both, over ten.
- |difference|: of log probabilities (servers; over the tokens that both show) or of logits (checkpoints; over all).
- KL(ref || got), in nats. For servers over the tokens that both show, each side renormalised: it bounds nothing, but
  is zero when they agree. For checkpoints over the whole vocabulary.
- prefix: greedy tokens (servers that name none: characters) that agree before the first difference.

Two texts that part after hundreds of tokens need not mean a fault: a tie of two logits, rounded differently, is enough.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onechip.errors import OnechipError
from onechip.ladder import stats
from onechip.ladder.client import Client, Target
from onechip.ladder.one import common_prefix
from onechip.ladder.prompts import ONE
from onechip.ladder.stream import Answer
from onechip.ladder.tables import Row

TOP = 20  # alternatives to ask for: what vLLM allows
TOP_OF_OPENAI = 5  # and what OpenAI's own completions do
OVERLAP = 10

Floats = npt.NDArray[np.floating[Any]]


class NoLogprobs(OnechipError):
    """A server shows no log probabilities, so there is nothing to compare but texts."""


@dataclass(frozen=True)
class Parity:
    """One prompt's figures. `unit` is what `prefix` and `greedy` count."""

    prompt: str
    argmax: bool
    overlap: float
    max_diff: float
    mean_diff: float
    kl: float
    prefix: int
    greedy: int
    unit: str = "tokens"

    @property
    def identical(self) -> bool:
        return self.prefix == self.greedy


@dataclass(frozen=True)
class Shown:
    """What a server showed for a prompt: the next token's log probabilities, and its greedy answer."""

    logprobs: Mapping[str, float]
    text: str
    tokens: tuple[str, ...]


async def servers(
    ref: Target, got: Target, *, max_tokens: int = 64, prompts: Mapping[str, str] = ONE
) -> list[Parity]:
    """Both servers on the same prompts. Raises Unreachable, NoLogprobs."""
    async with Client(ref) as first, Client(got) as second:
        await first.discover()
        await second.discover()
        return [
            of_shown(
                name, await _show(first, text, max_tokens), await _show(second, text, max_tokens)
            )
            for name, text in prompts.items()
        ]


async def _show(client: Client, text: str, max_tokens: int) -> Shown:
    fields: dict[str, Any] = {"stream": False, "max_tokens": max_tokens, "temperature": 0}
    answer = await client.complete(text, logprobs=TOP, **fields)
    if answer.error is not None and answer.error.status == 400:
        answer = await client.complete(text, logprobs=TOP_OF_OPENAI, **fields)
    if answer.error is not None:
        raise NoLogprobs(f"{client.target.url} gave no log probabilities: {answer.error.message}")
    tokens, first = parsed(answer)
    if not first:
        raise NoLogprobs(f"{client.target.url} shows no log probabilities on /v1/completions")
    return Shown(first, answer.text, tokens)


def parsed(answer: Answer) -> tuple[tuple[str, ...], dict[str, float]]:
    """Greedy tokens and the first one's likeliest, from the completions' shape or the chat's (llama.cpp's for both)."""
    found: Any = answer.logprobs[0] if answer.logprobs else None
    if not isinstance(found, dict):
        return (), {}
    content = found.get("content")
    if content:
        top = {
            _token(t["token"]): float(t["logprob"]) for t in content[0].get("top_logprobs") or ()
        }
        return tuple(_token(entry["token"]) for entry in content), top
    tops = found.get("top_logprobs") or [{}]
    first = {_token(token): float(value) for token, value in (tops[0] or {}).items()}
    return tuple(_token(token) for token in found.get("tokens") or ()), first


def _token(text: str) -> str:
    return text.replace("▁", " ")  # some servers show the vocabulary's own mark for a blank


def of_shown(name: str, ref: Shown, got: Shown) -> Parity:
    """Figures over the tokens that both servers show."""
    shared = sorted(ref.logprobs.keys() & got.logprobs.keys())
    a = np.asarray([ref.logprobs[token] for token in shared])
    b = np.asarray([got.logprobs[token] for token in shared])
    with_tokens = bool(ref.tokens and got.tokens)
    ours, theirs = (ref.tokens, got.tokens) if with_tokens else (ref.text, got.text)
    return Parity(
        prompt=name,
        argmax=_likeliest(ref.logprobs, 1) == _likeliest(got.logprobs, 1),
        overlap=len(set(_likeliest(ref.logprobs, OVERLAP)) & set(_likeliest(got.logprobs, OVERLAP)))
        / OVERLAP,
        max_diff=float(np.abs(a - b).max()) if shared else float("inf"),
        mean_diff=float(np.abs(a - b).mean()) if shared else float("inf"),
        kl=kl(a, b) if shared else float("inf"),
        prefix=common_prefix(ours, theirs),
        greedy=max(len(ours), len(theirs)),
        unit="tokens" if with_tokens else "characters",
    )


def _likeliest(logprobs: Mapping[str, float], count: int) -> list[str]:
    return sorted(logprobs, key=lambda token: (-logprobs[token], token))[:count]


def of_logits(
    name: str, ref: Floats, got: Floats, ours: Sequence[int], theirs: Sequence[int]
) -> Parity:
    """Figures over whole last-position logits, each [V], and greedy token ids."""
    a, b = ref.astype(np.float64), got.astype(np.float64)
    top = [set(np.argpartition(-x, OVERLAP)[:OVERLAP].tolist()) for x in (a, b)]
    return Parity(
        prompt=name,
        argmax=bool(a.argmax() == b.argmax()),
        overlap=len(top[0] & top[1]) / OVERLAP,
        max_diff=float(np.abs(a - b).max()),
        mean_diff=float(np.abs(a - b).mean()),
        kl=kl(a, b),
        prefix=common_prefix(ours, theirs),
        greedy=max(len(ours), len(theirs)),
    )


def kl(ref: Floats, got: Floats) -> float:
    """KL(ref || got) in nats of two sets of logits or log probabilities, each normalised over itself."""
    p, q = ref - _log_sum(ref), got - _log_sum(got)
    return max(0.0, float((np.exp(p) * (p - q)).sum()))


def _log_sum(logits: Floats) -> float:
    top = logits.max()
    return float(top + np.log(np.exp(logits - top).sum()))


def rows(found: Sequence[Parity]) -> list[Row]:
    """A table with a last row over all prompts."""
    head = ["prompt", "argmax", "top-10", "max |diff|", "mean |diff|", "KL", "equal prefix"]
    table = [head] + [
        [
            p.prompt,
            "same" if p.argmax else "differs",
            f"{p.overlap:.1f}",
            f"{p.max_diff:.4f}",
            f"{p.mean_diff:.4f}",
            f"{p.kl:.2e}",
            f"{p.prefix}/{p.greedy} {p.unit}",
        ]
        for p in found
    ]
    return [*table, _summary(found)]


def _summary(found: Sequence[Parity]) -> Row:
    return [
        "all",
        f"{sum(p.argmax for p in found)}/{len(found)}",
        f"{stats.median([p.overlap for p in found]):.1f}",
        f"{max(p.max_diff for p in found):.4f}",
        f"{stats.median([p.mean_diff for p in found]):.4f}",
        f"{max(p.kl for p in found):.2e}",
        f"{sum(p.identical for p in found)}/{len(found)} identical",
    ]
