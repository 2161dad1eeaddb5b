"""Structured output over HTTP: the whole server and engine, on a device that draws at random from the masks.

The model is as hostile as can be: it takes any token a mask allows. What a client reads can only be the grammar's work.
"""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tests.dialect_tokenizer import CHANNEL, dialect
from tests.fake_runner import fake_engine
from tests.server.harness import Running, error, ok, running
from tests.tiny_tokenizer import tiny

from onechip.chat.vocabulary import Vocabulary
from onechip.engine.grammar_compiler import GrammarCompiler

GREET = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "maximum": 99},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": SCHEMA}}
WANTED = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
    "required": ["x"],
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": WANTED}},
    {"type": "function", "function": {"name": "g"}},
]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


def vocabulary() -> Vocabulary:
    tokenizer = dialect()
    pieces = tuple(tokenizer.piece_bytes(i) for i in range(tokenizer.vocab_size))
    return Vocabulary(pieces, tokenizer.special_ids)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = fake_engine(max_seqs=8, full_pages=2048, sliding_pages=64, max_model_len=4000)
    engine.grammars = GrammarCompiler(vocabulary, engine.info.vocab_size, dialect().eos_ids)
    with running(engine, family="dialect") as it:  # type: ignore[arg-type]
        yield it


def chat(server: Running, seed: int = 0, **fields: Any) -> dict[str, Any]:
    """The one choice of an answer."""
    body = {"messages": GREET, "max_tokens": 1500, "seed": seed, **fields}
    (choice,) = ok(server.post("/v1/chat/completions", body))["choices"]
    return choice


@pytest.mark.parametrize("thinking", [{}, THINK])
@pytest.mark.parametrize("seed", range(4))
def test_a_schema_holds_with_thinking_on_and_off(
    server: Running, seed: int, thinking: dict[str, Any]
) -> None:
    choice = chat(server, seed, response_format=FORMAT, **thinking)
    if choice["finish_reason"] == "length":  # a thought that never closed
        assert thinking and choice["message"]["reasoning"] and not choice["message"]["content"]
        return
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_a_thought_that_is_opened_is_read_as_one_and_the_content_after_it_holds(
    server: Running,
) -> None:
    thought = False
    for seed in range(30):
        choice = chat(server, seed, response_format=FORMAT, max_tokens=3000, **THINK)
        thought |= bool(choice["message"].get("reasoning"))
        if choice["message"]["content"]:
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert thought


def test_thinking_off_leaves_no_room_for_a_thought(server: Running) -> None:
    for seed in range(10):
        assert not chat(server, seed, response_format=FORMAT)["message"].get("reasoning")


def test_streamed_is_whole_and_every_choice_holds_with_finite_log_probabilities(
    server: Running,
) -> None:
    fields = {"response_format": FORMAT, "n": 2, "logprobs": True, "top_logprobs": 0, "seed": 5}
    body = {"messages": GREET, "max_tokens": 900, **fields}
    whole = ok(server.post("/v1/chat/completions", body))
    texts = ["", ""]
    for chunk in server.stream("/v1/chat/completions", **body):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "ab?c"}}, {"abc", "ac"}),
        ({"guided_regex": "ab?c"}, {"abc", "ac"}),
        ({"structured_outputs": {"grammar": 'start: "q" | "r"'}}, {"q", "r"}),
        ({"guided_grammar": 'root ::= "q" | "r"'}, {"q", "r"}),
        ({"guided_json": {"const": 7}}, {"7"}),
        ({"guided_json": '{"const": 7}'}, {"7"}),
        ({"structured_outputs": {"json": {"enum": ["a"]}}}, {'"a"'}),
    ],
)
def test_vllms_fields_work_on_both_routes(
    server: Running, fields: dict[str, Any], allowed: set[str]
) -> None:
    assert chat(server, 3, **fields)["message"]["content"] in allowed
    answer = server.complete("hi", max_tokens=100, seed=3, **fields)
    assert (
        answer["choices"][0]["text"] in allowed and answer["choices"][0]["finish_reason"] == "stop"
    )


