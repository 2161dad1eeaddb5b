"""A chat server that says what a test tells it, in OpenAI's shape: for clients (the page, the terminal), not engines.

It serves the real page over a stub of the API, so a test can put any delta, error or pause in front of a client without
a tokenizer that could produce it.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from onechip.request import EngineInfo, EngineStats
from onechip.server.main import listen
from onechip.server.web import page_routes

Delta = dict[str, Any]
INFO = EngineInfo(262_144, 32_768, 16, 65_536, "TPU v5e", "bfloat16", 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Answer:
    """One answer: deltas, each after `pause` seconds, and `hold` seconds before the end; or, with `status`, a refusal.

    `cut`: the stream just ends.
    """

    deltas: Sequence[Delta] = ()
    finish: str = "stop"
    pause: float = 0.0
    hold: float = 0.0
    status: int = 200
    error: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False


def text(content: str, size: int = 4, **fields: Any) -> Answer:
    return Answer([{"content": piece} for piece in pieces(content, size)], **fields)


def thought(reasoning: str, content: str, **fields: Any) -> Answer:
    thinking = [{"reasoning_content": piece} for piece in pieces(reasoning, 4)]
    return Answer([*thinking, *({"content": piece} for piece in pieces(content, 4))], **fields)


def calls(*named: tuple[str, dict[str, Any]], before: Sequence[Delta] = ()) -> Answer:
    """Tool calls as they are streamed: the name once, then the arguments in pieces."""
    deltas = list(before)
    for index, (name, arguments) in enumerate(named):
        head = {"index": index, "id": f"call_{index}", "type": "function"}
        deltas.append({"tool_calls": [{**head, "function": {"name": name, "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            for piece in pieces(json.dumps(arguments), 5)
        ]
    return Answer(deltas, finish="tool_calls")


def pieces(whole: str, size: int) -> list[str]:
    return [whole[i : i + size] for i in range(0, len(whole), size)]


def refusal(
    status: int, message: str, code: str, param: str | None = None, **headers: str
) -> Answer:
    error = {"message": message, "type": "error", "param": param, "code": code}
    return Answer(status=status, error=error, headers=headers)


@dataclass
class Scripted:
    """`answers` are given in turn (the last one again and again); `bodies` are the requests that came."""

    url: str
    answers: list[Answer]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0  # clients that went before the end
    key: str | None = None
    alive: bool = True
    draining: bool = False
    info: EngineInfo | None = INFO
    stats: EngineStats = field(default_factory=EngineStats)
    authorizations: list[str | None] = field(default_factory=list)

    def next(self) -> Answer:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def scripted(*answers: Answer, model: str = "gemma-4-E4B-it") -> Iterator[Scripted]:
    sock = listen("127.0.0.1", 0)
    state = Scripted(f"http://127.0.0.1:{sock.getsockname()[1]}", list(answers))
    app = Starlette(routes=_routes(state, model))
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield state
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def _routes(state: Scripted, model: str) -> list[Route]:
    async def chat(request: Request) -> Response:
        if denied := _denied(state, request):
            return denied
        state.bodies.append(await request.json())
        answer = state.next()
        if answer.status != 200:
            return JSONResponse({"error": answer.error}, answer.status, answer.headers)
        return StreamingResponse(_stream(state, answer), media_type="text/event-stream")

    async def models(request: Request) -> Response:
        return _denied(state, request) or JSONResponse({"data": [{"id": model}]})

    async def health(_: Request) -> Response:
        return Response(status_code=200 if state.alive else 503)

    service: Any = SimpleNamespace(
        engine=state,
        model_names=(model,),
        template=object(),
        defaults={"temperature": 1.0, "top_p": 0.95, "top_k": 64},
    )
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        *page_routes(service),
    ]


def _denied(state: Scripted, request: Request) -> Response | None:
    given = request.headers.get("authorization")
    state.authorizations.append(given)
    if state.key is None or given == f"Bearer {state.key}":
        return None
    return JSONResponse(
        {"error": {"message": "missing or wrong API key", "code": "invalid_api_key"}}, 401
    )


async def _stream(state: Scripted, answer: Answer) -> AsyncIterator[bytes]:
    ended = False
    try:
        for count, delta in enumerate(answer.deltas, 1):
            if answer.pause:
                await asyncio.sleep(answer.pause)
            yield _event(
                {
                    "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
                    "usage": _usage(count),
                }
            )
        await asyncio.sleep(answer.hold)
        ended = True
        if answer.error:
            yield _event({"error": answer.error})
        elif not answer.cut:
            count = len(answer.deltas)
            yield _event(
                {
                    "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}],
                    "usage": _usage(count),
                }
            )
        if not answer.cut:
            yield b"data: [DONE]\n\n"
    finally:
        state.left += not ended


def _usage(count: int) -> dict[str, int]:
    return {"prompt_tokens": 12, "completion_tokens": count, "total_tokens": 12 + count}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
