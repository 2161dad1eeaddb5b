"""One request on its way through the engine: its tokens, where they are, and what became of it."""

import time
from dataclasses import dataclass, field

from onechip.engine.grammar import RowGrammar
from onechip.request import FinishReason, Request, TokenLogprobs

LAUNCH_STOPS = 16  # stop ids that a launch of several steps can know


@dataclass(eq=False)
class Sequence:
    """`tokens` are the prompt and what the host knows of the output; `in_flight` more are being sampled.

    `computed` tokens have their K/V written, or will once every launched step has run. All state that must survive a
    preemption lives here; a preempted sequence has computed 0 and no slot, nothing else changes.
    """

    request: Request
    tokens: list[int]
    slot: int | None = None
    computed: int = 0
    in_flight: int = 0
    finish: FinishReason | None = None
    grammar: RowGrammar | None = None
    submitted_at: float = field(default_factory=time.monotonic)
    queued_s: float | None = None  # until its first place in a step; a preempted one keeps it
    prompt_logprobs: list[TokenLogprobs | None] = field(init=False)

    def __post_init__(self) -> None:
        # The first prompt token has no prediction.
        self.prompt_logprobs = [] if self.request.sampling.prompt_logprobs is None else [None]

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def length(self) -> int:
        """Tokens, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens that still need a pass; 1 means ready to decode."""
        return self.length - self.computed

    @property
    def max_length(self) -> int:
        assert self.request.sampling.max_tokens is not None
        return self.prompt_len + self.request.sampling.max_tokens

    @property
    def full(self) -> bool:
        """Whether every token it may have is made or in flight."""
        return self.length >= self.max_length

    @property
    def decodes(self) -> bool:
        """Whether it runs, has one token to go, and may make another."""
        return self.slot is not None and self.remaining == 1 and not self.full

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log probabilities were asked for and are not complete."""
        asked = self.request.sampling.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.prompt_len


@dataclass(frozen=True)
class PlanRow:
    """`count` tokens of a sequence from position `start` on.

    `sample`: its last token's logits are wanted; `score`: so are all its positions' log probabilities. `steps`: tokens
    it makes in this launch, unless a stop id comes first; more than one in launches of decode rows alone.
    """

    sequence: Sequence
    start: int
    count: int
    sample: bool
    score: bool = False
    steps: int = 1

    @property
    def made(self) -> int:
        """Tokens this row adds to its sequence."""
        return self.steps if self.sample else 0

    @property
    def known(self) -> list[int]:
        """The row's token ids that the host knows: all, or none of a decode row whose token is in flight."""
        return self.sequence.tokens[self.start : self.start + self.count]


@dataclass(frozen=True)
class Plan:
    """One step: rows of one token first. `admitted`: sequences that took a slot with this step."""

    rows: tuple[PlanRow, ...]
    admitted: tuple[Sequence, ...]

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def singles(self) -> int:
        """Leading rows of one token."""
        return sum(row.count == 1 for row in self.rows)

    @property
    def steps(self) -> int:
        """Decode steps of the launch."""
        return max(row.steps for row in self.rows)

    @property
    def score(self) -> bool:
        """Whether a row needs the hidden states of all its positions."""
        return any(row.score for row in self.rows)


@dataclass(frozen=True)
class RowResult:
    """What a launch made of one row: its sampled tokens, up to a stop id; -1 where logits were not finite.

    `logprob` is the first token's: rows that want one make one token a launch.
    """

    row: PlanRow
    tokens: tuple[int, ...] = ()
    logprob: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
