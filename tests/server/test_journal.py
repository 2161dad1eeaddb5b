"""Request ids, log lines, traces: what is told of a request, and what never is."""

import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.fakes import FakeEngine
from tests.server.harness import MODEL, Running, error, running, until

from onechip.config import ServerConfig
from onechip.engine.progress import JsonLines
from onechip.errors import ConfigError
from onechip.server.tracing import Tracer, open_tracer

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "secret"}]}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(config=ServerConfig(api_keys=("key",))) as it:
        it.http.headers["authorization"] = "Bearer key"
        yield it


def paths() -> list[tuple[str, str]]:
    return [("GET", "/health"), ("GET", "/v1/models"), ("GET", "/nowhere"), ("PUT", CHAT)]


@pytest.mark.parametrize(("method", "path"), paths())
def test_a_request_id_comes_back_on_every_answer(server: Running, method: str, path: str):
    answer = server.http.request(method, path, headers={"x-request-id": "my-id.7"})
    assert answer.headers.get_list("x-request-id") == ["my-id.7"]


def test_a_request_id_comes_back_on_refusals_and_streams(server: Running):
    named = {"x-request-id": "a"}
    locked = server.http.get("/v1/models", headers={**named, "authorization": "Bearer no"})
    assert (locked.status_code, locked.headers["x-request-id"]) == (401, "a")
    bad = server.http.post(CHAT, json={"model": MODEL}, headers=named)
    assert (bad.status_code, bad.headers["x-request-id"]) == (400, "a")
    body = {**BODY, "stream": True, "max_tokens": 2}
    with server.http.stream("POST", CHAT, json=body, headers=named) as stream:
        assert stream.headers["x-request-id"] == "a"


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "\u00e9", "tab\tbed"])
def test_an_id_that_is_no_plain_word_is_replaced(server: Running, given: str | None):
    headers = {} if given is None else {"x-request-id": given.encode()}
    made = {server.http.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in made)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines: list[dict[str, Any]] = []
        self.formatter = JsonLines()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    handler = Lines()
    log = logging.getLogger("onechip")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.lines
    log.removeHandler(handler)
    log.setLevel(level)


def test_a_request_is_one_json_line_that_tells_no_text(
    server: Running, lines: list[dict[str, Any]]
):
    headers = {"x-request-id": "r1"}
    usage = server.http.post(
        CHAT, json={**BODY, "max_tokens": 3, "ignore_eos": True}, headers=headers
    ).json()["usage"]
    until(lambda: lines)
    (line,) = lines
    assert line["request_id"] == "r1"
    assert (line["method"], line["path"], line["status"]) == ("POST", CHAT, 200)
    assert line["completion_tokens"] == usage["completion_tokens"] == 3
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["finish"] == ["length"]
    assert line["model"] == MODEL
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert line["time"].endswith("+00:00")
    assert "secret" not in json.dumps(line)


def test_refusals_are_logged_with_their_code_and_probes_are_not(
    server: Running, lines: list[dict[str, Any]]
):
    server.http.get("/health")
    server.http.get("/metrics")
    error(server.post(CHAT, {**BODY, "temperature": 9}), 400)
    until(lambda: lines)
    assert [(line["status"], line["error"]) for line in lines] == [(400, "invalid_value")]


def test_a_client_that_goes_is_a_499(lines: list[dict[str, Any]]):
    with running(FakeEngine(sleep=0.05, max_model_len=9000)) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(
                CHAT, json={**BODY, "max_tokens": 8000, "ignore_eos": True}, timeout=0.2
            )
        until(lambda: any(line["message"].startswith("POST") for line in lines))
    (line,) = [line for line in lines if line.get("path") == CHAT]
    assert (line["status"], line["finish"]) == (499, ["abort"])


def test_the_access_log_can_be_switched_off(lines: list[dict[str, Any]]):
    with running(config=ServerConfig(access_log=False)) as server:
        server.chat(max_tokens=1)
    assert not [line for line in lines if line["logger"] == "onechip.access"]


def test_a_path_cannot_forge_a_log_line(server: Running, lines: list[dict[str, Any]]):
    server.http.get("/a%0Aonechip.access:%20GET%20/admin%20200")
    until(lambda: lines)
    assert "\n" not in lines[0]["message"]


# Traces


def test_a_generating_request_is_a_span_of_its_callers_trace():
    exporter = InMemorySpanExporter()
    with running(FakeEngine(), tracing=Tracer(exporter, batch=False)) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {**BODY, "max_tokens": 4, "ignore_eos": True, "temperature": 0.5, "seed": 3}
        answer = server.http.post(CHAT, json=body, headers=headers).json()
        server.http.get("/v1/models")
        until(exporter.get_finished_spans)
    (span,) = exporter.get_finished_spans()
    assert span.name == f"chat {MODEL}"
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    told = dict(span.attributes or {})
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.seed"] == 3
    assert told["gen_ai.request.max_tokens"] == 4
    assert told["gen_ai.usage.output_tokens"] == 4
    assert told["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert told["gen_ai.response.id"] == answer["id"]
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert told["http.response.status_code"] == 200
    assert "secret" not in str(told)
    assert span.start_time is not None and span.end_time is not None
    first = told["gen_ai.latency.time_to_first_token"]
    assert isinstance(first, float) and 0 < first <= (span.end_time - span.start_time) / 1e9


def test_a_trace_that_is_not_sampled_stays_so():
    exporter = InMemorySpanExporter()
    with running(FakeEngine(), tracing=Tracer(exporter, batch=False)) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        server.http.post(CHAT, json={**BODY, "max_tokens": 1}, headers=headers)
        server.chat(max_tokens=1)
        until(exporter.get_finished_spans)
    assert [span.parent for span in exporter.get_finished_spans()] == [None]


def test_spans_arrive_at_an_otlp_collector_even_when_the_server_ends_at_once():
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        tracer = open_tracer(f"http://127.0.0.1:{collector.server_port}")
        assert tracer is not None
        with running(FakeEngine(), tracing=tracer) as server:
            server.chat(max_tokens=1)
        tracer.close()
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()
    ((path, body),) = received
    assert path == "/v1/traces"
    request = ExportTraceServiceRequest.FromString(body)
    (resource,) = request.resource_spans
    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert attributes["service.name"] == "onechip"
    assert [s.name for scope in resource.scope_spans for s in scope.spans] == [f"chat {MODEL}"]


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://x", "http://", ""])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str):
    with pytest.raises(ConfigError, match="otlp-endpoint"):
        open_tracer(endpoint)


def test_without_the_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch):
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"onechip\[otel\]"):
        open_tracer("http://localhost:4318")


def test_no_endpoint_is_no_tracer():
    assert open_tracer(None) is None
