"""A server with known delays, in a process of its own: what the ladder reports is checked against what this was told.

Run as `python -m tests.ladder.stub '{"ttft": 0.05, ...}'`; it prints its port, then serves until it is killed. Raw
asyncio: one `write` a chunk, so that it can be faster than the client under test.
"""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """How the stub answers. Times in seconds.

    `per_chunk` tokens come in each chunk; the last `empty` tokens show no text. `jitter` spreads each gap evenly by
    that share. After `fail_after` requests, every further one gets `fail_status`, or (0) a dead socket.
    """

    ttft: float = 0.0
    gap: float = 0.0
    per_chunk: int = 1
    empty: int = 0
    jitter: float = 0.0
    tail: float = 0.0
    role_delay: float | None = None
    usage: str = "end"  # end, running, none
    fail_after: int | None = None
    fail_status: int = 503
    break_after: int | None = None
    die_after: int | None = None
    model: str = "stub"
    text: str = " word"
    prompt_overhead: int = 1
    tokenize: str = "prompt"  # prompt, content, none
    bytewise: bool = False  # a token a character
    crlf: bool = False
    refuse: dict[str, str] = field(default_factory=dict)
    logprobs: str = "completions"  # or chat (llama.cpp's shape), or none
    shift: float = 0.0  # added to the log probability of every third token
    context: int = 4096
    spin: bool = False  # waits to the microsecond, at the price of a core


