"""One choice, from token events to what a client reads: text deltas, log probability entries and why it ended.

Streaming and whole answers use the same object, which is why they cannot differ. It knows no HTTP shapes. Rules:
- Text is visible as soon as it is certain: whole characters, outside any possible stop string.
- A stop id that ended the choice is counted but shows no text and no log probability entry, unless
  include_stop_str_in_output (as in vLLM, where that field covers stop tokens too).
- A stop string ends the choice with "stop": `stop_hit` tells the caller to abort the engine request. Tokens are
  counted, and have entries, up to the one that completed the stop string.
- Stop strings are not looked for in the text of the first min_tokens tokens.
- Entries travel with the delta that follows them: a delta without text has none, except the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from onechip.chat.detokenize import Detokenizer, token_text
from onechip.chat.stops import StopMatcher
from onechip.chat.tokenizer import Tokenizer
from onechip.request import Event, FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Scored:
    """A token as text and as bytes, with its log probability."""

    token_id: int
    token: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Entry:
    """The log probability entry of one position. `offset`: characters of text before this token."""

    chosen: Scored
    top: tuple[Scored, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new: text, entries, and at the end why it ended."""

    text: str
    entries: tuple[Entry, ...] = ()
    finish: FinishReason | None = None
    stop_hit: bool = False


class ChoiceOutput:
    """Feed events with `push` until a delta has `finish`. `offset`: length of text that precedes (an echoed prompt)."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, offset: int = 0):
        self.completion_tokens = 0
        self.stop_reason: str | int | None = None
        self.finish: FinishReason | None = None
        self._tokenizer = tokenizer
        self._params = params
        self._offset = offset
        self._detokenizer = Detokenizer(tokenizer, skip_special=params.skip_special_tokens)
        self._stops = (
            StopMatcher(params.stop, include=params.include_stop_str_in_output)
            if params.stop
            else None
        )
        self._entries: list[Entry] = []

    def push(self, event: Event) -> Delta:
        """The delta of one event; the event's finish must be None, "stop" or "length"."""
        assert self.finish is None
        stepwise = self._stops is not None or self._params.logprobs is not None
        text = self._push_each(event) if stepwise else self._push_all(event)
        stop_hit = self.finish is not None
        if event.finish is not None and not stop_hit:
            self.finish, self.stop_reason = event.finish, event.stopped_by
            text += self._flush()
        entries: tuple[Entry, ...] = ()
        if self._entries and (text or self.finish):
            entries, self._entries = tuple(self._entries), []
        return Delta(text, entries, self.finish, stop_hit)

    def _push_all(self, event: Event) -> str:
        self.completion_tokens += len(event.token_ids)
        return self._detokenizer.push(self._visible(event))

    def _push_each(self, event: Event) -> str:
        """Token by token, because the one that completes a stop string ends the choice."""
        text = ""
        visible = len(self._visible(event))
        for index, token in enumerate(event.token_ids):
            self.completion_tokens += 1
            if index >= visible:
                break
            if event.logprobs:
                self._entries.append(entry(self._tokenizer, event.logprobs[index], self._offset))
            text += self._search(self._detokenizer.push((token,)))
            if self.finish is not None:
                break
        return text

    def _visible(self, event: Event) -> Sequence[int]:
        if event.stopped_by is None or self._params.include_stop_str_in_output:
            return event.token_ids
        return event.token_ids[:-1]

    def _search(self, text: str) -> str:
        self._offset += len(text)
        if self._stops is None or self.completion_tokens <= self._params.min_tokens:
            return text
        visible = self._stops.push(text)
        if self._stops.matched is not None:
            self.finish, self.stop_reason = "stop", self._stops.matched
        return visible

    def _flush(self) -> str:
        """The end of a choice that no stop string ended: nothing withheld may be lost."""
        text = self._search(self._detokenizer.flush())
        return text + (self._stops.flush() if self._stops is not None else "")


def entry(tokenizer: Tokenizer, logprobs: TokenLogprobs, offset: int) -> Entry:
    top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    return Entry(
        chosen=scored(tokenizer, logprobs.token_id, logprobs.logprob),
        top=tuple(scored(tokenizer, token, value) for token, value in top),
        offset=offset,
    )


def scored(tokenizer: Tokenizer, token_id: int, logprob: float) -> Scored:
    raw = tokenizer.piece_bytes(token_id)
    return Scored(token_id, token_text(raw), raw, logprob)
