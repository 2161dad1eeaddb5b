"""`onechip parity` on two checkpoints: the same prompts through the engine, logits against logits.

Owns running one checkpoint after the other, so that both need not fit in memory. The arithmetic is `ladder.parity`,
which stays a client; two servers are compared there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onechip.errors import ConfigError
from onechip.ladder.parity import Parity, of_logits
from onechip.ladder.prompts import ONE
from onechip.llm import LLM
from onechip.request import SamplingParams


@dataclass(frozen=True)
class Computed:
    """One prompt through one checkpoint: its ids, the last position's logits [V], greedy ids."""

    ids: tuple[int, ...]
    logits: np.ndarray
    greedy: tuple[int, ...]


def checkpoints(
    ref: str,
    got: str,
    *,
    max_tokens: int = 64,
    prompts: Mapping[str, str] = ONE,
    **config: Any,
) -> list[Parity]:
    """Both checkpoints on the same prompts; `config` goes to `LLM`. Raises ConfigError for different vocabularies."""
    first = compute(ref, prompts, max_tokens, config)
    second = compute(got, prompts, max_tokens, config)
    for name in prompts:
        if (
            first[name].ids != second[name].ids
            or first[name].logits.shape != second[name].logits.shape
        ):
            raise ConfigError(
                f"{ref} and {got} read {name!r} as different token ids; "
                "only checkpoints with one vocabulary can be compared"
            )
    return [
        of_logits(name, a.logits, second[name].logits, a.greedy, second[name].greedy)
        for name, a in first.items()
    ]


def compute(
    model: str, prompts: Mapping[str, str], max_tokens: int, config: Mapping[str, Any]
) -> dict[str, Computed]:
    """Everything of one checkpoint; its memory is free when this returns."""
    llm = LLM(model, **config)
    if llm.tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer, so it cannot read the prompts")
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    found: dict[str, Computed] = {}
    for name, text in prompts.items():
        ids = (llm.tokenizer.bos_id, *llm.tokenizer.encode(text))
        greedy = llm.generate([ids], params)[0].token_ids
        found[name] = Computed(ids, llm.score(ids)[-1], tuple(greedy))
    return found
