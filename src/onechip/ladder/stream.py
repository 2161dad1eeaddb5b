"""What a server's stream says, and when: the marks of one answer.

Owns the events of both OpenAI routes, streamed and whole, and what counts as text. Sends nothing and computes nothing.

1. Every event is dated when its bytes arrive (`http`). A **text chunk** carries text, reasoning or a piece of a tool
   call; a first chunk that only names the role is not one. `first_text` is the first of them.
2. The **finish chunk** is the one with a finish reason. The clock stops there: a usage chunk or [DONE] after it costs
   the user nothing. Tokens that show as no text (after an end-of-sequence that was ignored, or half of a character)
   move neither mark, and usage counts them.
3. `usage` is the last one the server sent. Without one the number of tokens is unknown, never guessed from chunks.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from onechip.ladder.http import Failed, FailureKind

Json = dict[str, Any]


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the server gave them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Failure(msgspec.Struct, frozen=True):
    """Why a request has no good answer; the kinds are those of `http.Failed`."""

    kind: FailureKind
    message: str
    status: int | None = None


@dataclass(frozen=True)
class ToolCall:
    """A call as it came: the arguments are the server's text, valid JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """What one request gave. Times are `perf_counter` seconds, None where the moment never came.

    `arrivals` has the time of every text chunk, `counts` the tokens in each where the server says (token ids, log
    probabilities or running usage), else 0. `logprobs` are the server's objects, untouched.
    """

    sent: float
    first_byte: float | None = None
    first_text: float | None = None
    finish: float | None = None
    arrivals: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    logprobs: tuple[Any, ...] = ()
    raw: Json | None = None
    error: Failure | None = None
    id: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None

    def plain(self) -> Usage:
        given, made = self.prompt_tokens_details, self.completion_tokens_details
        return Usage(
            self.prompt_tokens,
            self.completion_tokens or 0,
            given.cached_tokens if given else None,
            made.reasoning_tokens if made else None,
        )


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | Json | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Any = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Collector:
    """Turns the pieces of one body into an Answer. `piece` is called by the connection, once per read."""

    def __init__(self) -> None:
        self.rest = b""
        self.first_text: float | None = None
        self.finish: float | None = None
        self.arrivals: list[float] = []
        self.counts: list[int] = []
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, ToolCall] = {}
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.logprobs: list[Any] = []
        self.done = False
        self.id = ""

    def piece(self, body: bytes, now: float) -> None:
        """Take bytes that arrived at `now`; events may be split or joined anywhere. Raises Failed."""
        data = self.rest + body if self.rest else body
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self.rest = data.split(b"\n\n")
        for event in events:
            self._event(event, now)

    def _event(self, event: bytes, now: float) -> None:
        if event.startswith(b"data: ") and b"\n" not in event:
            data = event[6:]
        else:
            lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
            data = b"\n".join(line[5:].removeprefix(b" ") for line in lines)
        if data == b"[DONE]":
            self.done = True
        elif data:
            self._chunk(decoded(data), now)

    def _chunk(self, chunk: _Chunk, now: float) -> None:
        if chunk.error is not None:
            raise Failed("broken", f"the server ended the stream: {error_text(chunk.error)}")
        self.id = self.id or chunk.id or ""
        before = self.usage.completion_tokens if self.usage else 0
        if chunk.usage is not None:
            self.usage = chunk.usage.plain()
        for choice in chunk.choices:
            tokens = self.usage.completion_tokens - before if chunk.usage and self.usage else 0
            self._choice(choice, now, tokens)

    def _choice(self, choice: _Choice, now: float, tokens: int) -> None:
        if self._take(choice.delta or choice.message, choice.text):
            if self.first_text is None:
                self.first_text = now
            self.arrivals.append(now)
            self.counts.append(_token_count(choice) or tokens)
        if choice.logprobs is not None:
            self.logprobs.append(choice.logprobs)
        if choice.finish_reason is not None:
            self.finish, self.finish_reason = now, choice.finish_reason

    def _take(self, delta: _Delta | None, text: str | None) -> bool:
        """Keep what a chunk says; whether it says anything."""
        if delta is None:
            if text:
                self.text.append(text)
            return bool(text)
        thought = delta.reasoning_content or delta.reasoning
        if thought:
            self.reasoning.append(thought)
        if delta.content:
            self.text.append(delta.content)
        for call in delta.tool_calls or ():
            self._call(call)
        return bool(thought or delta.content or delta.tool_calls)

    def _call(self, piece: _Call) -> None:
        """Join a call's pieces by index; a server that numbers none sends whole calls."""
        key = len(self.calls) if piece.index is None else piece.index
        old = self.calls.get(key, ToolCall("", "", ""))
        function = piece.function or _Function()
        said = function.arguments or ""
        arguments = said if isinstance(said, str) else msgspec.json.encode(said).decode()
        name = old.name + (function.name or "")
        self.calls[key] = ToolCall(old.id or piece.id or "", name, old.arguments + arguments)

    def whole(self, body: bytes, now: float) -> None:
        """Take an answer that was not streamed: it has an end and no first text. Raises Failed."""
        chunk = decoded(body)
        if chunk.error is not None:
            raise Failed("broken", error_text(chunk.error))
        self.id, self.usage = chunk.id or "", chunk.usage.plain() if chunk.usage else None
        for choice in chunk.choices[:1]:
            self._take(choice.message, choice.text)
            self.logprobs = [] if choice.logprobs is None else [choice.logprobs]
            self.finish, self.finish_reason = now, choice.finish_reason

    def answer(self, sent: float, first_byte: float | None) -> Answer:
        return Answer(
            sent=sent,
            first_byte=first_byte or None,
            first_text=self.first_text,
            finish=self.finish,
            arrivals=tuple(self.arrivals),
            counts=tuple(self.counts),
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(self.calls[index] for index in sorted(self.calls)),
            finish_reason=self.finish_reason,
            usage=self.usage,
            logprobs=tuple(self.logprobs),
            id=self.id,
        )


def decoded(data: bytes) -> _Chunk:
    """One chunk or whole answer. Raises Failed("malformed")."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Failed("malformed", f"{error}: {data[:200]!r}") from None


def _token_count(choice: _Choice) -> int:
    if choice.token_ids is not None:
        return len(choice.token_ids)
    if isinstance(choice.logprobs, dict):
        entries = choice.logprobs.get("content") or choice.logprobs.get("tokens") or ()
        return len(entries)
    return 0


def error_text(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error)
