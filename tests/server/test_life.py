"""From start to end: readiness, overload, clients that go away, an engine that dies, and many at once."""

import asyncio
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from tests.fakes import FakeEngine
from tests.server.harness import MODEL, error, parse_events, running, until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 90_000,
    "ignore_eos": True,
}


def long_engine(**fields: Any) -> FakeEngine:
    return FakeEngine(max_model_len=100_000, sleep=0.01, **fields)


def test_health_is_503_until_the_engine_is_ready_and_requests_are_refused_meanwhile():
    hold = threading.Event()
    with running(hold_engine=hold) as server:
        until(lambda: server.http.get("/health").status_code == 503)
        refused = server.post(CHAT, {**BODY, "max_tokens": 1})
        assert error(refused, 503)["code"] == "engine_unavailable"
        assert "retry-after" in refused.headers
        assert server.metric("onechip_engine_up") == 0
        hold.set()
        until(lambda: server.http.get("/health").status_code == 200)
        server.chat(max_tokens=1)


def test_overload_is_a_503_with_retry_after_for_both_kinds_of_answer():
    with running(long_engine(max_seqs=1, max_waiting=1)) as server:
        request = server.http.build_request("POST", CHAT, json={**BODY, "stream": True})
        first = server.http.send(request, stream=True)

        def wait_in_vain() -> None:
            with pytest.raises(httpx.ReadTimeout):
                server.http.post(CHAT, json=BODY, timeout=3)

        second = threading.Thread(target=wait_in_vain)
        second.start()
        until(lambda: server.client.stats.waiting == 1)
        for stream in (False, True):
            refused = server.post(CHAT, {**BODY, "stream": stream})
            assert error(refused, 503)["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
        second.join()
        first.close()
        until(lambda: server.client.stats.running == 0)


@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_a_stream_frees_its_requests(n: int):
    with running(long_engine()) as server:
        for _ in range(5):
            body = {**BODY, "stream": True, "n": n}
            with server.http.stream("POST", CHAT, json=body) as response:
                lines = response.iter_lines()
                for _ in range(3):
                    next(lines)
        until(lambda: server.client.stats.running == 0 and not server.engine.rows, 2)
        until(lambda: server.metric("onechip_requests_aborted_total") == 5 * n)
        assert server.client.stats.pages_free == server.client.stats.pages_total


def test_a_client_that_leaves_before_a_whole_answer_frees_its_request():
    with running(long_engine()) as server:
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                server.http.post(CHAT, json=BODY, timeout=0.3)
        until(lambda: server.client.stats.running == 0 and not server.engine.rows, 2)
        assert server.metric("onechip_requests_aborted_total") == 3


def test_a_client_that_leaves_while_waiting_frees_its_place():
    with running(long_engine(max_seqs=1)) as server:
        with server.http.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
            lines = response.iter_lines()  # kept: dropping it would close the response
            next(lines)
            with pytest.raises(httpx.ReadTimeout):
                server.http.post(CHAT, json={**BODY, "stream": True}, timeout=0.3)
            until(lambda: server.client.stats.waiting == 0 and not server.engine.waiting, 2)
            assert server.client.stats.running == 1
        until(lambda: server.client.stats.running == 0)


def test_a_client_that_sends_half_a_body_reaches_no_engine():
    with running() as server:
        port = int(server.url.rpartition(":")[2])
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                    b'Content-Length: 100\r\n\r\n{"model"'
                )
        server.chat(max_tokens=1)
        assert len(server.engine.seen) == 1


def test_normal_ends_abort_nothing():
    with running() as server:
        for _ in range(20):
            server.chat(max_tokens=2)
            server.stream_chat(max_tokens=2)
        assert server.engine.aborted == []
        assert server.metric("onechip_requests_aborted_total") == 0


def test_a_stop_string_aborts_only_its_own_choice():
    engine = FakeEngine(script=list(range(300, 340)), sleep=0.005)
    with running(engine) as server:
        text = server.complete(max_tokens=30, ignore_eos=True)["choices"][0]["text"]
        answer = server.complete(max_tokens=30, ignore_eos=True, stop=text[5])
        assert answer["choices"][0]["text"] == text[:5]
        assert answer["choices"][0]["finish_reason"] == "stop"
        until(lambda: len(engine.aborted) == 1 and server.client.stats.running == 0)
        assert server.metric("onechip_requests_aborted_total") == 0


def test_an_engine_that_dies_ends_all_who_wait_at_once_and_the_server_with_status_1():
    engine = long_engine()
    with running(engine) as server:
        results: list[Any] = []

        def stream() -> None:
            body = {**BODY, "stream": True}
            with httpx.stream("POST", server.url + CHAT, json=body, timeout=20) as response:
                results.append(parse_events("".join(response.iter_text())))

        def whole() -> None:
            results.append(httpx.post(server.url + CHAT, json=BODY, timeout=20))

        threads = [threading.Thread(target=work) for work in (stream, stream, whole, whole)]
        for thread in threads:
            thread.start()
        until(lambda: server.client.stats.running == 4)
        engine.break_at = engine.steps + 2
        begin = time.monotonic()
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
        assert time.monotonic() - begin < 3
        for result in results:
            if isinstance(result, list):
                assert result[-1]["error"]["code"] == "engine_failed"
                assert set(result[-1]["error"]) == {"message", "type", "param", "code"}
            else:
                error(result, 503)
        until(lambda: server.outcome == [1], 5)


async def one_client(http: httpx.AsyncClient, i: int) -> None:
    """A stream whose tokens, finish and usage are all accounted for."""
    prompt, tokens = 5 + (i * 37) % 900, 1 + (i * 13) % 128
    body = {
        "model": MODEL,
        "prompt": [40 + i] * prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        chunks = parse_events("".join([part async for part in response.aiter_text()]))
    finishes = [
        c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]
    ]
    assert finishes == ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == tokens
    assert chunks[-1]["usage"]["prompt_tokens"] == prompt


def test_sixty_four_clients_stream_at_once_and_each_gets_everything_once():
    with running(FakeEngine(max_model_len=2048, sleep=0.002)) as server:

        async def all_of_them() -> None:
            limits = httpx.Limits(max_connections=64)
            async with httpx.AsyncClient(
                base_url=server.url, timeout=60, limits=limits, trust_env=False
            ) as http:
                await asyncio.gather(*(one_client(http, i) for i in range(64)))

        asyncio.run(all_of_them())
        until(lambda: server.client.stats.running == 0)
        assert server.metric("onechip_generation_tokens_total") == sum(
            1 + (i * 13) % 128 for i in range(64)
        )


def test_stopping_lets_running_answers_end():
    engine = FakeEngine(sleep=0.02)
    with running(engine) as server:
        results: list[Any] = []
        thread = threading.Thread(
            target=lambda: results.append(server.stream_chat(max_tokens=40, ignore_eos=True))
        )
        thread.start()
        until(lambda: server.client.stats.running == 1)
        server.stop()
        thread.join(10)
        assert results[0][-1]["choices"][0]["finish_reason"] == "length"
        until(lambda: server.outcome == [0], 5)


def test_stopping_twice_ends_running_answers_with_an_error():
    with running(long_engine()) as server:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(server.stream(CHAT, **BODY)))
        thread.start()
        until(lambda: server.client.stats.running == 1)
        server.stop()
        server.stop()
        thread.join(5)
        assert results[0][-1]["error"]["code"] == "engine_unavailable"
        until(lambda: server.outcome == [0], 5)
