"""One choice, from token events to what a client reads: text deltas, log probability entries and why it ended.

Streaming and whole answers use the same object, which is why they cannot differ. It knows no HTTP shapes. Rules:
- Text is visible as soon as it is certain: whole characters, outside any possible stop string.
- A stop id that ended the choice is counted but shows no text and no log probability entry, unless
  include_stop_str_in_output (as in vLLM, where that field covers stop tokens too).
- A stop string ends the choice with "stop": `stop_hit` tells the caller to abort the engine request. Tokens are
  counted, and have entries, up to the one that completed the stop string.
- Stop strings are not looked for in the text of the first min_tokens tokens.
- Entries travel with the delta that follows them: a delta that shows nothing has none, except the last.

With a `Reading` (a dialect with thoughts and calls) the text goes through the state machine, and:
- Stop strings are looked for in content only, never in thoughts or calls, and never across them.
- `finish` is "tool_calls" if a whole call was made and the model ended (a stop id, or the one call that was allowed).
- Control tokens of the dialect never show, whatever skip_special_tokens says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from onechip.chat.detokenize import Detokenizer, token_text
from onechip.chat.parser import Filter
from onechip.chat.parts import Content, Part
from onechip.chat.reading import Reader, Reading
from onechip.chat.stops import StopMatcher
from onechip.chat.tokenizer import Tokenizer
from onechip.request import Event, FinishReason, SamplingParams, TokenLogprobs

Finish = FinishReason | Literal["tool_calls"]


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
    """What is new: text (content), entries, and at the end why it ended.

    `parts` is everything new in order, empty where that is content alone: `pieces` is right in both cases.
    """

    text: str
    entries: tuple[Entry, ...] = ()
    finish: Finish | None = None
    stop_hit: bool = False
    parts: tuple[Part, ...] = ()

    @property
    def pieces(self) -> tuple[Part, ...]:
        return self.parts or ((Content(self.text),) if self.text else ())


class ChoiceOutput:
    """Feed events with `push` until a delta has `finish`. `offset`: length of text that precedes (an echoed prompt)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        offset: int = 0,
        reading: Reading | None = None,
    ):
        self.completion_tokens = 0
        self.stop_reason: str | int | None = None
        self.finish: Finish | None = None
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
        self._reader = (
            Reader(
                reading,
                tokenizer,
                Filter(self._search, self._release),
                skip_special=params.skip_special_tokens,
            )
            if reading is not None and reading.controls
            else None
        )

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of thoughts, their control tokens and labels included; None where there are no thoughts."""
        return None if self._reader is None else self._reader.reasoning_tokens

    def push(self, event: Event) -> Delta:
        """The delta of one event; the event's finish must be None, "stop" or "length"."""
        assert self.finish is None
        stepwise = self._stops is not None or self._params.logprobs is not None
        if self._reader is not None:
            return self._read(self._reader, event, stepwise)
        text = self._push_each(event) if stepwise else self._push_all(event)
        stop_hit = self.finish is not None
        if event.finish is not None and not stop_hit:
            self.finish, self.stop_reason = event.finish, event.stopped_by
            text += self._flush()
        return Delta(text, self._take_entries(bool(text)), self.finish, stop_hit)

    def _take_entries(self, shown: bool) -> tuple[Entry, ...]:
        if not self._entries or not (shown or self.finish):
            return ()
        entries, self._entries = tuple(self._entries), []
        return entries

    def _read(self, reader: Reader, event: Event, stepwise: bool) -> Delta:
        """The same through the state machine."""
        if not stepwise and event.finish is None:
            text = reader.plain(event.token_ids)
            if text is not None:
                self.completion_tokens += len(event.token_ids)
                return Delta(text)
        if stepwise or not reader.uniform(event.token_ids):
            self._read_each(reader, event)
        else:
            self.completion_tokens += len(event.token_ids)
            reader.push(self._visible(event))
        stop_hit = self.finish is not None
        stopped = self.finish == "tool_calls"
        if event.finish is not None and not stop_hit:
            stopped = event.finish == "stop"
            self.stop_reason = event.stopped_by
        if stop_hit or event.finish is not None:
            reader.end(stopped=stopped)
        if event.finish is not None and self.finish is None:
            self.finish = "tool_calls" if stopped and reader.called else event.finish
        parts = reader.take()
        text = "".join(part.text for part in parts if isinstance(part, Content))
        entries = self._take_entries(bool(parts))
        parts = () if len(parts) == 1 and text else parts
        return Delta(text, entries, self.finish, stop_hit, parts)

    def _read_each(self, reader: Reader, event: Event) -> None:
        for token in self._each(event):
            reader.push((token,))
            if self.finish is None and reader.full:
                self.finish = "tool_calls"

    def _push_all(self, event: Event) -> str:
        self.completion_tokens += len(event.token_ids)
        return self._detokenizer.push(self._visible(event))

    def _push_each(self, event: Event) -> str:
        """Token by token, because the one that completes a stop string ends the choice."""
        return "".join(
            self._search(self._detokenizer.push((token,))) for token in self._each(event)
        )

    def _each(self, event: Event) -> Iterator[int]:
        """The visible tokens, counted and with their entries made, until what is done with one ends the choice."""
        visible = len(self._visible(event))
        for index, token in enumerate(event.token_ids):
            self.completion_tokens += 1
            if index >= visible:
                break
            if event.logprobs:
                self._entries.append(entry(self._tokenizer, event.logprobs[index], self._offset))
            yield token
            if self.finish is not None:
                break

    def _visible(self, event: Event) -> Sequence[int]:
        if event.stopped_by is None or self._params.include_stop_str_in_output:
            return event.token_ids
        return event.token_ids[:-1]

    def _search(self, text: str) -> str:
        if self._stops is not None and self._stops.matched is not None:
            return ""  # the rest of the token that completed it
        self._offset += len(text)
        if self._stops is None or self.completion_tokens <= self._params.min_tokens:
            return text
        visible = self._stops.push(text)
        if self._stops.matched is not None:
            self.finish, self.stop_reason = "stop", self._stops.matched
        return visible

    def _flush(self) -> str:
        """The end of a choice that no stop string ended: nothing withheld may be lost."""
        return self._search(self._detokenizer.flush()) + self._release()

    def _release(self) -> str:
        return self._stops.flush() if self._stops is not None else ""


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
