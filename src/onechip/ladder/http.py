"""HTTP/1.1 as a stopwatch needs it: the time of every piece of a body is taken where the bytes arrive.

Owns connections and their reuse, framing (httptools, a C parser), time limits and the kinds of failure. Knows nothing
of JSON or of what a body says.

A general client wakes a task for every piece it receives, which costs 30 to 50 us of a core and dates the piece by when
the task ran. Here a piece goes from the socket's callback through the parser to the consumer in one call, dated before
any of it. That is what lets one process follow 20,000 pieces a second and still be idle most of the time.

No proxies, no redirects, no compression: each would blur what is measured. A connection that the server closed while it
lay idle is replaced once, silently; `sent` is when the request was written to an open connection, so opening one is
never part of a latency.
"""

import asyncio
import ssl
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

import httptools

from onechip.errors import StartupError

FailureKind = Literal["connect", "timeout", "status", "broken", "malformed"]
T = TypeVar("T")
OnPiece = Callable[[bytes, float], None]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end on the fastest event loop there is: uvloop, where it can be installed."""
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    return uvloop.run(work)


class BadUrl(StartupError):
    """The address of a server is not one."""


class Failed(Exception):
    """One request had no good answer. `kind` says where it ended; `status` is the HTTP status if one came.

    connect: no connection. timeout: not finished in time. status: refused with an HTTP status from 400 on.
    broken: the connection or the stream ended early. malformed: bytes that are no HTTP, or no JSON of the right shape.
    """

    def __init__(self, kind: FailureKind, message: str, status: int | None = None):
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message = message
        self.status = status


@dataclass(frozen=True)
class Address:
    """Where a server listens; `root` and `api` are the path prefixes of its own and of OpenAI's routes."""

    host: str
    port: int
    tls: bool
    root: str
    api: str


def parse_address(url: str) -> Address:
    """`http://host:8000`, the same with `/v1`, or with any prefix before it. Raises BadUrl."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        raise BadUrl(f"{url!r} has no valid port; give one from 1 to 65535") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadUrl(f"{url!r} is no http:// or https:// address, such as http://127.0.0.1:8000")
    tls = parts.scheme == "https"
    root = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.hostname, port or (443 if tls else 80), tls, root, f"{root}/v1")


@dataclass
class Reply:
    """One HTTP answer. Times are `perf_counter` seconds; `body` is empty where a consumer took the pieces."""

    sent: float = 0.0
    first: float = 0.0
    end: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.reply = Reply()
        self.pieces: list[bytes] = []
        self.on_piece: OnPiece | None = None
        self.done: asyncio.Future[None] | None = None
        self.now = 0.0
        self.framed = False
        self.headed = False
        self.keep = False

    @property
    def open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    async def exchange(
        self, request: bytes, reply: Reply, on_piece: OnPiece | None, limit: float
    ) -> None:
        """Send and fill `reply`; `on_piece` takes a good answer's body as it comes. Raises Failed."""
        assert self.transport is not None
        self.parser = httptools.HttpResponseParser(self)
        self.reply, self.pieces, self.on_piece = reply, [], on_piece
        self.framed = self.headed = self.keep = False
        loop = asyncio.get_running_loop()
        self.done = loop.create_future()
        timer = loop.call_later(limit, self._expire, limit)
        self.reply.sent = perf_counter()
        self.transport.write(request)
        try:
            await self.done
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
            self.done = None
        if not self.keep:
            self.close()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _expire(self, limit: float) -> None:
        self._fail(Failed("timeout", f"no complete answer within {limit:g} s"))

    def _fail(self, error: Exception) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(error)

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        self.now = perf_counter()
        if self.done is None or self.done.done():
            self.close()  # nobody asked
            return
        self.reply.first = self.reply.first or self.now
        try:
            self.parser.feed_data(data)
        except Failed as error:
            self._fail(error)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            cause = error.__context__
            self._fail(
                cause if isinstance(cause, Failed) else Failed("malformed", f"not HTTP: {error}")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.now = perf_counter()
        if self.headed and not self.framed:
            self.on_message_complete()  # a body without a length ends with the connection
        self._fail(Failed("broken", f"the server closed the connection: {exc or 'end of data'}"))

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        self.reply.headers[key] = value.decode("latin-1")
        self.framed = self.framed or key in ("content-length", "transfer-encoding")

    def on_headers_complete(self) -> None:
        self.reply.status = self.parser.get_status_code()
        self.headed = True

    def on_body(self, body: bytes) -> None:
        if self.on_piece is not None and self.reply.status < 400:
            self.on_piece(body, self.now)
        else:
            self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.reply.end = self.now
        self.keep = self.parser.should_keep_alive()  # afterwards the parser has forgotten
        self.reply.body = b"".join(self.pieces)
        if self.done is not None and not self.done.done():
            self.done.set_result(None)


class Pool:
    """Connections to one server, kept open between requests; the longest idle is used last."""

    def __init__(self, address: Address, headers: Mapping[str, str], connect_timeout: float):
        self.address = address
        self.connect_timeout = connect_timeout
        self._idle: list[Connection] = []
        self._headers = _head(address, headers)
        self._tls = ssl.create_default_context() if address.tls else None

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        on_piece: OnPiece | None = None,
        timeout: float = 600.0,
        reply: Reply | None = None,
    ) -> Reply:
        """One request and its answer, whatever the status. Raises Failed when there is none.

        `reply`, if given, is the one that is filled: its marks are there after a failure too.
        """
        reply = reply or Reply()
        length = b"" if body is None else b"content-length: %d\r\n" % len(body)
        request = b"%s %s HTTP/1.1\r\n%s%s\r\n%s" % (
            method.encode(),
            path.encode(),
            self._headers,
            length,
            body or b"",
        )
        used = self._take_idle()
        if used is not None:
            try:
                return await self._through(used, request, reply, on_piece, timeout)
            except Failed as error:
                if error.kind != "broken" or reply.first:
                    raise  # else the server had closed it before it saw the request
        return await self._through(await self.connect(), request, reply, on_piece, timeout)

    async def connect(self) -> Connection:
        """A fresh connection. Raises Failed("connect")."""
        address, loop = self.address, asyncio.get_running_loop()
        where = f"{address.host}:{address.port}"
        opening = loop.create_connection(Connection, address.host, address.port, ssl=self._tls)
        try:
            _, connection = await asyncio.wait_for(opening, self.connect_timeout)
        except TimeoutError:
            limit = f"{self.connect_timeout:g} s"
            raise Failed("connect", f"no connection to {where} within {limit}") from None
        except OSError as error:
            raise Failed("connect", f"no connection to {where}: {error}") from None
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _through(
        self,
        connection: Connection,
        request: bytes,
        reply: Reply,
        on_piece: OnPiece | None,
        timeout: float,
    ) -> Reply:
        await connection.exchange(request, reply, on_piece, timeout)
        if connection.open:
            self._idle.append(connection)
        return reply


def _head(address: Address, headers: Mapping[str, str]) -> bytes:
    default = 443 if address.tls else 80
    name = f"[{address.host}]" if ":" in address.host else address.host
    fields = {
        "host": name if address.port == default else f"{name}:{address.port}",
        "accept": "*/*",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "user-agent": "onechip-ladder",
        **{key.lower(): value for key, value in headers.items()},
    }
    for key, value in fields.items():
        if any(c in key + value for c in "\r\n\0"):
            raise BadUrl(f"the header {key!r} has a line break in its value; remove it")
    return "".join(f"{key}: {value}\r\n" for key, value in fields.items()).encode("latin-1")
