"""docs/api.md is made from the models, and the models are what the server does: every field is proved by requests."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.dialect_tokenizer import ids_of
from tests.fakes import FakeEngine
from tests.server.harness import MODEL, Running, running

from onechip.server import schema
from onechip.server.meanings import MEANINGS
from onechip.server.surface import ROUTES, Row, page, rows

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
SCRIPT = (
    "<|channel>thought\nHm.\n<channel|>Hello END world."
    '<|tool_call>call:f{s:<|"|>x<|"|>}<tool_call|><|tool_call>call:f{}<tool_call|><turn|>'
)
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"s": {"type": "string"}}}
FUNCTION = {
    "name": "f",
    "description": "d",
    "parameters": SCHEMA,
    "response": SCHEMA,
    "strict": True,
}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURNS = [
    {"role": "system", "content": [{"type": "text", "text": "S"}]},
    USER,
    {"role": "assistant", "content": "a", "reasoning": "R", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "z"},
]
CACHE = {"type": "ephemeral"}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": CACHE}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "R", "signature": "s"},
            {
                "type": "tool_use",
                "id": "t1",
                "name": "f",
                "input": {},
                "caller": {"type": "direct"},
            },
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "z", "is_error": True}],
    },
]
CUSTOM = {"name": "f", "description": "d", "input_schema": SCHEMA, "type": "custom", "strict": True}
FUNCTIONS = {
    "type": "function",
    "name": "f",
    "description": "d",
    "parameters": SCHEMA,
    "strict": True,
}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {
        "type": "reasoning",
        "id": "r",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "R"}],
    },
    {
        "type": "function_call",
        "call_id": "c1",
        "name": "f",
        "arguments": "{}",
        "status": "completed",
    },
    {"type": "function_call_output", "call_id": "c1", "output": "z"},
]
THINK = {"enable_thinking": True}

# What a field is tried with, beside the route's BASE: its value alone, or a whole body to compare with and without it.
SAMPLING: dict[str, Any] = {
    "stream": True,
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 2,
    "seed": 2,
    "stop": ["END"],
}
SHARED: dict[str, Any] = SAMPLING | {
    "n": 2,
    "logit_bias": {"300": 1},
    "allowed_token_ids": [300],
    "min_tokens": 2,
    "ignore_eos": True,
    "include_stop_str_in_output": {"stop": ["END"], "include_stop_str_in_output": True},
    "stop_token_ids": [300],
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "stream_options": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    "structured_outputs": {"choice": ["a", "b"]},
    "guided_json": SCHEMA,
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "guided_whitespace_pattern": {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
}  # fmt: skip
EXAMPLES: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": SHARED | {
        "messages": TURNS,
        "max_completion_tokens": 2,
        "logprobs": True,
        "top_logprobs": {"logprobs": True, "top_logprobs": 2},
        "chat_template_kwargs": THINK,
        "add_generation_prompt": False,
        "continue_final_message": {
            "messages": [USER, {"role": "assistant", "content": "On"}], "continue_final_message": True,
        },
        "prompt_only": True,
        "reasoning_effort": "high",
        "include_reasoning": False,
        "tools": [TOOL],
        "tool_choice": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
    },
    "POST /v1/completions": SHARED | {
        "prompt": "ho",
        "echo": True,
        "logprobs": 1,
        "add_special_tokens": False,
    },
    "POST /v1/responses": SAMPLING | {
        "input": ITEMS,
        "instructions": "I",
        "store": False,
        "max_output_tokens": 3,
        "tools": [FUNCTIONS],
        "tool_choice": {"tools": [FUNCTIONS], "tool_choice": {"type": "function", "name": "f"}},
        "parallel_tool_calls": {"tools": [FUNCTIONS], "parallel_tool_calls": False},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}},
        "reasoning": {"effort": "high"},
        "chat_template_kwargs": THINK,
    },
    "POST /v1/messages": {
        "messages": BLOCKS,
        "max_tokens": 3,
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "stop_sequences": ["END"],
        "system": [{"type": "text", "text": "S", "cache_control": CACHE}],
        "tools": [CUSTOM],
        "tool_choice": {"tools": [CUSTOM], "tool_choice": {"type": "tool", "name": "f"}},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "POST /tokenize": {
        "prompt": "ho",
        "add_special_tokens": False,
        "return_token_strs": True,
    },
    "POST /detokenize": {"tokens": [300, 301]},
}  # fmt: skip
EXAMPLES["POST /v1/messages/count_tokens"] = {
    name: EXAMPLES["POST /v1/messages"][name]
    for name in ("messages", "system", "tools", "thinking")
}
BASE: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {"messages": [USER], "seed": 1},
    "POST /v1/completions": {"prompt": "hi", "seed": 1},
    "POST /v1/responses": {"input": "hi", "seed": 1},
    "POST /v1/messages": {"messages": [USER], "max_tokens": 500},
    "POST /v1/messages/count_tokens": {"messages": [USER]},
    "POST /tokenize": {"prompt": "hi"},
    "POST /detokenize": {"tokens": [300]},
}
# Honoured, and shown elsewhere: what it does is not to be seen in one answer of a scripted engine.
ELSEWHERE = {
    "model": "tests/server/test_errors.py",
    "timeout": "tests/server/test_service.py",
    "suffix": "tests/server/test_errors.py",
    "best_of": "tests/server/test_errors.py",
    "previous_response_id": "tests/server/test_responses.py",
    "store": "tests/server/test_responses.py",
    "stream_options": "refused values are all it has in Responses",
    "POST /tokenize messages": "tests/server/test_api.py",
    "POST /tokenize tools": "tests/server/test_api.py",
    "POST /tokenize chat_template_kwargs": "tests/server/test_api.py",
    "POST /tokenize add_generation_prompt": "tests/server/test_api.py",
    "POST /tokenize continue_final_message": "tests/server/test_api.py",
    "POST /v1/messages/count_tokens tool_choice": "it is no part of the prompt",
    "POST /v1/messages/count_tokens output_config": "it is no part of the prompt",
}
FREE = {  # objects whose keys are the client's
    "parameters", "response", "schema", "input_schema", "metadata", "logit_bias", "chat_template_kwargs", "caller",
    "cache_control", "guided_json", "json", "input",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = FakeEngine(max_model_len=4096, script=ids_of(SCRIPT))
    with running(engine, family="dialect") as it:
        yield it


def post(server: Running, route: str, body: dict[str, Any]) -> Any:
    server.engine.seen.clear()
    return server.http.post(route.removeprefix("POST "), json={"model": MODEL} | body)


def observe(server: Running, route: str, body: dict[str, Any], *, seeded: bool = True) -> Any:
    """All that a request came to: what the engine was asked, and what the client was told, but for ids and times."""
    answer = post(server, route, body)
    assert answer.status_code == 200, answer.text
    asked = [
        replace(r, id="", sampling=replace(r.sampling, seed=r.sampling.seed if seeded else 0))
        for r in server.engine.seen
    ]
    if answer.headers["content-type"].startswith("text/event-stream"):
        return asked, "stream", answer.text.count("\n\n"), "usage" in answer.text
    return asked, plain(answer.json())


def plain(value: Any) -> Any:
    skip = ("id", "created", "created_at", "completed_at", "call_id", "template")
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in skip}
    return [plain(item) for item in value] if isinstance(value, list) else value


def bodies(route: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The request without a field, and with it."""
    example = EXAMPLES[route][name]
    whole = example if isinstance(example, dict) and name in example else {name: example}
    with_it = BASE[route] | whole
    without = {k: v for k, v in with_it.items() if k != name}
    return without | ({name: BASE[route][name]} if name in BASE[route] else {}), with_it


