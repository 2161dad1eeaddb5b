"""Tools, calls, results and thoughts in a prompt: the built-in template and published ones, whatever clients send."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chat.test_parsing import VECTORS, of_vector, tool
from tests.dialect_tokenizer import BOS, TURN, TURN_END, dialect, ids_of

from onechip.chat import parse
from onechip.chat.controls import controls_of, prompt_end
from onechip.chat.dialects import GEMMA4
from onechip.chat.template import ChatTemplate
from onechip.chat.tools import declared, printable
from onechip.errors import InvalidRequest

DATA = Path(__file__).parents[1] / "data" / "templates"
APRIL = (DATA / "gemma4-31b-april.jinja").read_text()
INTERLEAVED = (DATA / "gemma4-31b-interleaved.jinja").read_text()
SOURCES = {"built in": GEMMA4, "april": APRIL, "interleaved": INTERLEAVED}
every = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
published = pytest.mark.parametrize("source", [GEMMA4, APRIL], ids=["built in", "april"])

HI = {"role": "user", "content": "hi"}
ON = {"enable_thinking": True}


@cache
def template(source: str, *, large: bool = True) -> ChatTemplate:
    return ChatTemplate(source, dialect(), origin="test", fixed={"empty_thought": large})


def render(source: str, messages: list[Any], tools: Any = (), **options: Any) -> str:
    """The prompt's text, after checking what holds of every prompt."""
    ids = template(source).encode(messages, tools=declared(tools), **options)
    assert ids[0] == BOS and ids.count(BOS) == 1
    if options.get("add_generation_prompt", True):
        assert ids.count(TURN) - ids.count(TURN_END) == 1
        rest = dialect().decode(ids[len(ids) - ids[::-1].index(TURN) :], skip_special=False)
        assert rest.startswith("model\n")
    return dialect().decode(ids, skip_special=False)


def assistant(content: Any = None, *calls: Any, **fields: Any) -> dict[str, Any]:
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, **fields} | (
        {"tool_calls": made} if made else {}
    )


def result(content: Any, key: str | None = "c0", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **({"tool_call_id": key} if key else {}), **fields}


BEGIN = "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
OFF = "<|channel>thought\n<channel|>"
CALL = "<|tool_call>call:f{a:1}<tool_call|>"


@every
def test_the_published_layouts(source: str):
    system = {"role": "system", "content": " Be brief. "}
    think = "<bos><|turn>system\n<|think|>\n"
    assert render(source, [HI]) == BEGIN + OFF
    user = "<|turn>user\nhi<turn|>\n<|turn>model\n"
    assert render(source, [HI], variables=ON) == f"{think}<turn|>\n{user}"
    assert render(source, [system, HI], variables=ON) == f"{think}Be brief.<turn|>\n{user}"
    developer = {
        "role": "developer",
        "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
    }
    assert render(source, [developer, HI], variables=ON) == f"{think}Be brief.<turn|>\n{user}"
    answered = render(source, [HI, assistant("one"), assistant(" two "), HI])
    assert answered == f"{BEGIN}onetwo<turn|>\n{user}{OFF}"


def test_the_empty_thought_belongs_to_the_large_models_template():
    ids = template(GEMMA4, large=False).encode([HI])
    assert dialect().decode(ids, skip_special=False) == BEGIN
    assert template(GEMMA4).encode([HI]) == template(APRIL).encode([HI]) == ids + ids_of(OFF)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look up weather",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["c", "f"]},
                "city": {"type": "string", "description": "City name"},
            },
            "required": ["city"],
        },
    },
}
DECLARED = (
    '<|tool>declaration:get_weather{description:<|"|>Look up weather<|"|>,parameters:{properties:{'
    'city:{description:<|"|>City name<|"|>,type:<|"|>STRING<|"|>},'
    'unit:{enum:[<|"|>c<|"|>,<|"|>f<|"|>],type:<|"|>STRING<|"|>}},'
    'required:[<|"|>city<|"|>],type:<|"|>OBJECT<|"|>}}<tool|>'
)


@published
def test_a_declaration_is_written_as_published(source: str):
    assert DECLARED in render(source, [HI], [WEATHER])


NESTED = {
    "type": "object",
    "properties": {
        "legs": {
            "type": "array",
            "description": "parts",
            "items": {
                "type": "object",
                "properties": {"stops": {"type": "array", "items": {"type": "string"}}, "n": {"type": "integer"}},
                "required": ["n"],
            },
        },
        "opts": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"], "nullable": True},
        "Any": {"type": "number", "description": "d", "nullable": True},
    },
}  # fmt: skip


def test_the_built_in_template_declares_what_the_published_one_does():
    for parameters in (NESTED, {"type": "object", "properties": {}}, None):
        tools = [
            {
                "type": "function",
                "function": {"name": "f", "description": "x", "parameters": parameters},
            }
        ]
        assert render(GEMMA4, [HI], tools, variables=ON) == render(APRIL, [HI], tools, variables=ON)