class Stub:
    def __init__(self, plan: Plan):
        self.plan = plan
        self.served = 0
        self.times: list[dict[str, float]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.split(b" ", 2)
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line[15:])
                body = json.loads(await reader.readexactly(length)) if length else {}
                await self.answer(method.decode(), path.decode(), body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, method: str, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        plan = self.plan
        if path == "/v1/models":
            return reply(
                writer,
                {"data": [{"id": plan.model, "owned_by": "stub", "max_model_len": plan.context}]},
            )
        if path == "/times":
            return reply(writer, self.times)
        if path == "/version":
            return reply(writer, {"version": "1.2.3"})
        if path == "/tokenize":
            text = body.get(plan.tokenize)
            if text is None:
                return reply(writer, {"error": {"message": "no such field"}}, 400)
            return reply(writer, {"tokens": list(range(self.tokens(text)))})
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return reply(writer, {"error": {"message": f"no route {path}"}}, 404)
        self.served += 1
        for name, message in plan.refuse.items():
            if name in body:
                return reply(writer, {"error": {"message": message, "param": name}}, 400)
        if plan.die_after is not None and self.served > plan.die_after:
            sys.exit(0)
        if plan.fail_after is not None and self.served > plan.fail_after:
            if not plan.fail_status:
                return writer.close()
            return reply(writer, {"error": {"message": "told to fail"}}, plan.fail_status)
        await self.generate(path.endswith("chat/completions"), body, writer)
        return None

    def tokens(self, text: str) -> int:
        pieces = len(text) if self.plan.bytewise else len(text.split())
        return pieces + self.plan.prompt_overhead

    async def generate(self, chat: bool, body: Any, writer: asyncio.StreamWriter) -> None:
        plan, loop = self.plan, asyncio.get_running_loop()
        prompt = " ".join(m["content"] for m in body["messages"]) if chat else body["prompt"]
        given = self.tokens(prompt) if isinstance(prompt, str) else len(prompt)
        wanted = body.get("max_tokens") or 16
        if given + wanted > plan.context:
            message = f"prompt of {given} plus {wanted} exceeds the context of {plan.context}"
            return reply(writer, {"error": {"message": message}}, 400)
        usage = {"prompt_tokens": given, "completion_tokens": wanted}
        if not body.get("stream"):
            await asyncio.sleep(plan.ttft + plan.gap * (wanted - 1))
            said = {"content": plan.text * wanted}
            choice = {"message": said} if chat else {"text": plan.text * wanted}
            if body.get("logprobs") and plan.logprobs != "none":
                choice["logprobs"] = shown(plan, wanted, body["logprobs"])
            return reply(
                writer, {"choices": [{**choice, "finish_reason": "length"}], "usage": usage}
            )
        started = loop.time()
        head(writer)
        if chat and plan.role_delay is not None:
            await until(started + plan.role_delay, plan.spin)
            event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, plan.crlf)
        at = started + plan.ttft
        sent, first = 0, started
        for number, texts in enumerate(chunks(plan, wanted, prompt)):
            if number:
                at += texts[1]
            await until(at, plan.spin)
            sent += texts[2]
            if texts[0] and not number:
                first = loop.time()
            if plan.break_after is not None and number >= plan.break_after:
                return writer.transport.abort()
            running = (given, sent) if plan.usage == "running" else None
            write(writer, chunk(chat, texts[0], sent >= wanted, plan.crlf, running))
        self.times.append({"ttft": first - started, "e2e": loop.time() - started})
        await asyncio.sleep(plan.tail)
        if plan.usage == "end":
            event(writer, {"choices": [], "usage": usage}, plan.crlf)
        write(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return None


def shown(plan: Plan, wanted: int, top: int) -> dict[str, Any]:
    """Log probabilities of `top` tokens, the same at every position, in either server's shape."""
    best = {f" t{n}": -0.5 * (n + 1) + (plan.shift if n % 3 == 0 else 0.0) for n in range(top)}
    if plan.logprobs == "chat":
        tops = [{"token": token, "logprob": value} for token, value in best.items()]
        entry = {"token": plan.text, "logprob": -0.5, "top_logprobs": tops}
        return {"content": [entry] * wanted}
    return {"tokens": [plan.text] * wanted, "top_logprobs": [best] * wanted}


def chunks(plan: Plan, wanted: int, prompt: Any) -> Iterator[tuple[str, float, int]]:
    """Text, gap before it and tokens of each chunk."""
    rng = random.Random(str(prompt))
    left = wanted
    while left:
        count = min(plan.per_chunk, left)
        left -= count
        text = "" if left < plan.empty else plan.text * count
        yield text, plan.gap * count * (1 + plan.jitter * rng.uniform(-1, 1)), count


@lru_cache(maxsize=4096)
def chunk(chat: bool, text: str, last: bool, crlf: bool, usage: tuple[int, int] | None) -> bytes:
    """One event; encoded once for all alike, so that the stub is not the slower side."""
    part = {"delta": {"content": text}} if chat else {"text": text}
    value: dict[str, Any] = {"choices": [{**part, "finish_reason": "length" if last else None}]}
    if usage is not None:
        value["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return b"data: " + json.dumps(value).encode() + (b"\r\n\r\n" if crlf else b"\n\n")


async def until(moment: float, spin: bool = False) -> None:
    """A timer is up to a millisecond late, so one that must not be wakes early and watches the clock."""
    loop = asyncio.get_running_loop()
    early = 0.003 if spin else 0.0
    if (wait := moment - loop.time() - early) > 0:
        await asyncio.sleep(wait)
    while spin and loop.time() < moment:
        await asyncio.sleep(0)


def head(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )


def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def event(writer: asyncio.StreamWriter, value: Any, crlf: bool) -> None:
    end = b"\r\n\r\n" if crlf else b"\n\n"
    write(writer, b"data: " + json.dumps(value).encode() + end)


def reply(writer: asyncio.StreamWriter, value: Any, status: int = 200) -> None:
    body = json.dumps(value).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))


async def main(plan: Plan) -> None:
    server = await asyncio.start_server(Stub(plan).serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def stub(**plan: Any) -> Iterator[str]:
    """The stub in a process of its own; yields its address."""
    with process(**plan) as (url, _):
        yield url


@contextmanager
def process(**plan: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "tests.ladder.stub", json.dumps(asdict(Plan(**plan)))]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as running:
        try:
            assert running.stdout is not None
            yield f"http://127.0.0.1:{int(running.stdout.readline())}", running
        finally:
            running.kill()


if __name__ == "__main__":
    plan = Plan(**json.loads(sys.argv[1]))
    if plan.spin:
        asyncio.run(main(plan))  # its clock ticks finer than uvloop's milliseconds
    else:
        import uvloop

        uvloop.run(main(plan))
