"""From engine requests to text: all choices of one HTTP request, driven together.

It owns the bookkeeping between the engine client and the response shapes: which choice an event belongs to, when one
ends early because of a stop string, what is counted, and what becomes of the rest when the client goes.

1. Entering the Generation submits every choice; iterating yields, for each message of the engine, a list of
   (choice, delta). An engine error is raised: before the first yield it can still be an HTTP status.
2. A stop string aborts that choice in the engine; the others go on.
3. Leaving it, for whatever reason, aborts what has not ended and counts it as aborted.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol

from onechip.chat.output import ChoiceOutput, Delta
from onechip.chat.tokenizer import Tokenizer
from onechip.engine.client import Stream
from onechip.errors import (
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    NumericalError,
    OnechipError,
    Overloaded,
)
from onechip.request import EngineInfo, EngineStats, Event, Request, TokenLogprobs
from onechip.server.metrics import Metrics, Stopwatch


class EngineClient(Protocol):
    """What the server needs of an engine; `engine.client.RemoteEngine` is one."""

    stats: EngineStats

    @property
    def info(self) -> EngineInfo | None: ...
    @property
    def alive(self) -> bool: ...
    def open(self, requests: Sequence[Request]) -> Stream: ...


class ClientGone(Exception):
    """Nobody reads the answer any more. Not an error of anyone: it only unwinds."""


class Choice:
    """One choice: its request, its text so far, its clock. `index` is the client's, over all prompts.

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
    ):
        self.index = index
        self.request = request
        self.echo = echo
        self.silent = silent
        self.output = ChoiceOutput(tokenizer, request.sampling, offset=len(echo))
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
    """Use as a context manager and iterate; `prompt_tokens` counts each prompt once, whatever n is."""

    def __init__(
        self, engine: EngineClient, metrics: Metrics, choices: Sequence[Choice], prompt_tokens: int
    ):
        self.choices = choices
        self.prompt_tokens = prompt_tokens
        self._engine = engine
        self._metrics = metrics
        self._by_id: Mapping[str, Choice] = {choice.request.id: choice for choice in choices}
        self._stream: Stream | None = None
        self._accepted = False

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)

    def abandon(self) -> None:
        """The client has gone: wake the iteration with ClientGone."""
        if self._stream is not None:
            self._stream.fail(ClientGone())

    def __enter__(self) -> "Generation":
        self._stream = self._engine.open([choice.request for choice in self.choices])
        for choice in self.choices:
            choice.clock = Stopwatch(self._metrics)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._stream is not None
        self._stream.close()
        left = [choice for choice in self.choices if choice.output.finish is None]
        if self._accepted or isinstance(error, ClientGone):
            self._metrics.aborted.inc(len(left))

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[tuple[Choice, Delta]]:
        assert self._stream is not None
        events = await anext(self._stream)
        for event in events:
            if event.finish in ("error", "abort"):
                self._metrics.finished.labels(event.finish).inc()
                raise error_of(event)
        if not self._accepted:
            self._accepted = True
            self._metrics.prompt_tokens.inc(self.prompt_tokens)
        return self._deltas(events)

    def _deltas(self, events: Sequence[Event]) -> list[tuple[Choice, Delta]]:
        deltas: list[tuple[Choice, Delta]] = []
        counted = 0
        for event in events:
            choice = self._by_id[event.request_id]
            counted -= choice.completion_tokens
            deltas.append((choice, self._push(choice, event)))
            counted += choice.completion_tokens
        self._metrics.generation_tokens.inc(counted)
        return deltas

    def _push(self, choice: Choice, event: Event) -> Delta:
        assert choice.clock is not None
        assert self._stream is not None
        delta = choice.push(event)
        if event.token_ids:
            choice.clock.token()
        if delta.finish is not None:
            choice.clock.end(delta.finish, choice.completion_tokens)
            if event.finish is None:
                self._stream.abort(event.request_id)
        return delta


ERRORS: Mapping[str | None, type[OnechipError]] = {
    kind.code: kind
    for kind in (InvalidRequest, ContextLengthExceeded, Overloaded, EngineDead, NumericalError)
} | {"engine_failed": EngineDead, "engine_stopped": EngineDead}


def error_of(event: Event) -> OnechipError:
    """The typed error behind a terminal event; an abort nobody here asked for means the engine is stopping."""
    if event.finish == "abort":
        return EngineDead(event.error or "the request was aborted", code=event.error_code)
    kind = ERRORS.get(event.error_code, OnechipError)
    return kind(event.error or "the engine failed this request", code=event.error_code)
