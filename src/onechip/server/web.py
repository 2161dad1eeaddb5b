"""The web page at /: the files of `server/page`, and the numbers its header shows.

Owns which files are served, under which headers, and `/page/status`. Everything here is open even where the API needs a
key, since the page is where a person types the key; the status tells no more than /metrics does. The policy allows the
page to load from and speak to this server only, whatever a model writes into it. There is no build step: what is in the
directory is what the browser gets.
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from onechip import __version__
from onechip.server.http import json_response
from onechip.server.routes import Service

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # kept, but asked for again: a new version shows at once, an old one costs a 304
}
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
STATUS_PATH = "/page/status"


@dataclass(frozen=True)
class PageFile:
    """One file as it is sent: where, what, and the tag that changes with its bytes."""

    path: str
    media_type: str
    body: bytes
    etag: str


def page_files() -> tuple[PageFile, ...]:
    """Every file of the page: index.html at /, the others at /page/NAME."""
    directory = files("onechip.server") / "page"
    entries = sorted(directory.iterdir(), key=lambda entry: entry.name)
    return tuple(_page_file(entry.name, entry.read_bytes()) for entry in entries)


def _page_file(name: str, body: bytes) -> PageFile:
    suffix = name[name.rindex(".") :]
    path = "/" if name == "index.html" else f"/page/{name}"
    return PageFile(path, MEDIA_TYPES[suffix], body, f'"{hashlib.sha256(body).hexdigest()[:16]}"')


def page_routes(service: Service) -> list[Route]:
    """The routes of the page; all of them are open."""
    status = Route(STATUS_PATH, partial(page_status, service), methods=["GET"])
    return [status, *(Route(file.path, _sender(file), methods=["GET"]) for file in page_files())]


def _sender(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        headers = {**HEADERS, "etag": file.etag}
        known = request.headers.get("if-none-match", "")
        if file.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)

    return send


async def page_status(service: Service, _: Request) -> Response:
    """What the page's header shows. `state`: ready, starting (it will be), draining or gone (it will not be again)."""
    engine = service.engine
    info, stats = engine.info, engine.stats
    up = "draining" if engine.draining else "ready"
    down = "starting" if info is None else "gone"
    body: dict[str, Any] = {
        "state": up if engine.alive else down,
        "model": service.model_names[0],
        "version": __version__,
        "chat": service.template is not None,
        "defaults": dict(service.defaults),
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_usage": stats.kv_usage,
        "engine": None
        if info is None
        else {
            "device": info.device,
            "dtype": info.dtype,
            "context": info.max_model_len,
            "max_seqs": info.max_seqs,
            "kv_tokens": info.kv_tokens,
        },
    }
    response = json_response(body)
    response.headers["cache-control"] = "no-store"
    return response
