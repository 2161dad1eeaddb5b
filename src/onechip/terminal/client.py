"""An OpenAI-compatible server over HTTP, as a terminal needs it: one streamed answer at a time, by the stdlib.

Owns addresses, headers and the reading of server-sent events. A request ends early when its iterator is closed: the
connection goes, which is how a server learns that nobody reads the answer. What fails is a `ChatFailure` that says what
to do about it.
"""

import http.client
import json
import ssl
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from onechip.errors import OnechipError, StartupError

CONNECT_S = 10.0
REMEDIES = {
    401: "give the server's key with --api-key or ONECHIP_API_KEY",
    403: "give a key that is allowed this, with --api-key or ONECHIP_API_KEY",
    404: "is this the address of an OpenAI-compatible server, and does it serve this model (--model)?",
    429: "the server is busy; try again in a moment (/retry)",
    503: "the server is loading, busy or ending; try again in a moment (/retry)",
}


class ChatFailure(OnechipError):
    """An answer that did not come: the server could not be reached, refused, or broke off."""

    code = "chat_failed"


@dataclass(frozen=True)
class Server:
    """Where to ask. `base` has no trailing slash and ends in /v1 unless the user's address has a path of its own."""

    base: str
    key: str | None = None


@dataclass(frozen=True)
class Chunk:
    """What one event of a stream brings."""

    text: str = ""
    thought: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    finish: str | None = None
    usage: dict[str, int] | None = None


def server_at(url: str, key: str | None) -> Server:
    """The server a user names: host:port, http://host:port or the address of its /v1."""
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    try:
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise StartupError(f"--url {url}: not an address like http://127.0.0.1:8000")
    path = parts.path.rstrip("/") or "/v1"
    return Server(f"{parts.scheme}://{parts.netloc}{path}", key)


def first_model(server: Server) -> str:
    """The id of the first model the server lists."""
    with _request(server, "GET", "/models") as response:
        try:
            return str(json.loads(response.read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ChatFailure(
                f"{server.base}/models lists no model; name one with --model"
            ) from error


def stream_chat(server: Server, body: dict[str, Any]) -> Generator[Chunk]:
    """The chunks of one answer. Closing the generator drops the connection and so ends the request."""
    with _request(server, "POST", "/chat/completions", body) as response:
        for data in _events(response):
            if data == "[DONE]":
                return
            yield _chunk(data)
    raise ChatFailure("the answer broke off: the connection ended early; try again (/retry)")


@contextmanager
def _request(
    server: Server, method: str, path: str, body: dict[str, Any] | None = None
) -> Generator[http.client.HTTPResponse]:
    headers = {"Accept": "application/json, text/event-stream"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if server.key:
        headers["Authorization"] = f"Bearer {server.key}"
    parts = urlsplit(server.base)
    with closing(_connection(parts.scheme, parts.netloc)) as connection:
        try:
            connection.connect()
            connection.sock.settimeout(
                None
            )  # a first token may take minutes; Ctrl-C is always there
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, parts.path + path, payload, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response.status, response.read())
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ChatFailure(f"{server.base}: {_reason(error)}; is the server running?") from error


def _connection(scheme: str, netloc: str) -> http.client.HTTPConnection:
    if scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(netloc, timeout=CONNECT_S, context=context)
    return http.client.HTTPConnection(netloc, timeout=CONNECT_S)


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text)


def _refusal(status: int, raw: bytes) -> ChatFailure:
    """The server's own words, whatever their shape, and what to do."""
    try:
        found: Any = json.loads(raw)
        found = found.get("error", found)
        message = found["message"] if isinstance(found, dict) else str(found)
    except (ValueError, LookupError, AttributeError):
        message = raw.decode(errors="replace").strip()[:200] or http.client.responses.get(status)
    remedy = REMEDIES.get(status)
    return ChatFailure(f"{message} (HTTP {status}){f'; {remedy}' if remedy else ''}")


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event."""
    data: list[str] = []
    while line := response.readline():
        text = line.decode(errors="replace").rstrip("\r\n")
        if text.startswith("data:"):
            data.append(text[5:].removeprefix(" "))
        elif not text and data:
            yield "\n".join(data)
            data.clear()
    if data:
        yield "\n".join(data)


def _chunk(data: str) -> Chunk:
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise ChatFailure(f"the server sent an event that is not JSON: {data[:80]!r}") from error
    if event.get("error"):
        problem = event["error"]
        raise ChatFailure(problem.get("message", "error") if isinstance(problem, dict) else problem)
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return Chunk(
        text=delta.get("content") or "",
        thought=delta.get("reasoning_content") or delta.get("reasoning") or "",
        calls=tuple(delta.get("tool_calls") or ()),
        finish=choices[0].get("finish_reason"),
        usage=event.get("usage"),
    )
