"""How a generation becomes an HTTP answer, whole or as server-sent events, whatever its shape.

1. The first event of the engine is awaited before anything is written, so what it refuses is an HTTP error. Only when
   that takes longer than the ping interval (a long prefill, a long queue) does the stream begin, with a comment.
2. After that one write is made for each message of the engine that concerns this request.
3. A Writer says it in its dialect. `Chunks` is OpenAI's: the stream ends with the usage chunk (if asked for) and
   `data: [DONE]`; an error after the first byte is one event.
4. A client that goes makes the generation raise ClientGone, which aborts it and ends here.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onechip.chat.output import Delta, Entry, Finish
from onechip.chat.parts import Gathered, Part
from onechip.errors import OnechipError
from onechip.server.generation import Choice, ClientGone, Generation
from onechip.server.http import error_body, json_response, watch_client

log = logging.getLogger("onechip.server")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment: every client ignores it
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
encode = msgspec.json.Encoder().encode


@dataclass
class Whole:
    """Everything one choice said: its sum, and the parts in order."""

    said: Gathered = field(default_factory=Gathered)
    parts: list[Part] = field(default_factory=list[Part])
    entries: list[Entry] = field(default_factory=list[Entry])
    finish: Finish | None = None

    @property
    def text(self) -> str:
        return self.said.content

    def add(self, delta: Delta) -> None:
        self.said.add(delta.pieces)
        self.parts.extend(delta.pieces)
        self.entries.extend(delta.entries)
        self.finish = delta.finish


class Shape(Protocol):
    """The JSON of one route. Choices come out as the inside of `"choices":[...]`, one element each."""

    head: bytes

    def opening(self, choice: Choice) -> bytes | None:
        """What precedes a choice's first delta, if anything."""
        ...

    def chunks(self, choice: Choice, delta: Delta) -> Sequence[bytes]:
        """A delta, in order; several where clients expect one thing a chunk."""
        ...

    def whole(self, generation: Generation, choices: list[tuple[Choice, Whole]]) -> dict[str, Any]:
        """The answer without `usage`."""
        ...


def usage_of(generation: Generation) -> dict[str, Any]:
    """OpenAI's `usage`; with details where the dialect has thoughts."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    thought = generation.reasoning_tokens
    if thought is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": thought}
    return usage


def event_head(identity: dict[str, Any]) -> bytes:
    """`data: {...,"choices":[` of every chunk of a stream: encoded once."""
    return b"data: " + encode(identity)[:-1] + b',"choices":['


class Writer(Protocol):
    """One generation in one dialect. Everything but `whole` is server-sent events."""

    ping: bytes

    def opening(self) -> bytes:
        """What comes before all else."""
        ...

    def deltas(self, deltas: Sequence[tuple[Choice, Delta]]) -> bytes: ...
    def closing(self) -> bytes: ...
    def failure(self, error: OnechipError) -> bytes:
        """The end instead of `closing`."""
        ...

    def whole(self, said: list[tuple[Choice, Whole]]) -> dict[str, Any]:
        """The answer in one piece."""
        ...


class WholeAnswer(Response):
    """The JSON answer, sent when every choice has ended."""

    def __init__(self, generation: Generation, writer: Writer):
        super().__init__()
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        said: defaultdict[int, Whole] = defaultdict(Whole)
        try:
            with self._generation as generation:
                async with watch_client(receive, generation.abandon):
                    async for deltas in generation:
                        for choice, delta in deltas:
                            said[choice.index].add(delta)
        except ClientGone:
            return
        choices = [(choice, said[choice.index]) for choice in self._generation.choices]
        await json_response(self._writer.whole(choices))(scope, receive, send)


class StreamedAnswer(Response):
    """The answer as server-sent events."""

    def __init__(self, generation: Generation, writer: Writer, ping_s: float = 0.0):
        super().__init__()
        self._generation = generation
        self._writer = writer
        self._ping_s = ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._generation as generation:
                generation.nudge_every(self._ping_s)
                async with watch_client(receive, generation.abandon):
                    first = await anext(generation)
                    await send(
                        {"type": "http.response.start", "status": 200, "headers": SSE_HEADERS}
                    )
                    await self._events(first, send)
        except ClientGone:
            return

    async def _events(self, deltas: list[tuple[Choice, Delta]] | None, send: Send) -> None:
        writer, held = self._writer, self._writer.opening()
        try:
            while deltas is not None:
                events = held + (writer.deltas(deltas) if deltas else writer.ping)
                held = b""
                if events:
                    await _write(send, events)
                deltas = await anext(self._generation, None)
            last = writer.closing()
        except ClientGone:
            raise
        except OnechipError as error:
            last = held + writer.failure(error)
        except Exception:
            log.exception("a stream broke")
            last = held + writer.failure(
                OnechipError("internal error; the server's log has the details")
            )
        await _write(send, last, more=False)


class Chunks:
    """OpenAI's stream. `usage`: "none", "last" (one final chunk) or "each" (running totals in every chunk too)."""

    ping = PING

    def __init__(self, generation: Generation, shape: Shape, usage: str):
        self._generation = generation
        self._shape = shape
        self._usage = usage
        self._opened: set[int] = set()

    def opening(self) -> bytes:
        return b""

    def deltas(self, deltas: Sequence[tuple[Choice, Delta]]) -> bytes:
        """The chunks of each choice with something to show, in one write."""
        parts: list[bytes] = []
        for choice, delta in deltas:
            if choice.index not in self._opened:
                self._opened.add(choice.index)
                opening = self._shape.opening(choice)
                if opening is not None:
                    parts += (self._shape.head, opening, self._tail())
            if delta.text or delta.finish or delta.entries or delta.parts:
                for chunk in self._shape.chunks(choice, delta):
                    parts += (self._shape.head, chunk, self._tail())
        return b"".join(parts)

    def closing(self) -> bytes:
        if self._usage == "none":
            return DONE
        return (
            self._shape.head + b'],"usage":' + encode(usage_of(self._generation)) + b"}\n\n" + DONE
        )

    def failure(self, error: OnechipError) -> bytes:
        return b"data: " + encode(error_body(error)) + b"\n\n" + DONE

    def whole(self, said: list[tuple[Choice, Whole]]) -> dict[str, Any]:
        return self._shape.whole(self._generation, said) | {"usage": usage_of(self._generation)}

    def _tail(self) -> bytes:
        if self._usage == "none":
            return b"]}\n\n"
        usage = encode(usage_of(self._generation)) if self._usage == "each" else b"null"
        return b'],"usage":' + usage + b"}\n\n"


async def _write(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
