"""From engine requests to text: all choices of one HTTP request, driven together.

It owns the bookkeeping between the engine client and the response shapes: which choice an event belongs to, when one
ends early because of a stop string, what is counted, and what becomes of the rest when the client goes.

1. Entering the Generation submits every choice; iterating yields, for each message of the engine, a list of
   (choice, delta). An engine error is raised: before the first yield it can still be an HTTP status.
2. A stop string aborts that choice in the engine; the others go on.
3. Leaving it, for whatever reason, aborts what has not ended and counts it as aborted.
4. A request's time limit raises RequestTimeout; `nudge_every` makes the iteration yield an empty list now and then.
"""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol

from onechip.chat.output import ChoiceOutput, Delta
from onechip.chat.reading import Reading
from onechip.chat.tokenizer import Tokenizer
from onechip.engine.client import Stream
from onechip.errors import (
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    NumericalError,
    OnechipError,
    Overloaded,
    RequestTimeout,
    ShuttingDown,
)
from onechip.request import EngineInfo, EngineStats, Event, Request, TokenLogprobs
from onechip.server.journal import Record
from onechip.server.metrics import Metrics, Stopwatch


class EngineClient(Protocol):
    """What the server needs of an engine; `engine.client.RemoteEngine` is one."""

    stats: EngineStats

    @property
    def info(self) -> EngineInfo | None: ...
    @property
    def alive(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    def open(self, requests: Sequence[Request]) -> Stream: ...


class ClientGone(Exception):
    """Nobody reads the answer any more. Not an error of anyone: it only unwinds."""


class Choice:
    """One choice: its request, its text so far, its clock. `index` is the client's, over all prompts.

    `reading`: how a chat's answer is read, None for plain text.
    `silent`: only the prompt is wanted (echo with max_tokens 0); the engine's one token is neither shown nor counted.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        *,
        echo: str = "",
        silent: bool = False,
        reading: Reading | None = None,
    ):
        self.index = index
        self.request = request
        self.echo = echo
        self.silent = silent
        self.output = ChoiceOutput(tokenizer, request.sampling, offset=len(echo), reading=reading)
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.clock: Stopwatch | None = None

    @property
    def completion_tokens(self) -> int:
        return 0 if self.silent else self.output.completion_tokens

    def push(self, event: Event) -> Delta:
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        delta = self.output.push(event)
        return Delta("", finish="length" if delta.finish else None) if self.silent else delta


class Generation:
    """Use as a context manager and iterate; `prompt_tokens` counts each prompt once, whatever n is.

    `record` is told what became of it; `limit_s` is the time it may take, None without limit.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        choices: Sequence[Choice],
        prompt_tokens: int,
        record: Record,
        limit_s: float | None = None,
    ):
        self.choices = choices
        self.prompt_tokens = prompt_tokens
        self._record = record
        self._limit_s = limit_s
        self._timers: list[asyncio.TimerHandle] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._engine = engine
        self._metrics = metrics
        self._by_id: Mapping[str, Choice] = {choice.request.id: choice for choice in choices}
        self._stream: Stream | None = None
        self._accepted = False

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int | None:
        """Of all choices; None where answers have no thoughts."""
        counts = [choice.output.reasoning_tokens for choice in self.choices]
        return None if None in counts else sum(count or 0 for count in counts)

    def abandon(self) -> None:
        """The client has gone: wake the iteration with ClientGone."""
        if self._stream is not None:
            self._stream.fail(ClientGone())

    def nudge_every(self, seconds: float) -> None:
        """From now on the iteration yields an empty list this often, too; 0 is never."""
        if seconds:
            self._timers.append(
                asyncio.get_running_loop().call_later(seconds, self._nudge, seconds)
            )

    def _nudge(self, seconds: float) -> None:
        assert self._stream is not None
        self._stream.nudge()
        self._timers.clear()
        self.nudge_every(seconds)

    def __enter__(self) -> "Generation":
        stream = self._engine.open([choice.request for choice in self.choices])
        self._stream = stream
        for choice in self.choices:
            choice.clock = Stopwatch(self._metrics, len(choice.request.prompt_ids))
        if self._limit_s is not None:
            error = RequestTimeout(f"the answer was not complete after {self._limit_s:g} s")
            self._deadline = asyncio.get_running_loop().call_later(
                self._limit_s, stream.fail, error
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._stream is not None
        self._stream.close()
        for timer in (*self._timers, self._deadline):
            if timer is not None:
                timer.cancel()
        left = [choice for choice in self.choices if choice.output.finish is None]
        if self._accepted or not isinstance(error, REFUSALS):
            ours = isinstance(error, OnechipError) and not isinstance(error, RequestTimeout)
            for choice in left:
                self._end(choice, "error" if ours else "abort")
        self._fill_in(error)

    def _fill_in(self, error: BaseException | None) -> None:
        record = self._record
        record.prompt_tokens = self.prompt_tokens if self._accepted else 0
        record.completion_tokens = self.completion_tokens
        record.finish = [choice.output.finish or "abort" for choice in self.choices]
        clocks = [choice.clock for choice in self.choices if choice.clock is not None]
        record.first_token = min((c.first for c in clocks if c.first is not None), default=None)
        record.queued_s = min((c.queued_s for c in clocks if c.first is not None), default=None)
        if isinstance(error, OnechipError):
            record.error = error.code

    def _end(self, choice: Choice, reason: str) -> None:
        assert choice.clock is not None
        choice.clock.end(reason, choice.completion_tokens)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[tuple[Choice, Delta]]:
        assert self._stream is not None
        events = await anext(self._stream)
        if not events:
            return []
        for event in events:
            if event.finish in ("error", "abort"):
                raise error_of(event)
        if not self._accepted:
            self._accepted = True
            self._metrics.prompt_tokens += self.prompt_tokens
        return self._deltas(events)

    def _deltas(self, events: Sequence[Event]) -> list[tuple[Choice, Delta]]:
        deltas: list[tuple[Choice, Delta]] = []
        counted = 0
        for event in events:
            choice = self._by_id[event.request_id]
            counted -= choice.completion_tokens
            deltas.append((choice, self._push(choice, event)))
            counted += choice.completion_tokens
        self._metrics.generation_tokens += counted
        return deltas

    def _push(self, choice: Choice, event: Event) -> Delta:
        assert choice.clock is not None
        assert self._stream is not None
        delta = choice.push(event)
        if event.token_ids:
            choice.clock.tokens(len(event.token_ids), event.queued_s)
        if delta.finish is not None:
            self._end(choice, delta.finish)
            if event.finish is None:
                self._stream.abort(event.request_id)
        return delta


REFUSALS = (
    InvalidRequest,
    Overloaded,
    ShuttingDown,
)  # before a first token: never begun, so not counted as ended
ERRORS: Mapping[str | None, type[OnechipError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        ContextLengthExceeded,
        Overloaded,
        EngineDead,
        NumericalError,
        ShuttingDown,
    )
} | {"engine_failed": EngineDead, "engine_stopped": EngineDead}


def error_of(event: Event) -> OnechipError:
    """The typed error behind a terminal event; an abort nobody here asked for means the engine is stopping."""
    if event.finish == "abort":
        return EngineDead(event.error or "the request was aborted", code=event.error_code)
    kind = ERRORS.get(event.error_code, OnechipError)
    message = event.error or "the engine failed this request"
    return kind(message, param=event.error_param, code=event.error_code)
