"""Grammars of tool calls: what they let through is read back by the state machine and fits the tool's schema."""

import json
import random
from typing import Any

import jsonschema
import pytest
from tests.grammar_walk import (
    CLOSER,
    EOS,
    FIRST_BYTE,
    OPENER,
    VOCABULARY,
    allowed,
    compiler,
    start,
    walk,
)

from onechip.chat import parse
from onechip.chat.call_grammar import CallTokens, call_rules
from onechip.engine.grammar_compiler import GrammarCompiler
from onechip.errors import InvalidRequest
from onechip.request import Grammar

TOKENS = CallTokens(48, 49, 52)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 9},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "exact": {"type": "boolean"},
        "Note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
}
NESTED = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/node"},
        "list": {
            "type": "array",
            "items": {"type": ["number", "null"]},
            "minItems": 1,
            "maxItems": 3,
        },
        "any": {},
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
        "fixed": {"enum": [1, "x", None, {"k": [True]}]},
        "odd key": {"type": "null"},
    },
    "required": ["tree", "list", "any", "day", "code", "fixed", "odd key"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["v"],
        }
    },
}
TOOLS: dict[str, Any] = {"get_weather": WEATHER, "nested.one": NESTED, "ping": {}}


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return compiler()


def calls(tools: dict[str, Any], *, many: bool = True, **fields: Any) -> Grammar:
    return Grammar("calls", "", call_rules(tools, TOKENS, many=many), param="tool_choice", **fields)


def spelled(tokens: list[int]) -> str:
    return b"".join(VOCABULARY.pieces[token] for token in tokens).decode(errors="replace")


def declared(tools: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in tools.items()
    ]


@pytest.mark.parametrize("seed", range(40))
def test_every_random_call_is_read_back_and_fits_its_schema(
    grammars: GrammarCompiler, seed: int
) -> None:
    tokens, ended = walk(grammars, start(grammars, calls(TOOLS)), random.Random(seed), most=600)
    if not ended:
        return
    said = parse(spelled(tokens), tools=declared(TOOLS))
    assert said["tool_calls"] and said["content"] is None and said["finish"] == "tool_calls"
    for call in said["tool_calls"]:
        name = call.get("name") or call["function"]["name"]
        arguments = call.get("arguments") or call["function"]["arguments"]
        jsonschema.validate(json.loads(arguments), {"type": "object", **TOOLS[name]})


def test_most_random_calls_end(grammars: GrammarCompiler) -> None:
    """Else the test before would say little."""
    walks = [
        walk(grammars, start(grammars, calls(TOOLS)), random.Random(s), most=600) for s in range(20)
    ]
    assert sum(ended for _, ended in walks) >= 15


def test_one_call_is_one_call(grammars: GrammarCompiler) -> None:
    row = start(grammars, calls({"ping": {}}, many=False))
    tokens, ended = walk(grammars, row, random.Random(1))
    assert ended and spelled(tokens) == "<|tool_call>call:ping{}<tool_call|>"
    row = start(grammars, calls({"ping": {}}, many=True))
    for token in tokens:
        row.advance(token)
    assert allowed(grammars, row) == {48, *EOS}


def test_a_call_may_follow_a_thought(grammars: GrammarCompiler) -> None:
    row = start(grammars, calls({"ping": {}}, thought="may_open", opener=OPENER, closer=CLOSER))
    assert allowed(grammars, row) == {48, OPENER}
    row.advance(OPENER)
    inside = allowed(grammars, row)
    assert CLOSER in inside and not inside & {48, *EOS}
    row.advance(CLOSER)
    assert allowed(grammars, row) == {48}


def test_a_schema_beside_tools_allows_either(grammars: GrammarCompiler) -> None:
    rules = call_rules({"ping": {}}, TOKENS, many=True)
    row = start(grammars, Grammar("json_schema", '{"type": "object"}', rules))
    assert {48, FIRST_BYTE + ord("{")} <= allowed(grammars, row)
    assert not allowed(grammars, row) & set(EOS)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"not": {}}, "not"),
        ({"uniqueItems": True, "type": "array"}, "uniqueItems"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
        ({"type": "objekt"}, "objekt"),
        ({"type": "string", "format": "color"}, "color"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "#/nope"}, "nope"),
        ({"type": "string", "pattern": "a^b"}, "pattern"),
        ({"enum": []}, "enum"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequest, match=word) as refusal:
        call_rules({"f": {"properties": {"x": schema}}}, TOKENS, many=True)
    assert refusal.value.param == "tools" and "'f'" in refusal.value.message
