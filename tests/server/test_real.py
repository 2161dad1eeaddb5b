"""`onechip serve demo` as a user runs it: two processes, a real model, and clients that come and go.

One server for the whole file, in float32, so that greedy texts are a property of the request alone. The crowd of 64
has few long prompts by default; `-m slow` runs the one whose prompts are spread evenly from 5 to 900 tokens.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tests.server.harness import error, ok, parse_events, until
from tests.server.test_main import free_port

from onechip.checkpoint.source import DEMO_PACKAGE

pytestmark = [
    pytest.mark.demo,
    pytest.mark.skipif(find_spec(DEMO_PACKAGE) is None, reason="needs onechip[demo]"),
    pytest.mark.timeout(1500),  # a first start compiles every program
]

FLAGS = "--dtype float32 --max-seqs 16 --max-model-len 1024"
CLIENTS = 64
SHORTEST, LONGEST, MOST_OUT = 5, 900, 128
START_S = 1200.0


@dataclass
class Serving:
    process: subprocess.Popen[str]
    url: str
    http: httpx.Client
    log: Path

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json={"model": "demo", **fields})

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        return ok(self.post("/v1/completions", prompt=prompt, **fields))

    def stream(self, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
        return parse_events(self.post("/v1/completions", prompt=prompt, stream=True, **fields).text)

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def metrics(self) -> dict[str, float]:
        lines = (line.rpartition(" ") for line in self.http.get("/metrics").text.splitlines())
        return {name: float(value) for name, _, value in lines if not name.startswith("#")}

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        (pid,) = children.read_text().split()
        return int(pid)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def serving(folder: Path) -> Iterator[Serving]:
    """Start the server; it is up when /health says so, and must not print anything but its own log lines."""
    port, log = free_port(), folder / "stderr"
    command = [sys.executable, "-m", "onechip.cli", "serve", "demo", "--port", str(port)]
    with log.open("w") as stderr:
        process = subprocess.Popen([*command, *FLAGS.split()], stderr=stderr, text=True)
    url = f"http://127.0.0.1:{port}"
    limits = httpx.Limits(max_connections=None)
    try:
        with httpx.Client(base_url=url, timeout=300, trust_env=False, limits=limits) as http:
            server = Serving(process, url, http, log)
            until(lambda: healthy(server), START_S)
            yield server
    finally:
        process.kill()
        process.wait()


ALL_COMPILED = "of them from the compile cache"


def healthy(server: Serving) -> bool:
    assert server.process.poll() is None, server.log.read_text()
    try:
        return server.http.get("/health").status_code == 200
    except httpx.TransportError:
        time.sleep(0.2)
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("first")) as server:
        yield server
        assert_quiet(server)
        assert server.stop() == 0


@pytest.fixture(scope="module")
def second(server: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The same server started again beside the first, once that has compiled everything: it is ready before."""
    assert server.process.poll() is None
    until(lambda: ALL_COMPILED in server.log.read_text(), START_S)
    with serving(tmp_path_factory.mktemp("second")) as again:
        until(lambda: ALL_COMPILED in again.log.read_text(), START_S)
        yield again


def assert_quiet(server: Serving) -> None:
    """Nothing runs, nothing is held, and nothing was compiled since the server was ready."""
    idle = ("onechip_requests_running", "onechip_requests_waiting", "onechip_kv_usage_ratio")
    until(lambda: all(server.metrics()[name] == 0 for name in idle), 30)
    found = server.metrics()
    assert found["onechip_kv_pages_free"] == found["onechip_kv_pages_total"] > 0
    assert found["onechip_compiles_since_ready"] == 0


# A crowd


@dataclass(frozen=True)
class Wish:
    """What one client asks for: so many prompt tokens, so many at most to generate."""

    prompt: list[int]
    max_tokens: int
    fields: dict[str, Any]


