"""A server whose answers a test writes: a function of the request's body, called in a thread of the test's process."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Say:
    """One answer; with a `status` from 400 on it is a refusal whose message is `text`."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish: str | None = None
    status: int = 200
    prompt_tokens: int = 10
    delay: float = 0.0

    @property
    def finish_reason(self) -> str:
        return self.finish or ("tool_calls" if self.calls else "stop")


Script = Callable[[dict[str, Any]], Say]


@dataclass
class Scripted:
    """`bodies` are the requests so far, in the order they came."""

    url: str
    bodies: list[dict[str, Any]]


def handler(
    script: Script, bodies: list[dict[str, Any]], max_model_len: int
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                entry = {"id": "scripted", "owned_by": "test", "max_model_len": max_model_len}
                self.reply(200, {"data": [entry]})
            else:
                self.reply(200 if self.path == "/health" else 404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.path.endswith("completions"):
                return self.reply(404, {"error": {"message": "no such route"}})
            bodies.append(body)
            said = script(body)
            time.sleep(said.delay)
            if said.status >= 400:
                return self.reply(said.status, {"error": {"message": said.text}})
            return self.stream(said, "messages" in body)

        def stream(self, said: Say, chat: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for chunk in chunks(said, chat):
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def reply(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def scripted(script: Script, *, max_model_len: int = 4096) -> Iterator[Scripted]:
    bodies: list[dict[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(script, bodies, max_model_len))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Scripted(f"http://127.0.0.1:{server.server_address[1]}", bodies)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def chunks(said: Say, chat: bool) -> Iterator[dict[str, Any]]:
    if not chat:
        yield {"choices": [{"text": said.text, "finish_reason": None}]}
        yield {"choices": [{"text": "", "finish_reason": said.finish_reason}]}
    else:
        for delta in deltas(said):
            yield {"choices": [{"delta": delta, "finish_reason": None}]}
        yield {"choices": [{"delta": {}, "finish_reason": said.finish_reason}]}
    tokens = len(said.text.split()) + len(said.reasoning.split())
    yield {
        "choices": [],
        "usage": {"prompt_tokens": said.prompt_tokens, "completion_tokens": tokens},
    }


def deltas(said: Say) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if said.reasoning:
        yield {"reasoning_content": said.reasoning}
    if said.text:
        yield {"content": said.text}
    for index, (name, arguments) in enumerate(said.calls):
        function = {"name": name, "arguments": arguments}
        yield {
            "tool_calls": [
                {"index": index, "id": f"c{index}", "type": "function", "function": function}
            ]
        }
