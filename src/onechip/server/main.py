"""`onechip serve`: one HTTP process and one engine process, from start to exit status.

1. Listen first: a port in use is known before minutes of loading. Open the checkpoint for its texts (tokenizer,
   template, sampling defaults), start the engine process, and answer HTTP while it loads (/health says 503).
2. When the engine has generated its first token, say so.
3. SIGTERM or SIGINT: drain. Readiness turns bad and new requests are answered 503 with Retry-After, as are those that
   wait in the queue; running answers may end within --drain-seconds, the rest end with an error; status 0. A second
   signal ends them at once.
4. If the engine dies, every waiting client gets an error at once and the status is 1.
"""

import asyncio
import logging
import signal
import socket
import sys
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from onechip.chat import template
from onechip.chat.tokenizer import load_tokenizer
from onechip.checkpoint.base import Checkpoint
from onechip.checkpoint.source import default_cache_dir, open_checkpoint
from onechip.config import EngineConfig, ServerConfig
from onechip.engine.client import ENGINE_COMMAND, RemoteEngine
from onechip.engine.progress import log_to_stderr
from onechip.errors import CheckpointError, ConfigError, EngineDead, StartupError
from onechip.model.spec import model_config
from onechip.request import EngineInfo
from onechip.server.app import create_app
from onechip.server.journal import Tracing
from onechip.server.tracing import open_tracer

log = logging.getLogger("onechip.server")

FLUSH_S = 5  # for answers that are complete but not yet read when the server closes
DRAIN_POLL_S = 0.05
BACKLOG = 2048
KEEP_ALIVE_S = (
    75  # longer than common proxies keep an idle connection, so they do not reuse a closing one
)