ODD = {
    "type list": {"type": ["string", "null"]},
    "any of": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "empty": {},
    "true": True,
    "reference": {"$ref": "#/$defs/A"},
    "dangling reference": {"$ref": "#/$defs/B"},
    "cycle": {"$ref": "#/$defs/Loop"},
    "enum": {"enum": [1, 2]},
    "mixed enum": {"enum": ["a", 1, None]},
    "const": {"const": "x"},
    "all of": {"allOf": [{"type": "string"}, {"description": "d"}]},
    "one of": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    "null description": {"type": "string", "description": None},
    "array of anything": {"type": "array"},
    "tuple": {"type": "array", "items": [{"type": "string"}]},
    "array of odd": {"type": "array", "items": {"anyOf": [{"type": ["integer", "null"]}]}},
    "bare object": {"type": "object", "additionalProperties": False, "title": "T"},
    "properties alone": {"properties": {"x": True}},
    "null": {"type": "null"},
    "fields": {"type": "string", "default": {"a": None}, "minLength": 1, "pattern": "<|x|>"},
}


@every
@pytest.mark.parametrize("schema", ODD.values(), ids=ODD)
def test_odd_schemas_render_as_one_plain_type(source: str, schema: Any):
    parameters = {
        "properties": {"p": schema, "q": {"type": "object", "properties": {"p": schema}}},
        "$defs": {"A": {"type": "string"}, "Loop": {"type": "object", "properties": {"x": {"$ref": "#/$defs/Loop"}}}},
    }  # fmt: skip
    text = render(source, [HI], [tool(parameters=parameters)])
    block = text[text.index("<|tool>") : text.index("<tool|>")]
    plain = re.sub(r'<\|"\|>.*?<\|"\|>', "S", block)
    for open_, close in ("{}", "[]"):
        assert plain.count(open_) == plain.count(close)
    assert "['" not in block and "None" not in block and "True" not in block
    assert all(kind for kind in re.findall(r'type:<\|"\|>(.*?)<\|"\|>', block))


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"type": ["string", "null"]}, {"type": "string", "nullable": True}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "string", "nullable": True}),
        ({"$ref": "#/$defs/A"}, {"type": "string", "enum": ["x"]}),
        ({"$ref": "#/$defs/A", "description": "d"}, {"type": "string", "enum": ["x"], "description": "d"}),
        ({"enum": [1, 2]}, {"type": "integer", "enum": [1, 2]}),
        ({"const": "x"}, {"type": "string", "enum": ["x"]}),
        (True, {"type": "string"}),
        ({"properties": {"x": {}}}, {"type": "object", "properties": {"x": {"type": "string"}}}),
        ({"allOf": [{"properties": {"x": {}}, "required": ["x"]}, {"required": ["y"]}]},
         {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x", "y"]}),
    ],
)  # fmt: skip
def test_schemas_become_one_type(schema: Any, wanted: dict[str, Any]):
    root = {"properties": {"p": schema}, "$defs": {"A": {"enum": ["x"]}}}
    made = printable(tool(parameters=root))["function"]["parameters"]["properties"]["p"]
    assert made == wanted


@published
def test_properties_named_like_schema_fields_are_declared(source: str):
    names = ["description", "type", "properties", "required", "nullable", "title"]
    text = render(source, [HI], [tool(**{name: {"type": "string"} for name in names})])
    for name in names:
        assert f'{name}:{{type:<|"|>STRING<|"|>}}' in text


@every
@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"b":[1,null],"a":"x"}', '{a:<|"|>x<|"|>,b:[1,null]}'),
        ({"b": [1, None], "a": "x"}, '{a:<|"|>x<|"|>,b:[1,null]}'),
        ("", "{}"), ("  ", "{}"), ("{}", "{}"), (None, "{}"),
        ('{"n": 12345678901234567890, "e": 1e-3, "f": 5.0, "t": true, "z": {"k": null}}',
         "{e:1e-3,f:5.0,n:12345678901234567890,t:true,z:{k:null}}"),
        ('{"s": "<|\\"|>}<tool_call|>"}', '{s:<|"|><|"|>}<tool_call|><|"|>}'),
    ],
)  # fmt: skip
def test_arguments_become_a_mapping_written_as_sent(source: str, arguments: Any, written: str):
    text = render(source, [HI, assistant(None, ("f", arguments)), result("ok")])
    assert f"<|tool_call>call:f{written}<tool_call|>" in text
    assert text.endswith('<|tool_response>response:f{value:<|"|>ok<|"|>}<tool_response|>') or (
        source == INTERLEAVED
    )


