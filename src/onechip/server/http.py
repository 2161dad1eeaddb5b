"""Plain HTTP: bodies with a limit, JSON answers, OpenAI's error shape, API keys, and noticing that a client has gone.

It knows neither tokens nor routes.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from onechip.errors import InvalidRequest, OnechipError, Unauthorized

log = logging.getLogger("onechip.server")

RETRY_AFTER_S = 1


class BadMediaType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_body(error: OnechipError) -> dict[str, Any]:
    """OpenAI's shape, all four keys always."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: OnechipError) -> Response:
    response = json_response(error_body(error), error.status)
    if error.status == 503:
        response.headers["retry-after"] = str(RETRY_AFTER_S)
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if error.status == 413:
        response.headers["connection"] = "close"
    return response


def on_error(_: Request, error: Exception) -> Response:
    """The handler of every exception that leaves a route before its answer has begun."""
    if isinstance(error, OnechipError):
        return error_response(error)
    if isinstance(error, HTTPException):
        known = OnechipError(error.detail, code=error.detail.lower().replace(" ", "_"))
        known.status, known.kind = error.status_code, "invalid_request_error"
        response = error_response(known)
        response.headers.update(error.headers or {})
        return response
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody will read it
    return error_response(OnechipError("internal error; the server's log has the details"))


async def read_json(request: Request, limit: int) -> bytes:
    """The raw body. Raises BadMediaType, BodyTooLarge, or ClientDisconnect."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise BadMediaType(f"content-type is {kind!r}; send application/json")
    too_large = BodyTooLarge(f"the body is larger than {limit} bytes (--max-body-bytes)")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


@asynccontextmanager
async def watch_client(receive: Receive, gone: Callable[[], None]) -> AsyncGenerator[None]:
    """Call `gone` when the client disconnects while the body of the `async with` runs."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class ApiKeys:
    """Middleware: a request needs one of the keys, unless its path is open or it is a preflight."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]):
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        free = (
            scope["type"] != "http" or scope["method"] == "OPTIONS" or scope["path"] in self._open
        )
        if free or self._allows(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, send)
        else:
            error = Unauthorized("missing or wrong API key; send Authorization: Bearer KEY")
            await error_response(error)(scope, receive, send)

    def _allows(self, header: str) -> bool:
        scheme, _, given = header.partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)