@dataclass
class Stopping:
    """How the server is asked to end: once means politely, twice at once."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    urgent: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self) -> None:
        (self.urgent if self.asked.is_set() else self.asked).set()


def serve(
    model: str,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    command: Sequence[str] = ENGINE_COMMAND,
) -> int:
    """Serve until told to stop; returns the exit status. Raises StartupError for what the user can mend. `command`
    starts the engine process.
    """
    log_to_stderr(server_config.log_format)
    server_config = with_key_file(server_config)
    tracer = open_tracer(server_config.otlp_endpoint)
    sock = listen(server_config.host, server_config.port)
    checkpoint = open_checkpoint(model, random_weights=engine_config.random_weights)

    async def main() -> int:
        stopping = Stopping()
        engine = await RemoteEngine.start(
            model, engine_config, command, log_format=server_config.log_format
        )
        try:
            with _signals(stopping.ask):
                app, note = await asyncio.to_thread(
                    build_app, engine, checkpoint, model, server_config, tracer
                )
                drain_s = server_config.drain_seconds
                return await run_server(app, engine, sock, stopping, note, drain_s=drain_s)
        finally:
            await engine.close()

    try:
        return _run(main())
    finally:
        if tracer is not None:
            tracer.close()


def with_key_file(config: ServerConfig) -> ServerConfig:
    """The configuration with the keys of its key file among its keys. Raises ConfigError for a file without a key."""
    if config.api_key_file is None:
        return config
    try:
        lines = Path(config.api_key_file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {config.api_key_file}: {error}") from error
    keys = tuple(key for line in lines if (key := line.partition("#")[0].strip()))
    if not keys:
        raise ConfigError(
            f"--api-key-file {config.api_key_file} holds no key: one a line, # begins a comment"
        )
    return replace(config, api_keys=config.api_keys + keys)


def build_app(
    engine: RemoteEngine,
    checkpoint: Checkpoint,
    model: str,
    config: ServerConfig,
    tracing: Tracing | None = None,
) -> tuple[ASGIApp, str]:
    """The application for a checkpoint: its tokenizer, its template (or a built-in one) and its defaults.

    Also a note on the template, which is not logged at once: if the engine cannot start, that is all there is to say.
    """
    facts = model_config(checkpoint.config)
    tokenizer = load_tokenizer(checkpoint, default_cache_dir())
    if tokenizer is None:
        raise CheckpointError(
            f"{checkpoint.source} has no tokenizer: HTTP speaks text; add tokenizer.json, or use LLM with token ids"
        )
    chosen = template.choose(
        tokenizer,
        checkpoint.chat_template,
        origin=checkpoint.source,
        empty_thought=facts.ple_dim == 0,  # the models without per-layer inputs are the large ones
    )
    note = "no chat template: /v1/chat/completions is refused"
    if chosen is not None:
        note = f"chat template: {chosen.origin}, sha256 {chosen.sha256[:12]}"
    eos_ids = tuple(dict.fromkeys(facts.eos_ids + tokenizer.eos_ids))
    app = create_app(
        engine, tokenizer, chosen, config, model, eos_ids, checkpoint.generation_config, tracing
    )
    return app, note


async def run_server(
    app: ASGIApp,
    engine: RemoteEngine,
    sock: socket.socket,
    stopping: Stopping,
    note: str = "",
    *,
    drain_s: float = 25.0,
) -> int:
    """Serve `app` on a listening socket until asked to stop (0) or the engine's death (1); raises StartupError if the
    engine cannot be built. `note` is logged when it is ready.
    """
    server = Server(_uvicorn_config(app))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    ready = asyncio.create_task(engine.ready())
    died = asyncio.create_task(engine.died.wait())
    asked = asyncio.create_task(stopping.asked.wait())
    await asyncio.wait({serving, ready, died, asked}, return_when=FIRST_COMPLETED)
    if ready.done() and ready.exception() is None:
        if note:
            log.info("%s", note)
        _announce(ready.result(), sock)
        await asyncio.wait({serving, died, asked}, return_when=FIRST_COMPLETED)
    if not engine.died.is_set() and not serving.done():
        await _drain(engine, stopping, drain_s)
    dead = engine.died.is_set()
    server.should_exit = True
    engine.fail_all("the server is shutting down")
    await serving
    for task in (ready, died, asked):
        task.cancel()
    return _status(ready, dead)


async def _drain(engine: RemoteEngine, stopping: Stopping, seconds: float) -> None:
    """Begin nothing, and wait until all that runs has ended: at most so long, and not after a second request."""
    engine.drain()
    if engine.busy:
        log.info("stopping: running answers may end for %g s; a second signal ends them", seconds)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    urgent = asyncio.create_task(stopping.urgent.wait())
    died = asyncio.create_task(engine.died.wait())
    while engine.busy and loop.time() < deadline and not urgent.done() and not died.done():
        await asyncio.wait({urgent, died}, timeout=DRAIN_POLL_S, return_when=FIRST_COMPLETED)
    urgent.cancel()
    died.cancel()


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_S,
    )


class Server(uvicorn.Server):
    """uvicorn without its signal handling: it would end the process with the signal, not with our status."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. The protocol is named because asyncio turns Nagle's delay off only where it is."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise StartupError(
            f"cannot listen on {host}:{port}: {reason}; try another --port"
        ) from error
    return sock


def _announce(info: EngineInfo, sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    seconds = info.load_seconds + info.compile_seconds
    log.info(
        "ready: http://%s:%d/v1 on %s (%s), context %d, %d sequences, %d tokens of K/V; loaded and compiled in %.1f s",
        host, port, info.device, info.dtype, info.max_model_len, info.max_seqs, info.kv_tokens, seconds,
        extra={"fields": {"event": "ready", "port": port, "seconds": round(seconds, 3)}},
    )  # fmt: skip


def _status(ready: "asyncio.Task[EngineInfo]", dead: bool) -> int:
    error = None if not ready.done() or ready.cancelled() else ready.exception()
    if isinstance(error, StartupError):
        raise error
    if isinstance(error, EngineDead) and dead:
        raise StartupError(f"the engine could not start: {error.message}")
    return 1 if dead else 0


@contextmanager
def _signals(handler: Callable[[], None]) -> Generator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _run(main: Coroutine[Any, Any, int]) -> int:
    if sys.platform == "win32":
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)
