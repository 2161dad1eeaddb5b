"""Plain HTTP: bodies with a limit, JSON answers, OpenAI's error shape, API keys, and noticing that a client has gone.

It knows neither tokens nor routes.
"""

import asyncio
import hashlib
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

from onechip.errors import InvalidRequest, OnechipError, RequestTimeout, Unauthorized
from onechip.server.journal import record_of

log = logging.getLogger("onechip.server")

RETRY_AFTER_S = 1
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


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


def anthropic_error_body(error: OnechipError, request_id: str) -> dict[str, Any]:
    """Anthropic's shape; its types follow from the status."""
    kind = ANTHROPIC_ERRORS.get(error.status, "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }


def error_body_for(scope: Scope, error: OnechipError) -> dict[str, Any]:
    """The error in the dialect of the path that was asked."""
    record = record_of(scope)
    record.error = error.code
    if scope["path"].startswith(ANTHROPIC_PATH):
        return anthropic_error_body(error, record.request_id)
    return error_body(error)


def error_response(scope: Scope, error: OnechipError) -> Response:
    response = json_response(error_body_for(scope, error), error.status)
    if error.status in (429, 503):
        response.headers["retry-after"] = str(RETRY_AFTER_S)
    if isinstance(error, RequestTimeout):
        response.headers["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients heed it
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if error.status == 413:
        response.headers["connection"] = "close"
    return response


def on_error(request: Request, error: Exception) -> Response:
    """The handler of every exception that leaves a route before its answer has begun."""
    scope = request.scope
    if isinstance(error, OnechipError):
        return error_response(scope, error)
    if isinstance(error, HTTPException):
        known = OnechipError(error.detail, code=error.detail.lower().replace(" ", "_"))
        known.status, known.kind = error.status_code, "invalid_request_error"
        response = error_response(scope, known)
        response.headers.update(error.headers or {})
        return response
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody will read it
    broken = OnechipError("internal error; the server's log has the details", code="internal_error")
    return error_response(scope, broken)


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
    """Middleware: a request needs one of the keys, unless its path is open or it is a preflight.

    The key comes as `Authorization: Bearer KEY` (OpenAI's way) or as `x-api-key: KEY` (Anthropic's). What is compared,
    in constant time, are digests: not even the length of a key shows.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]):
        self._app = app
        self._keys = [_digest(key) for key in keys]
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        free = (
            scope["type"] != "http" or scope["method"] == "OPTIONS" or scope["path"] in self._open
        )
        if free or self._allows(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            error = Unauthorized(
                "missing or wrong API key; send Authorization: Bearer KEY, or x-api-key: KEY"
            )
            await error_response(scope, error)(scope, receive, send)

    def _allows(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
