"""The asyncio side of the wire: how the server process talks to the engine process.

It owns the engine process's life and the routing of events to whoever waits for them; it knows nothing of text.

1. `RemoteEngine.start` binds a private socket and starts the process; `ready()` waits until it has generated a token.
2. `open(requests)` submits and returns a Stream, which yields lists of events, all that came since the last look:
   a consumer slower than the engine gets fewer, larger lists, never a longer queue.
3. A Stream ends when each of its requests has had its terminal event. `close()` aborts those that have not.
4. `drain()` ends what waits and refuses what comes, while what runs goes on.
5. If the process dies, every Stream raises EngineDead at once and every later call does.
"""

import asyncio
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from types import TracebackType

import zmq
import zmq.asyncio

from onechip.config import EngineConfig
from onechip.engine import wire
from onechip.errors import EngineDead, ShuttingDown, StartupError
from onechip.request import EngineInfo, EngineStats, Event, Request

ENGINE_COMMAND = (sys.executable, "-m", "onechip.engine.process")
STOP_GRACE_S = 5.0
LAST_WORDS_S = 0.2  # after the process ended, how long its last messages may still arrive


class Stream:
    """The events of some requests, until each has ended. Use as a context manager: leaving it aborts the rest."""

    def __init__(self, engine: "RemoteEngine", request_ids: Iterable[str]):
        self._engine = engine
        self._open = set(request_ids)
        self._events: list[Event] = []
        self._failure: Exception | None = None
        self._wake: asyncio.Future[None] | None = None
        self._nudged = False
        self.begun = False

    @property
    def left(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def push(self, event: Event) -> None:
        self.begun = True
        self._events.append(event)
        self._notify()

    def nudge(self) -> None:
        """Give whoever iterates an empty list, so that it can do something else for a moment."""
        self._nudged = True
        self._notify()

    def fail(self, error: Exception) -> None:
        """Raise `error` in whoever iterates, now or next."""
        self._failure = error
        self._notify()

    def abort(self, request_id: str) -> None:
        """End one request early; its later events are dropped."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._engine.abort((request_id,))

    def close(self) -> None:
        if self._open:
            self._engine.abort(tuple(self._open))
            self._open.clear()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> list[Event]:
        while self._open:
            if self._events:
                return self._take()
            if self._failure is not None:
                raise self._failure
            if self._nudged:
                self._nudged = False
                return []
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        raise StopAsyncIteration

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self) -> list[Event]:
        events, self._events = merge(self._events), []
        events = [event for event in events if event.request_id in self._open]
        self._open.difference_update(event.request_id for event in events if event.finish)
        return events

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def merge(events: list[Event]) -> list[Event]:
    """One event a request: the concatenation of all its news, in order of first appearance."""
    if len(events) == 1:
        return events
    merged: dict[str, Event] = {}
    for event in events:
        earlier = merged.get(event.request_id)
        merged[event.request_id] = event if earlier is None else _join(earlier, event)
    return list(merged.values())


def _join(a: Event, b: Event) -> Event:
    return Event(
        request_id=a.request_id,
        token_ids=a.token_ids + b.token_ids,
        logprobs=a.logprobs + b.logprobs,
        prompt_logprobs=b.prompt_logprobs if a.prompt_logprobs is None else a.prompt_logprobs,
        finish=b.finish,
        stopped_by=b.stopped_by,
        error=b.error,
        error_code=b.error_code,
        error_param=b.error_param,
        queued_s=b.queued_s if a.queued_s is None else a.queued_s,
    )


def _shutting_down() -> ShuttingDown:
    return ShuttingDown(
        "the server is shutting down; send the request again, or to another replica"
    )


class RemoteEngine:
    """The client of one engine process. All methods are for the event loop it was started in."""

    def __init__(self, endpoint: str):
        self.endpoint = endpoint
        self.stats = EngineStats()
        self.died = asyncio.Event()
        self._info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._death: EngineDead | None = None
        self.draining = False
        self._streams: dict[str, Stream] = {}
        self._process: Process | None = None
        self._directory: Path | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._tasks = [asyncio.create_task(self._receive())]

    @classmethod
    async def start(
        cls,
        model: str,
        config: EngineConfig,
        command: Sequence[str] = ENGINE_COMMAND,
        *,
        log_format: str = "text",
    ) -> "RemoteEngine":
        """Start the engine process (`command`, the endpoint, how to log) and tell it what to build; returns at once."""
        directory = Path(tempfile.mkdtemp(prefix="onechip-"))  # mode 0700: nobody else can connect
        self = cls(f"ipc://{directory}/engine")
        self._directory = directory
        self._process = await asyncio.create_subprocess_exec(
            *command, self.endpoint, log_format, stdin=PIPE
        )
        self._tasks.append(asyncio.create_task(self._watch(self._process)))
        self._send(wire.Start(model, config))
        return self

    async def ready(self) -> EngineInfo:
        """Wait until the engine can serve. Raises StartupError (its message is for the user) or EngineDead."""
        return await asyncio.shield(self._info)

    @property
    def info(self) -> EngineInfo | None:
        """What the ready engine told of itself; None before."""
        failed = self._info.done() and (
            self._info.cancelled() or self._info.exception() is not None
        )
        return self._info.result() if self._info.done() and not failed else None

    @property
    def alive(self) -> bool:
        """Whether the engine is ready and has not died."""
        return self._death is None and self.info is not None

    @property
    def busy(self) -> bool:
        """Whether a request has not ended yet."""
        return bool(self._streams)

    def drain(self) -> None:
        """Take no more requests. Those that wait for their first place end with ShuttingDown; the others go on.

        Which ones wait follows from the engine's count, newest first: it serves in order of arrival.
        """
        self.draining = True
        waiting = self.stats.waiting
        for stream in reversed(list(dict.fromkeys(self._streams.values()))):
            if waiting <= 0:
                return
            if not stream.begun:
                waiting -= stream.left
                stream.fail(_shutting_down())

    def open(self, requests: Sequence[Request]) -> Stream:
        """Submit requests; their ids must be new. Raises EngineDead when the engine is not up, ShuttingDown when it
        takes no more.
        """
        if self._death is not None:
            raise self._death
        if self.draining:
            raise _shutting_down()
        if self.info is None:
            raise EngineDead("the engine is still starting; retry when /health answers 200")
        stream = Stream(self, (request.id for request in requests))
        for request in requests:
            assert request.id not in self._streams
            self._streams[request.id] = stream
        self._send(wire.Submit(tuple(requests)))
        return stream

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """The events of one request, the last with `finish` set; closing the iterator early aborts it."""
        with self.open((request,)) as stream:
            async for events in stream:
                for event in events:
                    yield event

    def abort(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        self._send(wire.Abort(request_ids))

    def fail_all(self, message: str) -> None:
        """End every open Stream with EngineDead, and take no more; the process is left alone."""
        self._die(message)

    async def close(self) -> int | None:
        """Stop the engine: kindly, then firmly. Returns the exit status of its process, if it had one."""
        self._send(wire.Stop())
        status = None if self._process is None else await self._end_process(self._process)
        self._die("the server is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0 if self._process is not None else 200)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        return status

    async def _end_process(self, process: Process) -> int:
        """Wait for a process that hears us; one still loading does not, so it is ended at once."""
        if not self._info.done():
            process.terminate()
        for end in (process.terminate, process.kill, None):
            try:
                return await asyncio.wait_for(process.wait(), STOP_GRACE_S)
            except TimeoutError:
                if end is not None:
                    end()
        raise AssertionError("a killed process did not end")

    async def _receive(self) -> None:
        while True:
            match wire.decode_from_engine(await self._socket.recv()):
                case wire.Batch(events, stats):
                    self.stats = stats
                    self._route(events)
                case wire.Ready(info):
                    self._info.set_result(info)
                case wire.Failed(message, expected):
                    error = StartupError(message) if expected else EngineDead(message)
                    self._die(message, error)
                case wire.Fatal(message):
                    self._die(message)

    def _route(self, events: Iterable[Event]) -> None:
        streams = self._streams
        for event in events:
            stream = streams.get(event.request_id)
            if stream is None:
                continue  # aborted here; the engine had not heard yet
            if event.finish:
                del streams[event.request_id]
            stream.push(event)

    async def _watch(self, process: Process) -> None:
        status = await process.wait()
        await asyncio.sleep(LAST_WORDS_S)
        self._die(f"the engine process ended with status {status}")

    def _die(self, message: str, error: StartupError | EngineDead | None = None) -> None:
        if self._death is not None:
            return
        self._death = EngineDead(message)
        if not self._info.done():
            self._info.set_exception(error or self._death)
            self._info.exception()  # marks it as seen: nobody may be waiting in ready()
        for stream in set(self._streams.values()):
            stream.fail(self._death)
        self._streams.clear()
        self.stats = EngineStats()
        self.died.set()

    def _send(self, message: wire.ToEngine) -> None:
        self._socket.send(wire.encode(message))
