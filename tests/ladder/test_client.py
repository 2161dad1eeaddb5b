"""One answer and its marks: what counts as the first text, where the clock stops, and every way an answer can fail."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ladder.stub import process, stub

from onechip.ladder import facts
from onechip.ladder.client import Client, Target, Unreachable
from onechip.ladder.http import BadUrl, Failed, parse_address, run
from onechip.ladder.stream import Answer, Collector

T = TypeVar("T")
HELLO = [{"role": "user", "content": "hi there"}]


def using(url: str, work: Callable[[Client], Awaitable[T]], **target: object) -> T:
    async def using_it() -> T:
        async with Client(Target(url, **target)) as client:  # pyright: ignore[reportArgumentType]
            return await work(client)

    return run(using_it())


def chat(url: str, n: int = 8, **target: object) -> Answer:
    return using(url, lambda c: c.chat(HELLO, max_tokens=n), model="stub", **target)


def test_the_first_text_is_not_the_chunk_that_names_the_role():
    with stub(role_delay=0.01, ttft=0.1, gap=0.01) as url:
        answer = chat(url)
    assert answer.first_byte is not None and answer.first_byte - answer.sent < 0.08
    assert answer.first_text is not None and answer.first_text - answer.sent > 0.095


def test_the_clock_stops_at_the_finish_chunk_and_not_at_usage_or_done():
    with stub(gap=0.001, tail=0.3) as url:
        answer = chat(url)
    assert answer.finish is not None and answer.finish - answer.sent < 0.2
    assert answer.usage is not None and answer.usage.completion_tokens == 8


def test_tokens_without_text_are_counted_and_move_the_finish_but_no_arrival():
    with stub(gap=0.02, empty=4) as url:
        answer = chat(url)
    assert len(answer.arrivals) == 4
    assert answer.finish is not None and answer.finish - answer.arrivals[-1] > 0.07
    assert answer.usage is not None and answer.usage.completion_tokens == 8


@pytest.mark.parametrize("usage", ["end", "running", "none"])
def test_usage_is_the_servers_or_unknown(usage: str):
    with stub(usage=usage, per_chunk=3) as url:
        answer = chat(url, 8)
    assert answer.ok and answer.text == " word" * 8
    assert (answer.usage and answer.usage.completion_tokens) == (None if usage == "none" else 8)
    assert answer.counts == ((3, 3, 2) if usage == "running" else (0, 0, 0))


def test_lines_may_end_as_on_windows():
    with stub(crlf=True) as url:
        assert chat(url).text == " word" * 8


def test_an_answer_that_is_not_streamed_has_an_end_and_no_first_text():
    with stub(ttft=0.05) as url:
        answer = using(url, lambda c: c.chat(HELLO, max_tokens=4, stream=False), model="stub")
    assert answer.first_text is None and answer.text == " word" * 4
    assert answer.finish is not None and answer.finish - answer.sent > 0.045
    assert answer.raw is not None and answer.raw["usage"]["prompt_tokens"] == 3


def test_a_refusal_says_the_status_and_the_servers_words():
    with stub(fail_after=0) as url:
        answer = chat(url)
    assert answer.error is not None
    assert (answer.error.kind, answer.error.status) == ("status", 503)
    assert "told to fail" in answer.error.message


def test_what_came_before_a_broken_stream_is_kept():
    with stub(break_after=3) as url:
        answer = chat(url)
    assert answer.error is not None and answer.error.kind == "broken"
    assert answer.text == " word" * 3 and answer.finish is None


def test_no_server_is_a_failure_to_connect():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        answer = chat(f"http://127.0.0.1:{free.getsockname()[1]}")
    assert answer.error is not None and answer.error.kind == "connect"


def test_a_slow_answer_times_out_and_says_the_limit():
    with stub(ttft=5) as url:
        answer = chat(url, timeout=0.1)
    assert answer.error is not None and answer.error.kind == "timeout"
    assert "0.1 s" in answer.error.message


def test_a_dead_server_breaks_the_answer_in_flight():
    async def work(client: Client) -> Answer:
        asking = asyncio.create_task(client.chat(HELLO, max_tokens=1000))
        await asyncio.sleep(0.2)
        running.kill()
        return await asking

    with process(gap=0.01) as (url, running):
        answer = using(url, work, model="stub")
    assert answer.error is not None and answer.error.kind == "broken" and answer.text


def test_a_connection_is_used_again_and_replaced_when_the_server_closed_it():
    async def work(client: Client) -> list[bool]:
        first = await client.complete("a", max_tokens=2)
        again = client.pool._idle[0]
        second = await client.complete("a", max_tokens=2)
        assert client.pool._idle == [again]
        again.close()
        third = await client.complete("a", max_tokens=2)
        return [first.ok, second.ok, third.ok]

    with stub() as url:
        assert using(url, work, model="stub") == [True, True, True]


def test_a_cancelled_request_gives_its_connection_up():
    async def work(client: Client) -> tuple[int, str]:
        asking = asyncio.create_task(client.complete("a", max_tokens=1000))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait([asking])
        return len(client.pool._idle), (await client.complete("a", max_tokens=2)).text

    with stub(gap=0.01) as url:
        assert using(url, work, model="stub") == (0, " word word")


EVENTS = (
    b': ping\n\ndata: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
    b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"\xc3\xa9\xe6\x97\xa5"}}]}\r\n\r\n'
    b'data:{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"c1","function":{"name":"f",'
    b'"arguments":"{\\"a\\":"}}]}}]}\n\n'
    b'event: x\ndata: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]}}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":9,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\ndata: [DONE]\n\n'
)


@given(st.lists(st.integers(0, len(EVENTS)), max_size=12))
def test_every_split_of_the_bytes_gives_the_same_answer(cuts: list[int]):
    collector = Collector()
    for number, (start, end) in enumerate(pairwise([0, *sorted(cuts), len(EVENTS)])):
        collector.piece(EVENTS[start:end], float(number + 1))
    answer = collector.answer(0.0, None)
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("é日", "hm", "tool_calls")
    (call,) = answer.tool_calls
    assert (call.id, call.name, call.arguments) == ("c1", "f", '{"a":1}')
    assert answer.usage is not None and answer.usage.cached_tokens == 4
    assert collector.done and len(answer.arrivals) == 4
    assert list(answer.arrivals) == sorted(answer.arrivals)


@pytest.mark.parametrize(
    ("bytes_", "kind"),
    [
        (b"data: {nonsense\n\n", "malformed"),
        (b'data: {"choices": 3}\n\n', "malformed"),
        (b'data: {"error": {"message": "engine died"}}\n\n', "broken"),
    ],
)
def test_an_event_that_is_no_chunk_fails_with_its_kind(bytes_: bytes, kind: str):
    with pytest.raises(Failed) as failed:
        Collector().piece(bytes_, 1.0)
    assert failed.value.kind == kind


@pytest.mark.parametrize(
    ("url", "port", "api"),
    [
        ("http://a:8000", 8000, "/v1"),
        ("a:8000/", 8000, "/v1"),
        ("https://a/v1/", 443, "/v1"),
        ("https://a/proxy/v1", 443, "/proxy/v1"),
    ],
)
def test_an_address_with_and_without_v1(url: str, port: int, api: str):
    address = parse_address(url)
    assert (address.port, address.api) == (port, api)


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:99999"])
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(BadUrl):
        parse_address(url)


def test_the_model_and_the_facts_are_the_servers():
    with stub() as url:
        found = using(url, facts.ask)
    assert (found.model.id, found.model.max_model_len) == ("stub", 4096)
    assert (found.software.engine, found.software.version) == ("stub", "1.2.3")
    assert found.tokenize == "prompt" and not found.metrics


@pytest.mark.parametrize("shape", ["prompt", "content"])
def test_tokens_are_counted_in_either_shape(shape: str):
    with stub(tokenize=shape) as url:
        found = using(url, facts.ask)
        counted = using(url, lambda c: facts.count_tokens(c, shape, "a b c"), model="stub")
    assert (found.tokenize, counted) == (shape, 4)


def test_a_server_that_is_down_is_said_to_be():
    with pytest.raises(Unreachable, match="start the server"):
        using("http://127.0.0.1:9", facts.ask)
