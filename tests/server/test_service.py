"""What operators switch: health for probes, draining, time limits, pings, keys and origins."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes import FakeEngine
from tests.server.harness import MODEL, Running, error, ok, parse_events, running, until

from onechip.config import ServerConfig
from onechip.errors import ConfigError
from onechip.server.main import with_key_file

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ENDLESS: dict[str, Any] = {**BODY, "max_tokens": 90_000, "ignore_eos": True}


def slow(sleep: float = 0.02, **fields: Any) -> FakeEngine:
    return FakeEngine(max_model_len=100_000, sleep=sleep, **fields)


# Health


def test_live_and_ready_differ_while_the_engine_starts_and_agree_after():
    hold = threading.Event()
    with running(hold_engine=hold) as server:
        until(lambda: server.http.get("/health/ready").status_code == 503)
        assert server.http.get("/health/ready").json() == {"status": "starting"}
        assert server.http.get("/health/live").status_code == 200
        hold.set()
        until(lambda: server.http.get("/health/ready").status_code == 200)
        assert server.http.get("/health/live").status_code == 200


def test_a_dead_engine_is_neither_live_nor_ready():
    with running(slow(break_at=2)) as server:
        error(server.post(CHAT, ENDLESS), 503)
        until(lambda: server.outcome == [1], 5)


# Draining


def start(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_draining_ends_what_runs_refuses_what_waits_and_exits_0():
    engine = slow(max_seqs=5)
    with running(engine, config=ServerConfig(drain_seconds=20)) as server:
        streams: list[list[dict[str, Any]]] = []
        waiting: list[httpx.Response] = []
        body = {**ENDLESS, "max_tokens": 60}
        threads = [start(lambda: streams.append(server.stream(CHAT, **body))) for _ in range(5)]
        until(lambda: server.client.stats.running == 5)
        threads += [
            start(lambda n=n: waiting.append(server.post(CHAT, {**body, "stream": n % 2 == 0})))
            for n in range(5)
        ]
        until(lambda: server.client.stats.waiting == 5)
        server.stop()
        until(lambda: len(waiting) == 5)
        for refused in waiting:
            assert error(refused, 503)["code"] == "shutting_down"
            assert int(refused.headers["retry-after"]) >= 1
        assert server.http.get("/health/ready").json() == {"status": "draining"}
        assert server.http.get("/health/live").status_code == 200
        late = server.post(CHAT, BODY)
        assert error(late, 503)["code"] == "shutting_down"
        assert "retry-after" in late.headers
        for thread in threads:
            thread.join(15)
        assert [s[-1]["choices"][0]["finish_reason"] for s in streams] == ["length"] * 5
        until(lambda: server.outcome == [0], 5)
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)


def test_what_runs_longer_than_the_drain_ends_with_an_error():
    with running(slow(), config=ServerConfig(drain_seconds=0.3)) as server:
        streams: list[list[dict[str, Any]]] = []
        thread = start(lambda: streams.append(server.stream(CHAT, **ENDLESS)))
        until(lambda: server.client.stats.running == 1)
        begun = time.monotonic()
        server.stop()
        thread.join(10)
        assert streams[0][-1]["error"]["code"] == "engine_unavailable"
        until(lambda: server.outcome == [0], 5)
        assert 0.2 < time.monotonic() - begun < 4


def test_an_idle_server_stops_at_once():
    with running() as server:
        begun = time.monotonic()
        server.stop()
        until(lambda: server.outcome == [0], 5)
        assert time.monotonic() - begun < 2


# Time limits


@pytest.mark.parametrize("by", ["server", "request"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_time_is_up_ends_with_an_error_and_frees_its_place(by: str, stream: bool):
    config = ServerConfig(request_timeout=0.3 if by == "server" else 60)
    with running(slow(), config=config) as server:
        body = {**ENDLESS, "stream": stream} | ({"timeout": 0.3} if by == "request" else {})
        begun = time.monotonic()
        answer = server.post(CHAT, body)
        assert 0.25 < time.monotonic() - begun < 3
        if stream:
            events = parse_events(answer.text)
            assert events[-1]["error"]["code"] == "request_timeout"
            assert len(events) > 3
        else:
            assert error(answer, 504)["code"] == "request_timeout"
            assert answer.headers["x-should-retry"] == "false"
        until(lambda: server.client.stats.running == 0 and not server.engine.rows)
        assert server.metric("onechip_requests_aborted_total") == 1


def test_the_limit_counts_the_time_in_the_queue():
    config = ServerConfig(request_timeout=30)
    with (
        running(slow(max_seqs=1), config=config) as server,
        server.http.stream("POST", CHAT, json={**ENDLESS, "stream": True}) as first,
    ):
        lines = first.iter_lines()
        next(lines)
        assert error(server.post(CHAT, {**BODY, "timeout": 0.2}), 504)
        until(lambda: server.client.stats.waiting == 0)


def test_an_answer_in_time_is_not_touched():
    with running(config=ServerConfig(request_timeout=20)) as server:
        assert server.chat(max_tokens=3, timeout=10)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("value", [0, -1, "5", True])
def test_a_time_limit_that_is_none_is_refused(value: Any):
    with running() as server:
        assert error(server.post(CHAT, {**BODY, "timeout": value}), 400)["param"] == "timeout"


# Pings


def test_a_stream_without_news_gets_comments_and_clients_do_not_notice():
    engine = FakeEngine(sleep=0.5)
    with running(engine, config=ServerConfig(ping_seconds=0.1)) as server:
        body = {**BODY, "stream": True, "max_tokens": 2, "ignore_eos": True}
        answer = server.http.post(CHAT, json=body)
        assert answer.text.startswith(": ping\n\n")
        assert 4 <= answer.text.count(": ping\n\n") <= 20
        parse_events(answer.text.replace(": ping\n\n", ""))
        chunks = list(
            server.openai.chat.completions.create(
                model=MODEL, messages=BODY["messages"], stream=True, max_tokens=2
            )
        )
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason]


def test_no_pings_are_sent_where_they_are_switched_off_or_not_needed():
    with running(FakeEngine(sleep=0.2), config=ServerConfig(ping_seconds=0)) as server:
        assert "ping" not in server.post(CHAT, {**BODY, "stream": True, "max_tokens": 2}).text
    with running() as server:
        assert "ping" not in server.post(CHAT, {**BODY, "stream": True, "max_tokens": 2}).text


def test_an_error_after_a_ping_is_an_event():
    config = ServerConfig(ping_seconds=0.1, request_timeout=0.5)
    with running(FakeEngine(sleep=1.0), config=config) as server:
        text = server.post(CHAT, {**BODY, "stream": True}).text.replace(": ping\n\n", "")
        (event,) = parse_events(text)
        assert event["error"]["code"] == "request_timeout"


# Keys and origins


def key_file(path: Path, text: str) -> ServerConfig:
    path.write_text(text)
    return ServerConfig(api_keys=("flag",), api_key_file=str(path))


def test_keys_come_from_flags_and_a_file(tmp_path: Path):
    config = with_key_file(key_file(tmp_path / "keys", "# the team\none\n\n two  # hers\n"))
    assert config.api_keys == ("flag", "one", "two")
    with running(config=config) as server:
        for key in config.api_keys:
            for header in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                ok(server.http.get("/v1/models", headers=header))
        for header in ({}, {"x-api-key": "three"}, {"x-api-key": ""}, {"x-api-key": "# the team"}):
            error(server.http.get("/v1/models", headers=header), 401)
        for path in ("/health", "/health/live", "/health/ready", "/ping", "/metrics"):
            assert server.http.get(path).status_code == 200


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_a_key_file_without_a_key_is_refused_lest_the_server_be_open(tmp_path: Path, text: str):
    with pytest.raises(ConfigError, match="holds no key"):
        with_key_file(key_file(tmp_path / "keys", text))


def test_a_key_file_that_cannot_be_read_is_refused():
    with pytest.raises(ConfigError, match="api-key-file /nowhere"):
        with_key_file(ServerConfig(api_key_file="/nowhere"))


def cross(server: Running, origin: str) -> str | None:
    answer = server.http.get("/v1/models", headers={"origin": origin})
    return answer.headers.get("access-control-allow-origin")


def test_other_origins_may_use_the_api_unless_told_otherwise():
    with running() as server:
        assert cross(server, "http://a") == "*"
        answer = server.http.get("/v1/models", headers={"origin": "http://a"})
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    with running(config=ServerConfig(cors_origins=("http://a", "http://b"))) as server:
        assert [cross(server, f"http://{x}") for x in "abc"] == ["http://a", "http://b", None]
    with running(config=ServerConfig(cors=False)) as server:
        assert cross(server, "http://a") is None
        preflight = {"origin": "http://a", "access-control-request-method": "POST"}
        assert server.http.options(CHAT, headers=preflight).status_code == 405
