"""The engine process: the one that owns the device. It knows token ids and messages, never text or HTTP.

1. The server process starts `python -m onechip.engine.process ENDPOINT [LOG_FORMAT]` and sends Start(model, config).
2. The engine is built (weights loaded, programs compiled, one token generated) and Ready(info) is sent, or Failed.
3. The loop: take every message that waits (blocking only when there is no work), submit and abort, run one step,
   send one Batch with all events and the statistics. A submit that raises becomes a terminal error event.
4. Stop ends the loop: pending requests get a terminal "abort" event and the process exits with status 0.
5. If anything raises, the outer frame gives every pending request a terminal error event, sends Fatal and exits 1.
6. The process never outlives its parent: standard input is a pipe from it, and its end is our end.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import zmq

from onechip.config import EngineConfig
from onechip.engine import wire
from onechip.engine.progress import log_to_stderr, shown
from onechip.errors import OnechipError, StartupError
from onechip.request import EngineInfo, EngineStats, Event, Request

log = logging.getLogger("onechip.engine")

IDLE_POLL_MS = 1000
STATS_EVERY_S = 0.25  # how often statistics travel while steps yield no events (long prefills)
FLUSH_MS = 2000  # how long the last messages may take to leave on exit

Socket = zmq.Socket[bytes]


class EngineLike(Protocol):
    """What this process drives: `engine.loop.Engine`, or a test double."""

    info: EngineInfo

    @property
    def has_work(self) -> bool: ...
    def idle(self) -> None: ...
    def close(self) -> None: ...
    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Event]: ...
    def stats(self) -> EngineStats: ...


Build = Callable[[str, EngineConfig], EngineLike]


def serve_engine(engine: EngineLike, endpoint: str) -> int:
    """Serve a built engine to the client that listens on `endpoint`; returns the exit status."""
    with connect(endpoint) as socket:
        return _serve(engine, socket)


def run(endpoint: str, build: Build) -> int:
    """The life of the process after its start: build what the first message asks for, then serve it."""
    with connect(endpoint) as socket:
        start = wire.decode_to_engine(socket.recv())
        assert isinstance(start, wire.Start)
        try:
            engine = build(start.model, start.config)
        except StartupError as error:
            _send(socket, wire.Failed(error.message, expected=True))
            return 2
        except Exception as error:
            log.exception("the engine could not be built")
            _send(socket, wire.Failed(f"{type(error).__name__}: {error}", expected=False))
            return 1
        return _serve(engine, socket)


@contextmanager
def connect(endpoint: str) -> Generator[Socket]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, FLUSH_MS)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def _serve(engine: EngineLike, socket: Socket) -> int:
    loop = _Loop(engine, socket)
    try:
        _send(
            socket, wire.Batch((), engine.stats())
        )  # before the first request the gauges are true already
        _send(socket, wire.Ready(engine.info))
        while loop.turn():
            pass
        loop.end_pending("abort", "the engine was stopped", "engine_stopped")
        engine.close()
        return 0
    except Exception as error:
        log.exception("the engine broke")
        message = f"the engine broke: {type(error).__name__}: {error}"
        loop.end_pending("error", message, "engine_failed")
        _send(socket, wire.Fatal(message))
        return 1


class _Loop:
    """One turn of the story's point 3, and the ids that still owe a terminal event."""

    def __init__(self, engine: EngineLike, socket: Socket):
        self.engine = engine
        self.socket = socket
        self.pending: set[str] = set()
        self.refused: list[Event] = []
        self.sent_at = 0.0
        self.stopped = False

    def turn(self) -> bool:
        """Run one turn; False when asked to stop."""
        self._drain()
        had_work = self.engine.has_work
        events = self.refused + (self.engine.step() if had_work else [])
        self.refused = []
        now = time.monotonic()
        if events or (
            had_work and (not self.engine.has_work or now - self.sent_at > STATS_EVERY_S)
        ):
            self._send_events(events)
            self.sent_at = now
        return not self.stopped

    def end_pending(self, finish: Any, message: str, code: str) -> None:
        """The terminal event of every request that has none yet."""
        ends = [
            Event(request_id, finish=finish, error=message, error_code=code)
            for request_id in sorted(self.pending)
        ]
        _send(self.socket, wire.Batch(tuple(ends), EngineStats()))
        self.pending.clear()

    def _drain(self) -> None:
        if not self.engine.has_work and not self.socket.poll(IDLE_POLL_MS):
            self.engine.idle()
            return
        while self.socket.poll(0):
            self._handle(wire.decode_to_engine(self.socket.recv()))

    def _handle(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Submit(requests):
                for request in requests:
                    self._submit(request)
            case wire.Abort(request_ids):
                for request_id in request_ids:
                    self.engine.abort(request_id)
            case wire.Stop():
                self.stopped = True
            case wire.Start():
                raise AssertionError("a second Start")

    def _submit(self, request: Request) -> None:
        try:
            self.engine.submit(request)
        except OnechipError as error:
            end = Event(
                request.id,
                finish="error",
                error=error.message,
                error_code=error.code,
                error_param=error.param,
            )
            self.refused.append(end)
        else:
            self.pending.add(request.id)

    def _send_events(self, events: Sequence[Event]) -> None:
        self.pending.difference_update(event.request_id for event in events if event.finish)
        _send(self.socket, wire.Batch(tuple(events), self.engine.stats()))


def _send(socket: Socket, message: wire.FromEngine) -> None:
    socket.send(wire.encode(message))


def watch_parent() -> None:
    """Leave at once when the parent's end of standard input closes, however the parent ended."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(3)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def main(build: Build, endpoint: str, log_format: str = "text") -> int:
    """Entry of the process. Ctrl-C goes to the whole terminal group: the parent decides when we stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to_stderr(log_format)
    watch_parent()
    return run(endpoint, build)


if __name__ == "__main__":
    from onechip.engine.build import build_engine

    def build(model: str, config: EngineConfig) -> EngineLike:
        with shown() as report:
            return build_engine(model, config, report)

    status = main(build, *sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    # Not sys.exit: it would wait for programs that are still being compiled, and a compiler cannot be interrupted.
    os._exit(status)