def crowd(long: int) -> list[Wish]:
    """Wishes of CLIENTS clients, `long` of them with prompts over 100 tokens; a third greedy, half to max_tokens."""
    draw = random.Random(long)
    lengths = [SHORTEST, LONGEST, *(draw.randint(101, LONGEST) for _ in range(long - 1))]
    lengths += [draw.randint(SHORTEST, 100) for _ in range(CLIENTS - len(lengths))]
    outputs = [1, MOST_OUT, *(draw.randint(2, MOST_OUT // 4) for _ in range(CLIENTS - 2))]
    if long > CLIENTS // 2:
        outputs = [1 + index * (MOST_OUT - 1) // (CLIENTS - 1) for index in range(CLIENTS)]
    draw.shuffle(outputs)
    wishes: list[Wish] = []
    for index, (length, most) in enumerate(zip(lengths, outputs, strict=True)):
        prompt = [2, *(draw.randint(1000, 200_000) for _ in range(length - 1))]
        fields: dict[str, Any] = {"temperature": 0.0} if index % 3 == 0 else {"seed": index}
        wishes.append(Wish(prompt, most, fields | {"ignore_eos": index % 2 == 0}))
    return wishes


async def ask(http: httpx.AsyncClient, wish: Wish) -> list[dict[str, Any]]:
    body = {"model": "demo", "prompt": wish.prompt, "max_tokens": wish.max_tokens, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **wish.fields}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        return parse_events("".join([text async for text in response.aiter_text()]))


async def ask_all(url: str, wishes: list[Wish]) -> list[list[dict[str, Any]]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=900, limits=limits, trust_env=False) as http:
        return await asyncio.gather(*(ask(http, wish) for wish in wishes))


# Random over 10 to 100 prompt tokens but for 5 long ones; or spread evenly over the whole range.
@pytest.mark.parametrize("long", [5, pytest.param(57, marks=pytest.mark.slow)])
def test_a_crowd_of_streams_each_ends_once_and_leaves_nothing(server: Serving, long: int):
    server.complete("warm", max_tokens=1)
    before = server.metrics()
    wishes = crowd(long)
    answers = asyncio.run(ask_all(server.url, wishes))
    generated = 0
    for wish, chunks in zip(wishes, answers, strict=True):
        *said, last = chunks
        finishes = [
            c["choices"][0]["finish_reason"] for c in said if c["choices"][0]["finish_reason"]
        ]
        usage = last["usage"]
        assert last["choices"] == []
        assert finishes in (["length"], ["stop"])
        assert said[-1]["choices"][0]["finish_reason"]
        assert usage["prompt_tokens"] == len(wish.prompt)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        full = usage["completion_tokens"] == wish.max_tokens
        assert full if finishes == ["length"] else usage["completion_tokens"] <= wish.max_tokens
        assert finishes == ["length"] or not wish.fields["ignore_eos"]
        generated += usage["completion_tokens"]
    assert_quiet(server)
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in before}
    assert grown["onechip_prompt_tokens_total"] == sum(len(wish.prompt) for wish in wishes)
    assert grown["onechip_generation_tokens_total"] == generated
    assert grown["onechip_kv_pages_free"] == 0
    assert grown['onechip_requests_finished_total{reason="length"}'] <= CLIENTS


def test_clients_that_leave_free_everything(server: Serving):
    """Some go after their first token, some while they wait in the queue, some without streaming."""
    prompt = [2, *range(5000, 5300)]
    aborted = server.metrics()["onechip_requests_aborted_total"]

    async def leave(http: httpx.AsyncClient, index: int) -> None:
        body = {
            "model": "demo",
            "prompt": prompt[: 5 + 9 * index],
            "max_tokens": 600,
            "seed": index,
        }
        body |= {"ignore_eos": True, "stream": index % 3 != 0}
        with contextlib.suppress(httpx.ReadTimeout):
            async with http.stream("POST", "/v1/completions", json=body, timeout=3) as response:
                async for _ in response.aiter_lines():
                    return

    async def all_leave() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(leave(http, index) for index in range(30)))

    asyncio.run(all_leave())
    assert_quiet(server)
    assert server.metrics()["onechip_requests_aborted_total"] - aborted == 30
    assert server.complete("after", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"seed": 7},
        {"seed": 8, "top_p": 0.9, "top_k": 40, "temperature": 1.3},
        {"temperature": 0, "stop": [" the", "2"]},
        {"seed": 3, "presence_penalty": 1.0, "repetition_penalty": 1.2, "logprobs": 3},
    ],
)
def test_streamed_equals_not_streamed(server: Serving, fields: dict[str, Any]):
    prompt = "東京の天気 🌦 and the capital of"
    whole = server.complete(prompt, max_tokens=24, **fields)["choices"][0]
    chunks = server.stream(prompt, max_tokens=24, **fields)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    if "logprobs" in fields:
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        for key in ("tokens", "token_logprobs", "top_logprobs"):
            assert [x for part in streamed if part for x in part[key]] == whole["logprobs"][key]


def test_prompt_logprobs_of_any_length_compile_nothing(server: Serving):
    for length in (5, 17, 40):
        prompt = [2, *range(7000, 7000 + length - 1)]
        done = server.complete(prompt, max_tokens=1, echo=True, logprobs=1)["choices"][0]
        assert len(done["logprobs"]["token_logprobs"]) == length + 1
        assert done["logprobs"]["token_logprobs"][0] is None
    assert_quiet(server)


def test_a_seeded_request_draws_the_same_in_company(server: Serving):
    alone = server.complete("Once upon a time", max_tokens=16, seed=11)["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        others = [
            pool.submit(server.complete, f"Story {i}", max_tokens=20, seed=i) for i in range(7)
        ]
        again = server.complete("Once upon a time", max_tokens=16, seed=11)["choices"][0]["text"]
        for other in others:
            assert other.result()["usage"]["completion_tokens"] <= 20
    assert again == alone


# The official client