def own(status: str) -> list[Any]:
    """Every field of every route that has that status."""
    return [
        pytest.param(route.path, row, id=f"{route.path.removeprefix('POST ')} {row.path}")
        for route in ROUTES
        for row in rows(route.body)
        if row.status == status and row.path == row.name
    ]


def test_the_page_is_that_of_the_code():
    assert PAGE.read_text() == page(), "run: make docs"


def test_every_honoured_field_has_a_meaning_and_every_meaning_a_field():
    found = [row for route in ROUTES for row in rows(route.body)]
    assert [row.path for row in found if row.status == "honoured" and not row.text] == []
    assert not set(MEANINGS.values()) - {row.text for row in found}


@pytest.mark.parametrize(("route", "row"), own("honoured"))
def test_an_honoured_field_changes_something(server: Running, route: str, row: Row):
    if row.name not in EXAMPLES[route]:
        assert row.name in ELSEWHERE or f"{route} {row.name}" in ELSEWHERE
        return
    without, with_it = bodies(route, row.name)
    seeded = "seed" in without
    assert observe(server, route, without, seeded=seeded) != observe(
        server, route, with_it, seeded=seeded
    )


LABELS: dict[str, Any] = {
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "cache_control": CACHE,
}


@pytest.mark.parametrize(("route", "row"), own("label"))
def test_a_label_changes_nothing(server: Running, route: str, row: Row):
    body = BASE[route]
    seeded = "seed" in body
    labelled = body | {row.name: LABELS.get(row.name, "x")}
    said = observe(server, route, labelled, seeded=seeded)
    for key in ("metadata", "user"):  # a response repeats them, which is what they are for
        if isinstance(said[1], dict) and key in said[1]:
            said[1][key] = None
    plainly = observe(server, route, body, seeded=seeded)
    for key in ("metadata", "user"):
        if isinstance(plainly[1], dict) and key in plainly[1]:
            plainly[1][key] = None
    assert said == plainly


@pytest.mark.parametrize(("route", "row"), own("refused"))
def test_a_refused_field_is_a_400_that_names_it_and_asking_for_nothing_is_not(
    server: Running, route: str, row: Row
):
    refused = post(server, route, BASE[route] | {row.name: {"something": 1}})
    assert refused.status_code == 400
    assert row.name in refused.json()["error"]["message"]
    assert server.engine.seen == []
    for value in (None, *harmless(row)):
        assert post(server, route, BASE[route] | {row.name: value}).status_code == 200


def harmless(row: Row) -> tuple[Any, ...]:
    field = row.model.model_fields[row.name]
    functions = [getattr(mark, "func", None) for mark in field.metadata]
    return next((f.harmless for f in functions if isinstance(f, schema.Refusal)), ())


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every object of a body whose keys are ours."""
    if isinstance(value, dict):
        yield path
        for key, item in value.items():
            if key not in FREE or isinstance(item, list):
                yield from places(item, (*path, key))
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


def planted(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy of the body with an unknown field at that place."""
    if not path:
        return value | {"no_such_field": 1}
    step, *rest = path
    inner = planted(value[step], tuple(rest))
    if isinstance(value, dict):
        return value | {step: inner}
    return [inner if index == step else item for index, item in enumerate(value)]


UNKNOWN = [
    pytest.param(route.path, name, id=f"{route.path.removeprefix('POST ')} {name}")
    for route in ROUTES
    for name in EXAMPLES[route.path]
]


@pytest.mark.parametrize(("route", "name"), UNKNOWN)
def test_an_unknown_field_is_named_at_every_level(server: Running, route: str, name: str):
    _, body = bodies(route, name)
    for place in places(body):
        refused = post(server, route, planted(body, place))
        assert refused.status_code == 400, place
        assert "no_such_field" in refused.json()["error"]["message"], place
        assert server.engine.seen == []