@pytest.mark.parametrize(
    "arguments", ["not json", "[1]", '"x"', '{"a": NaN}', 5, ["a"], "[" * 10_000]
)
def test_arguments_that_are_no_object_are_named(arguments: Any):
    with pytest.raises(InvalidRequest) as caught:
        render(GEMMA4, [HI, assistant(None, ("f", arguments))])
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


@every
def test_text_beside_calls_stands_before_them_and_the_turn_stays_open(source: str):
    messages = [HI, assistant(" Let me <turn|> look. ", ("f", '{"a":1}')), result("ok")]
    text = render(source, messages)
    assert f"<|turn>model\nLet me <turn|> look.{CALL}<|tool_response>response:f" in text
    assert text.count("look.") == 1
    text = render(source, [HI, assistant("A"), *messages[1:], assistant("done"), HI])
    assert (
        f"<|turn>model\nALet me <turn|> look.{CALL}" in text and "done<turn|>\n<|turn>user" in text
    )


@every
@pytest.mark.parametrize(
    "messages",
    [
        [HI, assistant(None, ("f", "{}")), HI],
        [HI, assistant("x", ("f", "{}")), HI, assistant("y"), HI],
        [HI, assistant(None, ("f", "{}")), result("1"), HI],
        [HI, assistant(None, ("f", "{}")), result("1"), assistant("so"), HI],
        [HI, assistant(None, ("f", "{}")), result("1"), assistant("so", ("f", "{}")), result("2")],
        [HI, assistant(None, ("f", "{}"), ("g", "{}")), result("1"), result("2", "c1")],
        [HI, assistant(None, ("f", "{}"))],
        [HI, assistant("x", reasoning="R"), assistant("y", ("f", "{}"), reasoning="R"), result("1")],
        [HI, assistant(""), assistant(None), HI],
        [assistant("x"), HI],
        [HI, {"role": "system", "content": "later"}, HI],
        [{"role": "system", "content": "alone"}],
        [HI, HI, HI],
    ],
)  # fmt: skip
@pytest.mark.parametrize("variables", [{}, ON], ids=["off", "on"])
def test_turns_are_balanced_at_the_point_of_generation(
    source: str, messages: list[Any], variables: dict[str, Any]
):
    """`render` checks it: one turn is open, and it is the model's; every turn is closed before the next begins."""
    text = render(source, messages, variables=variables)
    turns = re.findall(r"<\|turn>|<turn\|>", text)
    assert turns == ["<|turn>", "<turn|>"] * (len(turns) // 2) + ["<|turn>"]
    assert "None" not in text


@every
def test_results_keep_their_order_and_take_the_name_of_their_call(source: str):
    calls = assistant(None, ("f", "{}"), ("g", "{}"))
    text = render(source, [HI, calls, result('{"a":1}', "c1"), result("2", "c0")])
    expected = (
        'response:g{value:<|"|>{"a":1}<|"|>}<tool_response|><|tool_response>response:f{value:<|"|>2'
    )
    assert expected in text
    parts = [{"type": "text", "text": "2"}, {"type": "text", "text": "1"}]
    for message, name, value in [
        (result("2", "elsewhere"), "unknown", "2"), (result("2", None), "unknown", "2"),
        (result("2", None, name="h"), "h", "2"), (result(None), "f", ""), (result(parts), "f", "21"),
    ]:  # fmt: skip
        text = render(source, [HI, assistant(None, ("f", "{}")), message])
        assert f'response:{name}{{value:<|"|>{value}<|"|>}}' in text


@pytest.mark.parametrize(
    "before", [[], [HI], [HI, assistant("x")], [HI, assistant(None, ("f", "{}")), HI]]
)
def test_a_result_that_answers_nothing_is_refused(before: list[Any]):
    with pytest.raises(InvalidRequest) as caught:
        render(GEMMA4, [*before, result("z")])
    assert caught.value.param == f"messages[{len(before)}]"


@every
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thoughts_live_inside_one_tool_chain(source: str, field: str):
    chain = [HI, assistant(None, ("f", "{}"), **{field: "R"}), result("1")]
    thought = (
        "<|channel>thought\nR<channel|>"
        if source == INTERLEAVED
        else "<|channel>thought\nR\n<channel|>"
    )
    assert f"<|turn>model\n{thought}<|tool_call>" in render(source, chain)
    assert "R" not in render(source, [*chain, assistant("A"), HI])
    assert "R" not in render(source, [HI, assistant("A", **{field: "R"}), HI])
    spelled = assistant(f"{thought}A<|channel>thought\nR", **{field: None})
    assert "R" not in render(source, [HI, spelled, HI])


def test_preserved_thoughts_stay_with_calls_only():
    chain = [
        HI,
        assistant(None, ("f", "{}"), reasoning="R"),
        result("1"),
        assistant("A", reasoning="S"),
        HI,
    ]
    kept = render(GEMMA4, chain, variables={"preserve_thinking": True})
    assert "thought\nR\n" in kept and "S" not in kept


@pytest.mark.parametrize(
    ("messages", "variables", "ends"),
    [
        ([HI], {}, "closed_channel"), ([HI], ON, "no_channel"),
        ([HI, assistant(None, ("f", "{}")), result("1")], {}, "no_channel"),
        ([HI, assistant(None, ("f", "{}")), result("1")], ON, "open_channel"),
        ([HI, assistant(None, ("f", "{}"))], ON, "no_channel"),
    ],
)  # fmt: skip
def test_how_a_prompt_ends_is_read_from_its_ids(messages: list[Any], variables: Any, ends: str):
    ids = template(GEMMA4).encode(messages, variables=variables)
    assert prompt_end(ids, controls_of(dialect())) == ends


@every
@pytest.mark.parametrize(
    "text", ["Once", "Once ", "  <turn|> Once\n", "", "<|channel>thought\nx\n<channel|>Once"]
)
def test_a_final_message_is_continued_where_it_ends(source: str, text: str):
    prompt = render(
        source, [HI, assistant(text)], add_generation_prompt=False, continue_final_message=True
    )
    kept = text.rpartition("<channel|>")[2].lstrip()
    assert prompt == BEGIN + kept


@pytest.mark.parametrize("messages", [[HI], [HI, assistant("x", ("f", "{}"))]])
def test_only_an_answer_can_be_continued(messages: list[Any]):
    with pytest.raises(InvalidRequest, match="needs a last message of the assistant"):
        render(GEMMA4, messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        render(GEMMA4, [HI, assistant("x")], continue_final_message=True)


def strings(value: Any, change: Callable[[str], str]) -> Any:
    """A conversation with every text a client may choose changed."""
    if isinstance(value, dict):
        kept = ("role", "type", "id", "tool_call_id")
        return {
            k: v if k in kept and isinstance(v, str) else strings(v, change)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [strings(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


hostile = st.lists(
    st.sampled_from(
        ["<|turn>", "<turn|>", '<|"|>', "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", "<|tool>", "<bos>",
         "<|", "|>", "<", ">", '"', "|", "turn", "tool", "tool_call", "channel", " ", "\n", "é", "{", "}", "call:f"]
    ),
    max_size=6,
).map("".join)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(st.lists(hostile, min_size=9, max_size=9), st.sampled_from(list(SOURCES)))
def test_no_text_of_a_conversation_becomes_a_control_token(texts: list[str], source: str):
    """Descriptions, enums, defaults, property values, arguments, results, thoughts: control ids stay the same."""

    def conversation(texts: list[str]) -> tuple[list[Any], list[Any]]:
        system, user, argument, outcome, thought, answer, description, about, choice = texts
        declarations = [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": description,
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "role": {
                                "type": "string",
                                "description": about,
                                "enum": [choice + "x"],
                            },
                            "list": {
                                "type": "array",
                                "items": {"type": "string", "default": choice},
                            },
                        },
                    },
                },
            }
        ]
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": user},
            assistant(
                answer + "x",
                ("f", {"role": argument, "o": {"k": [argument]}}),
                reasoning=thought + "x",
            ),
            result(outcome),
        ]
        return messages, declarations

    def controls(texts: list[str]) -> list[int]:
        messages, declarations = conversation(texts)
        ids = template(SOURCES[source]).encode(messages, tools=declared(declarations), variables=ON)
        return [i for i in ids if i in dialect().special_ids]

    plain = ["d"] * 9
    plain[6], plain[7] = (
        ("d" if text else "") for text in texts[6:8]
    )  # an empty description is left out
    assert controls(texts) == controls(plain)


ROUND_TRIP = [v for v in VECTORS if v["id"] <= "V20" and v["expect"].get("tool_calls")]


@every
@pytest.mark.parametrize("vector", ROUND_TRIP, ids=lambda v: v["id"])
def test_a_call_sent_back_is_read_as_the_same(source: str, vector: dict[str, Any]):
    """Parse, resend as history, render, parse: a fixed point, or errors would compound."""
    said = of_vector(vector)
    calls = [(call["name"], call["arguments"]) for call in said["tool_calls"]]
    history = [HI, assistant(said["content"], *calls, reasoning=said["reasoning"]), result("ok")]
    text = render(source, history)
    again = parse(text[text.index("<|turn>model\n") + len("<|turn>model\n") :])
    assert again["content"] == said["content"]
    assert again["reasoning"] == said["reasoning"]
    for one, other in zip(said["tool_calls"], again["tool_calls"], strict=True):
        assert one["name"] == other["name"]
        assert json.loads(one["arguments"]) == json.loads(other["arguments"])
