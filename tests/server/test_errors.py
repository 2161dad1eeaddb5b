"""What a client may send wrong: always an error in OpenAI's shape that names the field, and never one for the next."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.harness import MODEL, Running, error, ok, running
from tests.tiny_tokenizer import tiny

from onechip.config import ServerConfig

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
VOCAB = tiny().vocab_size


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(config=ServerConfig(max_body_bytes=100_000)) as it:
        yield it


BOTH: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 11),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("n", 0),
    ("n", 129),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("min_tokens", -1),
    ("min_tokens", 10_000),
    ("stop", [""]),
    ("stop", ""),
    ("stop", ["x"] * 17),
    ("stop", 5),
    ("stop_token_ids", [VOCAB]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", list(range(100))),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [999_999]),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {str(VOCAB): 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("ignore_eos", 1),
    ("frobnicate", 1),
    ("best_offer", None),
    ("guided_json", 7),
]
CHAT_ONLY: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", "hi"),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "robot", "content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}]),
    ("messages", [{"role": "user", "content": "x", "colour": "red"}]),
    ("messages", [*MESSAGES, *MESSAGES]),
    ("messages", [{"role": "assistant", "content": "x"}]),
    ("messages", [*MESSAGES, {"role": "tool", "content": "z"}]),
    ("messages", [*MESSAGES, {"role": "tool", "tool_call_id": "a", "content": "z"}]),
    ("messages", [{"role": "system", "content": "x"}]),
    ("logprobs", 1),
    ("top_logprobs", 3),
    ("max_completion_tokens", 0),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"bos_token": ""}),
    ("chat_template_kwargs", {"chat_template": "{% for i in range(10**9) %}{% endfor %}"}),
    ("chat_template_kwargs", {"enable_thinking": "false"}),
    ("chat_template_kwargs", {"enable_thinking": True}),
    ("prompt", "hi"),
    ("echo", True),
]
TEXT_ONLY: list[tuple[str, Any]] = [
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [2, VOCAB]),
    ("prompt", [-1]),
    ("prompt", [[2], [VOCAB]]),
    ("prompt", [2, "x"]),
    ("prompt", 5),
    ("prompt", None),
    ("logprobs", 21),
    ("logprobs", True),
    ("suffix", "x"),
    ("best_of", 3),
    ("messages", MESSAGES),
]
ALIASES = {
    "max_completion_tokens": "max_tokens"
}  # one limit in the engine, whichever name it came by


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [(CHAT, *case) for case in BOTH + CHAT_ONLY] + [(TEXT, *case) for case in BOTH + TEXT_ONLY],
    ids=lambda v: str(v)[:30],
)
def test_a_bad_value_is_a_400_that_names_its_field(
    server: Running, path: str, field: str, value: Any
):
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    server.engine.seen.clear()
    refused = error(server.post(path, base | {field: value}), 400)
    assert refused["type"] == "invalid_request_error"
    assert (refused["param"] or "").startswith(ALIASES.get(field, field))
    assert refused["code"]
    assert server.engine.seen == []


@pytest.mark.parametrize("name", ["max_tokens", "temperature"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(server: Running, name: str, number: str):
    raw = f'{{"model": "{MODEL}", "prompt": "a", "{name}": {number}}}'
    response = server.http.post(TEXT, content=raw, headers={"content-type": "application/json"})
    assert error(response, 400)


def test_nulls_mean_the_default(server: Running):
    nulls = dict.fromkeys(["temperature", "top_p", "top_k", "seed", "stop", "logit_bias", "n"])
    server.chat(**nulls, max_tokens=1)
    server.complete(**nulls, logprobs=None, max_tokens=1)


def test_text_and_labels_are_accepted(server: Running):
    server.chat(
        max_tokens=1,
        user="u",
        metadata={"a": "b"},
        store=False,
        response_format={"type": "text"},
        tool_choice="none",
        chat_template_kwargs={"enable_thinking": False},
    )


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a":"\\ud800"}']
)
def test_bodies_that_are_no_json_object_are_refused(server: Running, path: str, raw: bytes):
    response = server.http.post(path, content=raw, headers={"content-type": "application/json"})
    error(response, 400)


def test_other_media_types_are_refused(server: Running):
    body = json.dumps({"model": MODEL, "prompt": "a"})
    response = server.http.post(TEXT, content=body, headers={"content-type": "text/plain"})
    assert error(response, 415)["code"] == "unsupported_media_type"
    assert ok(
        server.http.post(
            TEXT, content=body, headers={"content-type": "application/json; charset=utf-8"}
        )
    )


@pytest.mark.parametrize("size", [100_001, 3_000_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_a_413(server: Running, size: int, chunked: bool):
    raw = json.dumps({"model": MODEL, "prompt": "a" * size}).encode()
    content: Any = iter([raw]) if chunked else raw
    response = server.http.post(TEXT, content=content, headers={"content-type": "application/json"})
    assert error(response, 413)["code"] == "body_too_large"
    assert ok(server.http.get("/health"))


def test_unknown_models_routes_and_methods(server: Running):
    assert error(server.post(CHAT, {"model": "x", "messages": MESSAGES}), 404)["param"] == "model"
    assert error(server.post(TEXT, {"model": "x", "prompt": "a"}), 404)["code"] == "model_not_found"
    assert error(server.http.post(TEXT, json={"prompt": "a"}), 400)["param"] == "model"
    for path in (
        "/index.html",
        "/page",
        "/page/",
        "/v1",
        "/v2/models",
        "//v1/models",
        "/V1/models",
        "/v1/models/",
    ):
        error(server.http.get(path), 404)
    assert error(server.http.get(CHAT), 405)["code"] == "method_not_allowed"
    error(server.http.post("/health"), 405)


def test_unknown_fields_are_all_named(server: Running):
    refused = error(server.post(TEXT, prompt="a", foo=1, bar=2), 400)
    assert "foo" in refused["message"] and "bar" in refused["message"]
    assert refused["code"] == "unknown_field"


def test_template_refusals_carry_the_templates_message(server: Running):
    refused = error(server.post(CHAT, messages=[*MESSAGES, *MESSAGES]), 400)
    assert "alternate" in refused["message"]
    server.chat(max_tokens=1)


def test_a_bad_request_leaves_its_neighbours_alone(server: Running):
    alone = server.complete("é", seed=3, max_tokens=20)["choices"]
    error(server.post(TEXT, prompt=[2, VOCAB]), 400)
    assert server.complete("é", seed=3, max_tokens=20)["choices"] == alone


def test_api_keys_guard_everything_but_health_metrics_and_the_page():
    with running(config=ServerConfig(api_keys=("one", "two"))) as server:
        refused = server.http.get("/v1/models", headers={"origin": "http://x"})
        assert error(refused, 401)["type"] == "authentication_error"
        assert refused.headers["access-control-allow-origin"] == "*"
        for header in (
            "Bearer three",
            "Bearer",
            "one",
            "Basic one",
            "Bearer onetwo",
            "Bearer \u00e9",
        ):
            headers = {"authorization": header.encode()}
            error(server.http.get("/v1/models", headers=headers), 401)
        for header in ("Bearer one", "bearer two", "BEARER  one"):
            ok(server.http.get("/v1/models", headers={"authorization": header}))
        for path in ("/health", "/metrics", "/ping"):
            assert server.http.get(path).status_code == 200
        double = f"{server.url}//health"  # httpx takes a bare //health for a host
        for path in ("/tokenize", double, "/health/", "/Health", "/version", "/nowhere"):
            error(server.http.get(path), 401)
        preflight = {
            "origin": "http://x",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        allowed = server.http.options(CHAT, headers=preflight)
        assert allowed.status_code in (200, 204)
        assert "authorization" in allowed.headers["access-control-allow-headers"]
