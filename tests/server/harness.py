"""The whole server without a device: uvicorn in a thread, the fake engine behind the real wire in another."""

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import OpenAI
from tests.dialect_tokenizer import dialect, ids_of
from tests.fakes import FakeEngine
from tests.tiny_tokenizer import tiny

from onechip.chat.template import choose
from onechip.config import ServerConfig
from onechip.engine.client import RemoteEngine
from onechip.engine.process import serve_engine
from onechip.server.app import create_app
from onechip.server.journal import Tracing
from onechip.server.main import Stopping, listen, run_server

MODEL = "tiny"


@dataclass
class Running:
    """A server under test."""

    url: str
    engine: FakeEngine
    client: RemoteEngine
    http: httpx.Client
    outcome: list[int] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, body: Any = None, **fields: Any) -> httpx.Response:
        return self.http.post(path, json={"model": MODEL, **(body or {}), **fields})

    def chat(self, text: str = "hi", **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return ok(self.post("/v1/chat/completions", messages=messages, **fields))

    def complete(self, prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
        return ok(self.post("/v1/completions", prompt=prompt, **fields))

    def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The parsed chunks of a stream; checks its framing and its end."""
        with self.http.stream("POST", path, json={"model": MODEL, "stream": True, **fields}) as got:
            assert got.status_code == 200, got.read()
            assert got.headers["content-type"].startswith("text/event-stream")
            return parse_events("".join(got.iter_text()))

    def stream_chat(self, text: str = "hi", **fields: Any) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": text}]
        return self.stream("/v1/chat/completions", messages=messages, **fields)

    def metric(self, name: str) -> float:
        for line in self.http.get("/metrics").text.splitlines():
            if line.rpartition(" ")[0] == name:
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")


def ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a refused request, after checking its shape."""
    assert response.status_code == status, (response.status_code, response.text)
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def parse_events(text: str) -> list[dict[str, Any]]:
    events = text.split("\n\n")
    assert events.pop() == ""
    events = [event for event in events if not event.startswith(":")]  # pings
    assert all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def say(server: Running, text: str, per_step: int = 1) -> None:
    """The model's next answers, control tokens spelled out; what was asked before is forgotten."""
    server.engine.script = ids_of(text)
    server.engine.per_step = per_step
    server.engine.seen.clear()


def last_prompt(server: Running) -> str:
    """The rendered prompt of the last request, control tokens spelled out."""
    return dialect().decode(server.engine.seen[-1].prompt_ids, skip_special=False)


def until(condition: Callable[[], Any], seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextmanager
def running(
    engine: FakeEngine | None = None,
    *,
    family: str = "gemma3",
    config: ServerConfig | None = None,
    defaults: dict[str, Any] | None = None,
    hold_engine: threading.Event | None = None,
    tracing: Tracing | None = None,
) -> Iterator[Running]:
    """Start the stack, and stop it afterwards. `hold_engine`: the engine is served only when it is set."""
    config = config or ServerConfig()
    tokenizer = dialect() if family == "dialect" else tiny(family)
    engine = engine or FakeEngine()
    engine.vocab_size = tokenizer.vocab_size
    template = choose(tokenizer, None, origin="test")
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    state: dict[str, Any] = {}
    outcome: list[int] = []
    up = threading.Event()

    async def serve() -> None:
        with tempfile.TemporaryDirectory() as directory:
            client = RemoteEngine(f"ipc://{directory}/e")
            app = create_app(
                client,
                tokenizer,
                template,
                config,
                MODEL,
                tokenizer.eos_ids,
                defaults or {},
                tracing,
            )
            stop = Stopping()
            state.update(client=client, loop=asyncio.get_running_loop(), stop=stop)
            up.set()
            server = asyncio.create_task(
                run_server(app, client, sock, stop, drain_s=config.drain_seconds)
            )
            try:
                outcome.append(await server)
            finally:
                await client.close()

    def serve_fake() -> None:
        if hold_engine is not None:
            hold_engine.wait(20)
        serve_engine(engine, state["client"].endpoint)

    http_thread = threading.Thread(target=lambda: asyncio.run(serve()))
    http_thread.start()
    assert up.wait(10)
    engine_thread = threading.Thread(target=serve_fake)
    engine_thread.start()

    def stop() -> None:
        with suppress(RuntimeError):  # the loop has ended already
            state["loop"].call_soon_threadsafe(state["stop"].ask)

    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=url, timeout=20, limits=limits, trust_env=False) as http:
        if hold_engine is None:
            until(lambda: http.get("/health").status_code == 200, 10)
        try:
            yield Running(url, engine, state["client"], http, outcome, stop)
        finally:
            for _ in range(2):
                stop()
            if hold_engine is not None:
                hold_engine.set()
            http_thread.join(20)
            engine_thread.join(20)
            assert not http_thread.is_alive()
            assert not engine_thread.is_alive()
