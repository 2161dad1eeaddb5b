"""A server of one's own: `onechip chat MODEL` starts `onechip serve MODEL` on a free port, and ends it afterwards.

The server is a process like any other user's, so the chat imports no jax and is the same in both cases. It has a
session of its own: Ctrl-C stops an answer, not the engine. Its stderr is ours, which shows how loading goes and what is
wrong.
"""

import http.client
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from types import FrameType
from typing import NoReturn

from onechip.terminal.client import Server

HOST = "127.0.0.1"
SERVE = (sys.executable, "-m", "onechip.cli", "serve")
POLL_S = 0.1
STOP_S = 30.0


class ServerEnded(Exception):
    """The server did not get ready; it has said why. `status` is its exit status."""

    def __init__(self, status: int):
        super().__init__(f"the server ended with status {status}")
        self.status = status


@contextmanager
def local_server(
    model: str, arguments: Sequence[str], command: Sequence[str] = SERVE
) -> Generator[Server]:
    """Serve `model` while the block runs. Raises ServerEnded if it cannot be served."""
    port = _free_port()
    options = ["--host", HOST, "--port", str(port), "--no-access-log", *arguments]
    process = subprocess.Popen(
        [*command, model, *options],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        with _ended_by_signals():
            _wait(process, port)
            yield Server(f"http://{HOST}:{port}/v1")
    finally:
        _end(process)


def _wait(process: "subprocess.Popen[bytes]", port: int) -> None:
    while not _ready(port):
        status = process.poll()
        if status is not None:
            raise ServerEnded(status)
        time.sleep(POLL_S)


def _ready(port: int) -> bool:
    with closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    """A port that was free a moment ago; if it is taken since, the server says so."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def _ended_by_signals() -> Generator[None]:
    """SIGTERM and SIGHUP (a closed terminal) unwind, so that the server does not outlive the chat."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    kinds = [signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
    before = [signal.signal(kind, leave) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