def test_json_object_is_an_object(server: Running) -> None:
    for seed in range(6):
        choice = chat(server, seed, response_format={"type": "json_object"})
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize("thinking", [{}, THINK])
@pytest.mark.parametrize("seed", range(4))
def test_required_makes_calls_of_declared_tools(
    server: Running, seed: int, thinking: dict[str, Any]
) -> None:
    choice = chat(server, seed, tools=TOOLS, tool_choice="required", **thinking)
    calls = choice["message"].get("tool_calls") or []
    assert not choice["message"]["content"]
    assert choice["finish_reason"] == ("tool_calls" if calls else "length") or calls
    if choice["finish_reason"] == "tool_calls":
        for call in calls:
            assert call["function"]["name"] in ("f", "g")
            wanted = WANTED if call["function"]["name"] == "f" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call["function"]["arguments"]), wanted)


def test_a_named_tool_is_called_once(server: Running) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for seed in range(6):
        choice = chat(server, seed, tools=TOOLS, tool_choice=named)
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "f" and choice["finish_reason"] == "tool_calls"
        jsonschema.validate(json.loads(call["function"]["arguments"]), WANTED)


def test_no_parallel_calls_means_exactly_one(server: Running) -> None:
    for seed in range(6):
        choice = chat(server, seed, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert len(choice["message"]["tool_calls"]) == 1


def test_a_schema_beside_tools_gives_one_or_the_other(server: Running) -> None:
    seen: set[str] = set()
    for seed in range(12):
        choice = chat(server, seed, tools=TOOLS, response_format=FORMAT)
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        seen.add(choice["finish_reason"])
    assert seen >= {"stop", "tool_calls"}
    choice = chat(server, 1, tools=TOOLS, tool_choice="none", response_format=FORMAT)
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "objekt"}},
                }
            },
            "response_format",
        ),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": FORMAT}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_grammar": "start: nope"}, "guided_grammar"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
        ({"guided_json": {"$ref": "#/nope"}}, "guided_json"),
        ({"guided_json": {"$ref": "#"}}, "guided_json"),
        ({"tools": TOOLS, "guided_grammar": 'start: "a"'}, "guided_grammar"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_is_malformed_or_cannot_be_enforced_is_a_400_that_names_the_field(
    server: Running, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": GREET, "max_tokens": 20, **fields}
    assert error(server.post("/v1/chat/completions", body), 400)["param"] == param
    with_stream = server.post("/v1/chat/completions", body, stream=True)
    assert error(with_stream, 400)["param"] == param
    assert chat(server, 0, guided_choice=["ok"])["message"]["content"] == "ok"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 1000},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 500},
        {"type": "string", "format": "uuid"},
        {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
        {"type": "string", "pattern": "^(a*)*(b{1,200}){1,200}$"},
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "maxItems": 3}, {"type": "null"}]},
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    ],
)
def test_hard_schemas_are_enforced_or_refused_within_seconds(
    server: Running, schema: dict[str, Any]
) -> None:
    body = {"messages": GREET, "max_tokens": 400, "guided_json": schema, "seed": 2}
    answer = server.post("/v1/chat/completions", body)
    assert answer.elapsed.total_seconds() < 5
    if answer.status_code == 400:
        assert error(answer, 400)["param"] == "guided_json"
        return
    (choice,) = ok(answer)["choices"]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def test_a_prompt_that_ends_inside_a_thought_is_thought_first(server: Running) -> None:
    ids = [2, 105, 300, CHANNEL]
    answer = server.complete(ids, max_tokens=100, guided_choice=["yes"], seed=1)
    assert answer["choices"][0]["text"] == "yes"  # completions know no thoughts


def test_a_model_without_control_tokens_is_bound_by_schemas_and_cannot_be_made_to_call() -> None:
    engine = fake_engine(max_model_len=600, full_pages=512)
    tokenizer = tiny("gemma3")
    pieces = tuple(tokenizer.piece_bytes(i) for i in range(tokenizer.vocab_size))
    known = Vocabulary(pieces, tokenizer.special_ids)
    engine.grammars = GrammarCompiler(lambda: known, engine.info.vocab_size, tokenizer.eos_ids)
    with running(engine, family="gemma3") as server:  # type: ignore[arg-type]
        assert (
            server.chat("hi", max_tokens=50, guided_choice=["yes"])["choices"][0]["message"][
                "content"
            ]
            == "yes"
        )
        body = {"messages": GREET, "tools": TOOLS, "tool_choice": "required"}
        refused = error(server.post("/v1/chat/completions", body), 400)
        assert refused["param"] in ("tools", "tool_choice")