def test_the_openai_client_chats_whole_and_streamed(server: Serving):
    messages: Any = [{"role": "user", "content": "Name three colours."}]
    settings: Any = {"model": "demo", "messages": messages, "max_tokens": 20, "temperature": 0}
    whole = server.openai.chat.completions.create(**settings)
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert whole.usage is not None
    assert 0 < whole.usage.completion_tokens <= 20
    chunks = list(
        server.openai.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_the_openai_client_completes(server: Serving):
    done = server.openai.completions.create(
        model="demo", prompt="The capital of France is", max_tokens=12, temperature=0
    )
    # The reference's greedy text (tests/data/gemma3-270m.json).
    assert done.choices[0].text.startswith(" the capital of the country of France")
    assert done.choices[0].finish_reason == "length"


def test_the_openai_client_gets_logprobs(server: Serving):
    messages: Any = [{"role": "user", "content": "Say hi"}]
    done = server.openai.chat.completions.create(
        model="demo", messages=messages, max_tokens=6, temperature=0, logprobs=True, top_logprobs=4
    )
    assert done.choices[0].logprobs is not None
    content = done.choices[0].logprobs.content
    assert content
    for one in content:
        assert len(one.top_logprobs) == 4
        assert one.top_logprobs[0].token == one.token  # greedy
        assert one.logprob == one.top_logprobs[0].logprob <= 0
    assert "".join(one.token for one in content) == done.choices[0].message.content


def test_the_openai_client_gets_n_choices_and_seeds_repeat(server: Serving):
    def create(seed: int, n: int) -> list[str]:
        done = server.openai.completions.create(
            model="demo", prompt="My favourite animal is", max_tokens=10, seed=seed, n=n
        )
        assert [choice.index for choice in done.choices] == list(range(n))
        return [choice.text for choice in done.choices]

    first = create(5, 2)
    assert len(set(first)) == 2
    assert create(5, 2) == first
    assert create(5, 1) == first[:1]
    assert create(6, 1) != first[:1]


@pytest.mark.parametrize(
    "text", ["Hello, world", "  two  spaces\n\n\ttab", "日本の首都は東京 🗼 é", ""]
)
def test_tokenize_and_detokenize_are_inverse(server: Serving, text: str):
    tokenized = ok(server.post("/tokenize", prompt=text, add_special_tokens=False))
    assert tokenized["count"] == len(tokenized["tokens"])
    assert ok(server.post("/detokenize", tokens=tokenized["tokens"]))["prompt"] == text
    with_bos = ok(server.post("/tokenize", prompt=text))["tokens"]
    assert with_bos == [2, *tokenized["tokens"]]


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(server: Serving):
    refused = error(server.post("/v1/completions", prompt=[5] * 1024, max_tokens=1), 400)
    assert refused["code"] == "context_length_exceeded"
    assert "1024" in refused["message"]


# Starting again, and the end of the engine


def compiled(log: str) -> tuple[int, float, int]:
    """(programs, seconds, of them from the compile cache), as the engine's log tells them."""
    found = re.search(r"(\d+) programs after ([\d.]+) s, (\d+) of them from the compile cache", log)
    assert found, log
    return int(found[1]), float(found[2]), int(found[3])


def test_a_second_start_compiles_nothing_anew(server: Serving, request: pytest.FixtureRequest):
    second: Serving = request.getfixturevalue("second")
    first_programs, first_s, first_cached = compiled(server.log.read_text())
    programs, seconds, cached = compiled(second.log.read_text())
    assert programs == cached == first_programs
    if first_cached == 0:
        assert seconds < first_s / 2
    for log in (server.log.read_text(), second.log.read_text()):
        assert all(line.startswith(("onechip.", "ready: ")) for line in log.splitlines()), log
        assert re.search(r"weights loaded after [\d.]+ s", log)
        assert re.search(r"first token after [\d.]+ s", log)


def test_when_the_engine_is_killed_every_client_hears_at_once_and_the_server_ends(second: Serving):
    heard: list[tuple[float, str]] = []
    begun = threading.Barrier(7)

    def listen(stream: bool) -> None:
        body = {"model": "demo", "prompt": "x", "max_tokens": 900, "ignore_eos": True}
        with second.http.stream("POST", "/v1/completions", json=body | {"stream": stream}) as got:
            lines = got.iter_lines()
            if stream:
                next(lines)
            begun.wait(60)
            heard.append((time.monotonic(), "".join(lines)))

    def listen_whole() -> None:
        begun.wait(60)
        body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
        heard.append((time.monotonic(), second.post("/v1/completions", **body).text))

    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(listen, True) for _ in range(4)]
        waiting += [pool.submit(listen_whole) for _ in range(2)]
        begun.wait(60)
        time.sleep(1)  # the two that do not stream have no other sign of having begun
        killed = time.monotonic()
        os.kill(second.engine_pid(), signal.SIGKILL)
        for one in waiting:
            one.result(30)
    assert second.process.wait(20) != 0
    assert time.monotonic() - killed < 10
    for _, said in heard:
        message = json.loads(said.replace("data: [DONE]", "").rpartition("data: ")[2])["error"]
        assert "engine process ended" in message["message"]
        assert message["code"] == "engine_unavailable"
