"""Verdicts on tool calls. The rules are the official checker's; the questions here are our own.

The checker in bfcl-eval 2026.3.23 gave the same verdict on 80,000 mutated answers to its four Python categories.
"""

import json
from typing import Any

import pytest

from onechip.errors import ConfigError
from onechip.ladder import bfcl
from onechip.ladder.bfcl import judge

PARAMETERS = {
    "type": "dict",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "days": {"type": "integer"},
        "limit": {"type": "float"},
        "metric": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "box": {"type": "tuple", "items": {"type": "float"}},
        "filter": {
            "type": "dict",
            "properties": {"kind": {"type": "string"}, "depth": {"type": "dict", "properties": {}}},
        },
        "stops": {
            "type": "array",
            "items": {"type": "dict", "properties": {"at": {"type": "string"}}},
        },
    },
    "required": ["city"],
}
FORECAST = {"name": "weather.forecast", "description": "Forecast.", "parameters": PARAMETERS}
OTHER = {"name": "clock", "parameters": {"type": "dict", "properties": {}, "required": []}}


def question(*truth: dict[str, Any], functions: tuple[Any, ...] = (FORECAST,)) -> bfcl.Question:
    calls = tuple(each if "clock" in each else {"weather.forecast": each} for each in truth)
    return bfcl.Question("q0", ({"role": "user", "content": "?"},), functions, calls)


def verdict(truth: dict[str, Any], given: Any, name: str = "weather_forecast") -> str:
    text = given if isinstance(given, str) else json.dumps(given)
    return judge(question(truth), [(name, text)]).verdict


