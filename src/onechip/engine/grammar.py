"""One row's place in its grammar: which tokens may come next, as bits.

    1. A thought, where one is under way, is free but for control tokens: nothing in it can end the answer.
    2. Then llguidance's matcher says what continues the structure. Where the structure may end, so may the request: the
       matcher's end tokens stand for the request's own stop ids.
    3. A row that may do nothing but stop gets a mask of its stop ids; without any (ignore_eos) it ends there.

A matcher only ever sees committed tokens: a surplus token of the step ahead never reaches it, so nothing is rolled
back, and a preempted sequence keeps its place. Knows token ids and bits, never text.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from onechip.request import Grammar


@dataclass(frozen=True)
class RowMask:
    """What one row of a step may choose from: `words` are ceil(V / 32) uint32, lowest bit first, some bit set.

    `forced`: only stop ids are left, which min_tokens must not ban then.
    """

    words: np.ndarray
    forced: bool = False


@dataclass(frozen=True)
class Dead:
    """A row that has no token left: `error` None where its structure is complete, else why it cannot go on."""

    error: str | None


@dataclass(frozen=True)
class Bits:
    """Constant masks of one vocabulary: all `size` tokens but `special` ones, and those that end a structure."""

    size: int
    plain: np.ndarray
    eos: np.ndarray

    @classmethod
    def of(cls, size: int, special_ids: Iterable[int], eos_ids: Iterable[int]) -> "Bits":
        everything = words_of(range(size), size)
        return cls(size, everything & ~words_of(special_ids, size), words_of(eos_ids, size))


class RowGrammar:
    """The place. `stop_ids` and `allowed_ids` are the request's."""

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher,
        bits: Bits,
        stop_ids: Collection[int],
        allowed_ids: Collection[int] | None,
    ):
        self.matcher = matcher
        self.in_thought = grammar.thought == "open"
        self._may_open = grammar.thought == "may_open"
        self._opener, self._closer = grammar.opener, grammar.closer
        self._eos = bits.eos
        self._stops = words_of(stop_ids, bits.size)
        self._allowed = None if allowed_ids is None else words_of(allowed_ids, bits.size)
        self._thought = bits.plain & ~self._stops | words_of([self._closer], bits.size)
        self._opening = words_of([self._opener], bits.size)

    def advance(self, token: int) -> None:
        """Take a committed token that did not end the request."""
        if self.in_thought:
            self.in_thought = token != self._closer
            return
        self.in_thought = self._may_open and token == self._opener
        self._may_open = False
        if not self.in_thought:
            self.matcher.consume_token(token)

    def mask(self, words: np.ndarray) -> RowMask | Dead:
        """What may come next; `words` uint32 are the matcher's own mask (unused inside a thought)."""
        if self.in_thought:
            words = self._thought
        elif self.matcher.is_error():
            return Dead(first_line(self.matcher.get_error()))
        else:
            if (words & self._eos).any():
                words = (words & ~self._eos) | self._stops
            if self._may_open:
                words = words | self._opening
        if self._allowed is not None:
            words = words & self._allowed
        if words.any():
            return RowMask(words, forced=not (words & ~self._stops).any())
        complete = not self.in_thought and self.matcher.is_accepting()
        return Dead(None if complete else "none of the allowed tokens continues the structure")


def words_of(ids: Iterable[int], size: int) -> np.ndarray:
    """uint32 [ceil(size / 32)] with the bits of `ids`; a negative id has none."""
    flags = np.zeros(-(-size // 32) * 32, np.uint8)
    flags[[token for token in ids if 0 <= token < size]] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


def first_line(message: str) -> str:
    """llguidance's reason, without the place in our own wrapping before it and the dump after it."""
    line = message.strip().partition("\n")[0] or "unknown reason"
    return line.partition("): ")[2] or line if line.startswith("at ") else line
