"""What is told of every HTTP request: its id, one line in the log, and one span for the tracing backend.

1. `Journal` is the outermost layer. It gives the request a Record: the client's X-Request-Id if it is a plain one, else
   a fresh id, which every answer carries back, errors included.
2. The generating routes fill in what they learn (model, tokens, why each choice ended).
3. When the answer has been sent, or its client has gone, the Record becomes a log line and, where traces are exported,
   a span. Probes (health, metrics) are not worth a line, whether the answer is yes or not yet.

It knows no route's shapes, and the log no prompt and no text: they belong to the client.
"""

import logging
import re
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onechip.request import SamplingParams

log = logging.getLogger("onechip.access")

PLAIN_ID = re.compile(r"[\x21-\x7e]{1,128}")  # what may go back into a header and into a log line
CLIENT_GONE = 499  # nginx's number for an answer that nobody waited for


@dataclass
class Record:
    """One HTTP request. Times are of the monotonic clock, `began_ns` of the wall's, for the span."""

    request_id: str
    method: str
    path: str
    client: str
    trace: dict[str, str]
    began: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)
    status: int = CLIENT_GONE
    seconds: float = 0.0
    # What a generating route adds.
    operation: str | None = None
    answer_id: str | None = None
    model: str | None = None
    sampling: SamplingParams | None = None
    stream: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: list[str] = field(default_factory=list[str])
    first_token: float | None = None
    queued_s: float | None = None
    error: str | None = None

    def fields(self) -> dict[str, Any]:
        """The structured log line; generation's part only where there was one."""
        told: dict[str, Any] = {
            "request_id": self.request_id,
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(self.seconds, 6),
        }
        if self.error is not None:
            told["error"] = self.error
        if self.operation is not None:
            told |= {
                "id": self.answer_id,
                "model": self.model,
                "stream": self.stream,
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "finish": self.finish,
                "first_token_seconds": _span(self.began, self.first_token),
            }
        return told


class Tracing(Protocol):
    def span(self, record: Record) -> None: ...


class Journal:
    """The outermost ASGI layer. `quiet`: the paths of probes."""

    def __init__(
        self, app: ASGIApp, quiet: Collection[str], tracing: Tracing | None, *, access_log: bool
    ):
        self._app = app
        self._quiet = frozenset(quiet)
        self._tracing = tracing
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = open_record(scope)
        scope.setdefault("state", {})["record"] = record

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                name = (b"x-request-id", record.request_id.encode())
                message["headers"] = [*message.get("headers", ()), name]
            await send(message)

        try:
            await self._app(scope, receive, tell)
        finally:
            self._close(record)

    def _close(self, record: Record) -> None:
        record.seconds = time.monotonic() - record.began
        probe = record.path in self._quiet and record.status in (200, 503)
        if self._access_log and not probe:
            log.info("%s", describe(record), extra={"fields": record.fields()})
        if self._tracing is not None and record.operation is not None:
            self._tracing.span(record)


def open_record(scope: Scope) -> Record:
    headers = Headers(scope=scope)
    given = headers.get("x-request-id", "")
    client = scope.get("client")
    return Record(
        request_id=given if PLAIN_ID.fullmatch(given) else uuid.uuid4().hex,
        method=scope["method"],
        path=scope["path"],
        client=client[0] if client else "",
        trace={key: headers[key] for key in ("traceparent", "tracestate") if key in headers},
    )


def record_of(scope: Scope) -> Record:
    """The Record of a request; a fresh one where no Journal is around the application."""
    return scope.get("state", {}).get("record") or open_record(scope)


def describe(record: Record) -> str:
    """The line for people. The path is quoted: it is the client's."""
    path = record.path.encode("unicode_escape").decode()
    text = f"{record.method} {path} {record.status} in {record.seconds:.3f} s"
    if record.operation is not None:
        finish = ",".join(record.finish) or "unfinished"
        text += f", {record.prompt_tokens}+{record.completion_tokens} tokens, {finish}"
    return f"{text} [{record.request_id}]"


def _span(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)