PARIS = {"city": ["Paris"]}
TABLE: list[tuple[str, dict[str, Any], Any, str]] = [
    ("as listed", PARIS, {"city": "Paris"}, "right"),
    ("another case", PARIS, {"city": "PARIS"}, "right"),
    ("marks and blanks", {"city": ["Paris, Texas"]}, {"city": "paris-texas."}, "right"),
    ("quotes", {"city": ["O'Hare"]}, {"city": 'O"Hare'}, "right"),
    ("any of the answers", {"city": ["Paris", "Paname"]}, {"city": "paname"}, "right"),
    ("another value", PARIS, {"city": "Rome"}, "wrong_value"),
    ("an accent is a letter", {"city": ["Orléans"]}, {"city": "Orleans"}, "wrong_value"),
    ("nothing given", PARIS, {}, "missing"),
    ("an unknown parameter", PARIS, {"city": "Paris", "country": "FR"}, "extra"),
    ("known but not expected", PARIS, {"city": "Paris", "days": 1}, "extra"),
    ("optional left out", PARIS | {"days": [3, ""]}, {"city": "Paris"}, "right"),
    ("optional given", PARIS | {"days": [3, ""]}, {"city": "Paris", "days": 3}, "right"),
    ("optional given wrongly", PARIS | {"days": [3, ""]}, {"city": "Paris", "days": 4}, "wrong_value"),
    ("not required yet expected", PARIS | {"days": [3]}, {"city": "Paris"}, "missing"),
    ("digits as text", PARIS | {"days": [3]}, {"city": "Paris", "days": "3"}, "wrong_type"),
    ("a float for an integer", PARIS | {"days": [3]}, {"city": "Paris", "days": 3.0}, "wrong_type"),
    ("an integer for a float", PARIS | {"limit": [2.0]}, {"city": "Paris", "limit": 2}, "right"),
    ("integer listed for a float", PARIS | {"limit": [2]}, {"city": "Paris", "limit": 2.0}, "right"),
    ("a bool is no integer", PARIS | {"days": [1]}, {"city": "Paris", "days": True}, "wrong_type"),
    ("an integer is no bool", PARIS | {"metric": [True]}, {"city": "Paris", "metric": 1}, "wrong_type"),
    ("a word is no bool", PARIS | {"metric": [True]}, {"city": "Paris", "metric": "true"}, "wrong_type"),
    ("null", PARIS, {"city": None}, "wrong_type"),
    ("a variable", PARIS | {"days": ["n_days"]}, {"city": "Paris", "days": "n_days"}, "right"),
    ("a variable's case", PARIS | {"days": ["n_days"]}, {"city": "Paris", "days": "N_days"}, "wrong_value"),
    ("a list", PARIS | {"tags": [["Wind", "rain"]]}, {"city": "Paris", "tags": ["wind", "Rain"]}, "right"),
    ("a list's order", PARIS | {"tags": [["a", "b"]]}, {"city": "Paris", "tags": ["b", "a"]}, "wrong_value"),
    ("a shorter list", PARIS | {"tags": [["a", "b"]]}, {"city": "Paris", "tags": ["a"]}, "wrong_value"),
    ("a list's types", PARIS | {"tags": [["a"]]}, {"city": "Paris", "tags": [1]}, "wrong_type"),
    ("text for a list", PARIS | {"tags": [["a"]]}, {"city": "Paris", "tags": "a"}, "wrong_type"),
    ("a tuple", PARIS | {"box": [[1.5, 2.5]]}, {"city": "Paris", "box": [1.5, 2.5]}, "right"),
    ("a tuple of integers", PARIS | {"box": [[1.0]]}, {"city": "Paris", "box": [1]}, "wrong_type"),
    ("an object", PARIS | {"filter": [{"kind": ["Sun"]}]}, {"city": "Paris", "filter": {"kind": "sun"}}, "right"),
    ("an object's key", PARIS | {"filter": [{"kind": ["a"]}]}, {"city": "Paris", "filter": {"k": "a"}}, "wrong_value"),
    ("an object's value", PARIS | {"filter": [{"kind": ["a"]}]},
     {"city": "Paris", "filter": {"kind": "b"}}, "wrong_value"),
    ("an object's missing key", PARIS | {"filter": [{"kind": ["a"]}]}, {"city": "Paris", "filter": {}}, "wrong_value"),
    ("an object's optional key", PARIS | {"filter": [{"kind": ["a", ""]}]}, {"city": "Paris", "filter": {}}, "right"),
    ("nested objects", PARIS | {"filter": [{"depth": [{"m": [3]}]}]},
     {"city": "Paris", "filter": {"depth": {"m": 3}}}, "right"),
    ("nested objects differ", PARIS | {"filter": [{"depth": [{"m": [3]}]}]},
     {"city": "Paris", "filter": {"depth": {"m": 4}}}, "wrong_value"),
    ("objects in a list", PARIS | {"stops": [[{"at": ["A"]}, {"at": ["B"]}]]},
     {"city": "Paris", "stops": [{"at": "a"}, {"at": "b"}]}, "right"),
    ("fewer objects", PARIS | {"stops": [[{"at": ["A"]}, {"at": ["B"]}]]},
     {"city": "Paris", "stops": [{"at": "a"}]}, "wrong_value"),
    ("text among objects", PARIS | {"stops": [[{"at": ["A"]}]]}, {"city": "Paris", "stops": ["A"]}, "wrong_type"),
    ("arguments cut short", PARIS, '{"city": "Par', "bad_arguments"),
    ("arguments no object", PARIS, '["Paris"]', "bad_arguments"),
    ("no arguments", PARIS, "", "missing"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("truth", "given", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_a_call_gets_the_official_verdict(truth: dict[str, Any], given: Any, expected: str):
    assert verdict(truth, given) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("weather_forecast", "right"), ("weather.forecast", "wrong_name"), ("forecast", "wrong_name")],
)
def test_a_dotted_name_is_called_by_its_underscores(name: str, expected: str):
    assert verdict(PARIS, {"city": "Paris"}, name) == expected


def test_no_call_and_a_call_too_many_are_told_apart():
    call = ("weather_forecast", '{"city": "Paris"}')
    assert judge(question(PARIS), []).verdict == "no_call"
    assert judge(question(PARIS), [call, call]).verdict == "wrong_count"


def test_parallel_calls_fit_in_any_order_and_each_once():
    asked = question({"city": ["Paris"]}, {"city": ["Rome"]})
    paris, rome = (
        ("weather_forecast", '{"city": "Paris"}'),
        ("weather_forecast", '{"city": "Rome"}'),
    )
    assert judge(asked, [paris, rome]).right
    assert judge(asked, [rome, paris]).right
    assert judge(asked, [paris, paris]).verdict == "wrong_value"
    assert judge(asked, [paris]).verdict == "wrong_count"


def test_parallel_calls_of_different_functions():
    asked = question(PARIS, {"clock": {}}, functions=(OTHER, FORECAST))
    assert judge(asked, [("clock", "{}"), ("weather_forecast", '{"city": "paris"}')]).right


def test_the_dialect_of_types_becomes_json_schema_and_nothing_else_changes():
    (tool,) = bfcl.tools(question(PARIS))
    function = tool["function"]
    assert function["name"] == "weather_forecast"
    properties = function["parameters"]["properties"]
    assert function["parameters"]["type"] == "object"
    assert {name: each["type"] for name, each in properties.items()} == {
        "city": "string", "days": "integer", "limit": "number", "metric": "boolean",
        "tags": "array", "box": "array", "filter": "object", "stops": "array",
    }  # fmt: skip
    assert properties["box"]["items"] == {"type": "number"}
    assert properties["stops"]["items"]["properties"] == {"at": {"type": "string"}}
    assert properties["city"]["description"] == "Where."
    assert FORECAST["parameters"]["type"] == "dict"  # the question is left as it was


def test_a_parameter_named_like_a_keyword_stays():
    function = {
        "name": "f",
        "parameters": {"type": "dict", "properties": {"items": {"type": "array", "items": {"type": "integer"}},
                                                      "optional": {"type": "any"}}, "required": []},
    }  # fmt: skip
    properties = bfcl.tools(question(functions=(function,)))[0]["function"]["parameters"][
        "properties"
    ]
    assert properties == {
        "items": {"type": "array", "items": {"type": "integer"}},
        "optional": {"type": "string"},
    }


def test_questions_are_joined_with_their_answers_by_id():
    asked = [
        json.dumps(
            {"id": name, "question": [[{"role": "user", "content": name}]], "function": [FORECAST]}
        )
        for name in "ab"
    ]
    answers = [
        json.dumps({"id": name, "ground_truth": [{"weather.forecast": {"city": [name]}}]})
        for name in "ba"
    ]
    found = bfcl.questions([*asked, "\n"], answers)
    assert [(each.id, each.truth[0]["weather.forecast"]["city"]) for each in found] == [
        ("a", ["a"]),
        ("b", ["b"]),
    ]
    with pytest.raises(ConfigError, match="BFCL question a"):
        bfcl.questions(asked, answers[:1])
