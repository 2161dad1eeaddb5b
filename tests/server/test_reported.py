"""What was reported of other servers, as a client would see it: sampling, stops, limits and accounting.

The cases are those of docs/bug_cases.md, groups E to G, that no other test covers.
"""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.dialect_tokenizer import dialect, ids_of
from tests.fakes import FakeEngine
from tests.server.harness import MODEL, Running, error, ok, running, until
from tests.tiny_tokenizer import tiny

from onechip.config import ServerConfig

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"s": {"type": "string"}}},
    },
}
THINKING = "<|channel>thought\nA END B\n<channel|>C END D<turn|>"
CALLING = '<|tool_call>call:f{s:<|"|>x END y<|"|>}<tool_call|><turn|>'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(max_model_len=4096), family="dialect") as it:
        yield it


@pytest.fixture(autouse=True)
def fresh(server: Running) -> None:
    server.engine.script, server.engine.per_step, server.engine.sleep = None, 1, 0.0
    server.engine.seen.clear()


def say(server: Running, text: str) -> None:
    server.engine.script = ids_of(text)


# E04: ids out of range beside a good request


BAD_IDS: list[tuple[str, dict[str, Any]]] = [
    ("stop_token_ids", {"stop_token_ids": [10**6], "min_tokens": 1}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("allowed_token_ids", {"allowed_token_ids": [10**6]}),
    ("logit_bias", {"logit_bias": {str(10**6): 1}}),
    ("prompt", {"prompt": [2, 10**6]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": []}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_IDS, ids=lambda v: str(v)[:40])
def test_an_id_out_of_range_is_refused_and_its_neighbour_is_untouched(
    server: Running, param: str, fields: dict[str, Any]
):
    good = {"model": MODEL, "prompt": [60, 61], "max_tokens": 200, "seed": 3, "ignore_eos": True}
    alone = ok(server.post(TEXT, good))["choices"]
    server.engine.sleep = 0.001
    beside: list[Any] = []
    thread = threading.Thread(target=lambda: beside.append(server.post(TEXT, good).json()))
    thread.start()
    refused = error(server.post(TEXT, {"prompt": [60], "max_tokens": 5, **fields}), 400)
    thread.join()
    assert refused["param"].startswith(param)
    assert beside[0]["choices"] == alone


def test_a_media_placeholder_without_media_is_refused(server: Running):
    (placeholder,) = ids_of("<|image|>")
    refused = error(server.post(TEXT, prompt=[2, placeholder], max_tokens=5), 400)
    assert "placeholder" in refused["message"]


# E05, E11: what a stream says of tokens and choices


@pytest.mark.parametrize("top", [0, 5, 20])
@pytest.mark.parametrize("per_step", [1, 4])
def test_log_probabilities_of_a_stream_are_those_of_the_whole(
    server: Running, top: int, per_step: int
):
    say(server, "The quick brown fox<turn|>")
    server.engine.per_step = per_step
    fields = {"logprobs": True, "top_logprobs": top}
    whole = server.chat(**fields)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"] - 1  # the stop id has no entry
    for entry in content:
        values = [t["logprob"] for t in entry["top_logprobs"]]
        assert len(values) == top and values == sorted(values, reverse=True)
    chunks = server.stream_chat(**fields)
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content
    error(server.post(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=21), 400)
    error(server.post(CHAT, messages=MESSAGES, top_logprobs=1), 400)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_choice_of_a_stream_begins_and_ends_once_under_one_id(server: Running, path: str):
    body: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    body |= {"n": 3, "max_tokens": 5, "ignore_eos": True}
    chunks = server.stream(path, **body, stream_options={"include_usage": True})
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    finishes: dict[int, list[str]] = defaultdict(list)
    roles: dict[int, int] = defaultdict(int)
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        roles[choice["index"]] += choice.get("delta", {}).get("role") == "assistant"
        if choice["finish_reason"]:
            finishes[choice["index"]].append(choice["finish_reason"])
    assert dict(finishes) == {i: ["length"] for i in range(3)}
    assert dict(roles) == dict.fromkeys(range(3), int(path == CHAT))
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 15
    assert usage["prompt_tokens"] == len(server.engine.seen[0].prompt_ids)


# E14: shapes of mistakes


@pytest.mark.parametrize(
    "body",
    [
        {"messages": MESSAGES},
        {"model": MODEL},
        {"model": None, "messages": MESSAGES},
        {"model": 5, "messages": MESSAGES},
        {"model": MODEL, "messages": MESSAGES, "stream_options": {"include_usage": "yes"}},
    ],
)
def test_a_missing_or_mistyped_field_is_named(server: Running, body: dict[str, Any]):
    refused = error(server.http.post(CHAT, json=body), 400)
    assert refused["param"] and refused["param"] in refused["message"]
    assert server.engine.seen == []


# F01, F02, F08: stops


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_looked_for_in_the_answer_only(server: Running, stream: bool):
    def answer(**fields: Any) -> dict[str, Any]:
        if not stream:
            (choice,) = server.chat(**fields)["choices"]
            message = choice["message"]
            call = (message.get("tool_calls") or [{}])[0].get("function", {})
            return {
                "content": message["content"] or "",
                "reasoning": message.get("reasoning") or "",
                "arguments": call.get("arguments", ""),
                "finish": choice["finish_reason"],
            }
        said = {"content": "", "reasoning": "", "arguments": "", "finish": None}
        for choice in (c for chunk in server.stream_chat(**fields) for c in chunk["choices"]):
            delta = choice["delta"]
            said["content"] += delta.get("content") or ""
            said["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                said["arguments"] += call["function"].get("arguments", "")
            said["finish"] = choice["finish_reason"] or said["finish"]
        return said

    say(server, THINKING)
    assert answer(stop="END") == {
        "content": "C ",
        "reasoning": "A END B",
        "arguments": "",
        "finish": "stop",
    }
    say(server, CALLING)
    called = answer(stop="END", tools=[TOOL])
    assert (called["arguments"], called["finish"]) == ('{"s": "x END y"}', "tool_calls")


def test_text_is_not_held_back_by_long_stops_or_tools():
    text = "abcdefghij" * 3
    engine = FakeEngine(script=ids_of(text + "<turn|>"), sleep=0.02)
    with running(engine, family="dialect") as server:
        body = {
            "model": MODEL,
            "messages": MESSAGES,
            "stop": ["0123456789ABCDEF"],
            "tools": [TOOL],
            "stream": True,
        }
        pieces: list[str] = []
        steps: list[int] = []
        with server.http.stream("POST", CHAT, json=body) as response:
            for line in response.iter_lines():
                if '"content":"' in line and '"content":""' not in line:
                    pieces.append(line)
                    steps.append(engine.steps)
        assert len(pieces) >= 20  # thirty tokens, allowing for a busy machine
        assert steps[0] <= 4


# G03: clients that leave


async def leave(http: httpx.AsyncClient, number: int) -> None:
    """Goes after some deltas, before the headers, or in the middle of a whole answer."""
    body = {"model": MODEL, "prompt": [60], "max_tokens": 2000, "ignore_eos": True}
    if number % 2:
        body |= {"stream": True, "n": 1 + 3 * (number % 8 == 1)}
    timeout = httpx.Timeout(20, read=0.1)
    try:
        async with http.stream("POST", TEXT, json=body, timeout=timeout) as response:
            lines = response.aiter_lines()
            for _ in range(3):
                await anext(lines)
    except httpx.ReadTimeout:
        pass


async def stay(http: httpx.AsyncClient, number: int) -> None:
    body = {"model": MODEL, "prompt": [60], "max_tokens": 2, "stream": bool(number % 2)}
    (await http.post(TEXT, json=body, timeout=20)).raise_for_status()


def test_two_hundred_clients_leave_and_two_hundred_stay():
    engine = FakeEngine(max_model_len=4096, sleep=0.005)
    with running(engine) as server:

        async def all_of_them() -> None:
            gate = asyncio.Semaphore(40)
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(
                base_url=server.url, limits=limits, trust_env=False
            ) as http:

                async def one(work: Any, number: int) -> None:
                    async with gate:
                        await work(http, number)

                jobs = [one(leave, n) for n in range(200)] + [one(stay, n) for n in range(200)]
                await asyncio.gather(*jobs)

        asyncio.run(all_of_them())
        until(lambda: not server.engine.rows and server.client.stats.running == 0, 2)
        assert server.client.stats.pages_free == server.client.stats.pages_total
        left = sum(request.sampling.max_tokens == 2000 for request in engine.seen)
        assert left > 100  # the others left before the engine had heard of them
        assert len(engine.aborted) == left
        until(lambda: server.metric("onechip_requests_aborted_total") == left)
        assert server.metric('onechip_requests_finished_total{reason="length"}') == 200
        steps = engine.steps
        time.sleep(0.1)
        assert engine.steps == steps


def test_a_waiting_request_starts_when_the_one_before_it_leaves():
    engine = FakeEngine(max_model_len=100_000, sleep=0.01, max_seqs=1)
    with running(engine) as server:
        body = {"model": MODEL, "prompt": [60], "max_tokens": 90_000, "ignore_eos": True}
        answers: list[Any] = []
        with server.http.stream("POST", TEXT, json={**body, "stream": True}) as first:
            lines = first.iter_lines()
            next(lines)
            second = threading.Thread(
                target=lambda: answers.append(server.complete([60], max_tokens=2))
            )
            second.start()
            until(lambda: server.client.stats.waiting == 1)
        second.join(2)
        assert answers


# G04: health while the engine is busy with something long


def test_health_answers_at_once_while_a_step_takes_seconds():
    with running(FakeEngine(sleep=1.5)) as server:
        thread = threading.Thread(target=lambda: server.chat(max_tokens=1))
        thread.start()
        until(lambda: server.engine.steps == 1)
        begun = time.monotonic()
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/metrics").status_code == 200
        assert time.monotonic() - begun < 1
        thread.join()


# G05: usage in streams


USAGES: list[tuple[str, dict[str, Any]]] = [
    ("Hello.<turn|>", {}),
    ("Hello, world", {"max_tokens": 4}),
    ("Hello.<turn|>", {"n": 2}),
    (THINKING, {}),
    (CALLING, {"tools": [TOOL]}),
]


@pytest.mark.parametrize(("text", "fields"), USAGES)
def test_usage_is_one_chunk_at_the_end_and_that_of_the_whole_answer(
    server: Running, text: str, fields: dict[str, Any]
):
    say(server, text)
    whole = server.chat(**fields)["usage"]
    chunks = server.stream_chat(**fields, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks[:-1])
    for options in ({"include_usage": False}, None):
        plain = server.stream_chat(**fields, stream_options=options)
        assert all(chunk["choices"] and "usage" not in chunk for chunk in plain)


# G08, G10: names and paths


def test_other_spellings_of_a_path_are_other_paths():
    with running(config=ServerConfig(api_keys=("k",))) as server:
        for path in ("//v1/models", "/V1/models", "/v1/models/../models", "/health/../v1/models"):
            assert server.http.get(path).status_code in (401, 404)
        headers = {"authorization": "Bearer k"}
        for path in ("//v1/models", "/V1/models"):
            assert server.http.get(path, headers=headers).status_code == 404


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/v1/messages"])
def test_an_adapter_or_model_that_is_not_served_is_a_404(server: Running, path: str):
    body: dict[str, Any] = {"model": "my-adapter", "max_tokens": 1, "messages": MESSAGES}
    if path == TEXT:
        body = {"model": "my-adapter", "prompt": "a"}
    if path == "/v1/responses":
        body = {"model": "my-adapter", "input": "a"}
    refused = server.http.post(path, json=body)
    assert refused.status_code == 404
    assert "my-adapter" in refused.json()["error"]["message"]


def test_text_survives_the_server_as_it_is(server: Running):
    """F05: spaces, newlines and U+2581 (which encodes as a space: lossy by design)."""
    for text in (" a", "a  b", "\n\n  x", "\tx", " " * 31, "```\n  code\n```"):
        server.engine.script = [*dialect().encode(text), *ids_of("<turn|>")]
        assert server.chat()["choices"][0]["message"]["content"] in (text, text or None)
    assert tiny().decode(tiny().encode("\u2581")) == " "
