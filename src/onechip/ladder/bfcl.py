"""BFCL: questions, the OpenAI tools they become, and the verdict on the calls that came back. Pure data.

The verdict follows the official AST checker (bfcl-eval, Apache-2.0), so that scores compare with the leaderboard's:

1. As many calls as the ground truth has, in any order; for `simple` that is one.
2. The function's name is equal, with dots written as underscores, as OpenAI's pattern for names wants.
3. Every required parameter is there, and none that the function or the ground truth does not know.
4. Each value has the declared type. An integer passes for a float, never the other way, and a bool is no integer. The
   type of a listed answer is accepted too: the ground truth writes some values as names of variables.
5. Each value is one of the listed answers. Strings are compared without case, blanks and the marks , . / - _ * ^;
   list elements and values of objects likewise. Objects are compared key by key.
6. A parameter that is left out must list "" among its answers: it is optional.

Where the official code would raise (an element that is not an object where objects are listed) the verdict is a wrong
type. A dialect of types is mapped for the tools: "dict" is object, "float" number, "tuple" array, "any" string.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from onechip.errors import ConfigError

MAX_TOKENS = 512

Verdict = Literal[
    "right",
    "no_call",
    "wrong_count",
    "wrong_name",
    "bad_arguments",
    "missing",
    "extra",
    "wrong_type",
    "wrong_value",
]
JsonObject = Mapping[str, Any]

_TYPES = {
    "dict": "object", "object": "object", "float": "number", "number": "number", "double": "number",
    "integer": "integer", "boolean": "boolean", "bool": "boolean", "array": "array", "list": "array",
    "tuple": "array", "string": "string", "any": "string",
}  # fmt: skip
_PYTHON: dict[str, type] = {
    "object": dict, "number": float, "integer": int, "boolean": bool, "array": list, "string": str,
}  # fmt: skip
_IGNORED = re.compile(r"[ ,./\-_*^]")


@dataclass(frozen=True)
class Question:
    """One task: the conversation, the functions on offer, and the expected calls as {name: {parameter: [answers]}}."""

    id: str
    messages: tuple[JsonObject, ...]
    functions: tuple[JsonObject, ...]
    truth: tuple[Mapping[str, JsonObject], ...]


@dataclass(frozen=True)
class Judged:
    """`why` names the parameter and both values, for a reader who disagrees."""

    verdict: Verdict
    why: str = ""

    @property
    def right(self) -> bool:
        return self.verdict == "right"


def questions(asked: Iterable[str], answers: Iterable[str]) -> list[Question]:
    """The lines of a question file and of its possible answers; every question needs its answer."""
    truth = {row["id"]: row["ground_truth"] for row in map(json.loads, filter(str.strip, answers))}
    found: list[Question] = []
    for row in map(json.loads, filter(str.strip, asked)):
        if row["id"] not in truth:
            raise ConfigError(
                f"BFCL question {row['id']} has no line in the file of possible answers"
            )
        messages = tuple(row["question"][0])
        found.append(Question(row["id"], messages, tuple(row["function"]), tuple(truth[row["id"]])))
    return found


def tools(question: Question) -> list[dict[str, Any]]:
    """The functions as OpenAI tools, in JSON Schema's words."""
    return [
        {
            "type": "function",
            "function": {
                "name": wire_name(function["name"]),
                "description": function.get("description", ""),
                "parameters": _schema(function["parameters"]),
            },
        }
        for function in question.functions
    ]


def wire_name(name: str) -> str:
    return name.replace(".", "_")


def _schema(found: JsonObject) -> dict[str, Any]:
    schema = {
        key: value for key, value in found.items() if key not in ("optional", "properties", "items")
    }
    schema["type"] = _TYPES.get(found.get("type", "any"), "string")
    if isinstance(found.get("properties"), dict):
        schema["properties"] = {name: _schema(each) for name, each in found["properties"].items()}
    if isinstance(found.get("items"), dict):
        schema["items"] = _schema(found["items"])
    return schema


def judge(question: Question, calls: Sequence[tuple[str, str]]) -> Judged:
    """The verdict on `calls`, (name, arguments as JSON text) in the order they came."""
    if not calls:
        return Judged("no_call", "no tool was called")
    if len(calls) != len(question.truth):
        return Judged("wrong_count", f"{len(calls)} calls, not {len(question.truth)}")
    parsed: list[tuple[str, JsonObject]] = []
    for name, arguments in calls:
        try:
            value = json.loads(arguments or "{}")
        except ValueError as error:
            return Judged("bad_arguments", f"arguments of {name} are not JSON: {error}")
        if not isinstance(value, dict):
            return Judged(
                "bad_arguments", f"arguments of {name} are not an object: {arguments[:80]}"
            )
        parsed.append((name, cast(JsonObject, value)))
    return _match_all(question, parsed)


def _match_all(question: Question, calls: list[tuple[str, JsonObject]]) -> Judged:
    """Each expected call takes the first remaining call that fits, whatever the order."""
    left = list(calls)
    for expected in question.truth:
        ((name, answers),) = expected.items()
        function = next(each for each in question.functions if each["name"] == name)
        verdicts = [_match(function, answers, call) for call in left]
        fits = next((i for i, judged in enumerate(verdicts) if judged.right), None)
        if fits is None:
            return verdicts[0]
        del left[fits]
    return Judged("right")


def _match(function: JsonObject, answers: JsonObject, call: tuple[str, JsonObject]) -> Judged:
    name, given = call
    if name != wire_name(function["name"]):
        return Judged("wrong_name", f"{name}, not {wire_name(function['name'])}")
    for required in function["parameters"].get("required", ()):
        if required not in given:
            return Judged("missing", f"{required} is required")
    properties = function["parameters"]["properties"]
    for key, value in given.items():
        if key not in properties or key not in answers:
            return Judged("extra", f"{key} is not a parameter")
        judged = _parameter(key, value, properties[key], answers[key])
        if not judged.right:
            return judged
    for key, accepted in answers.items():
        if key not in given and "" not in accepted:
            return Judged("missing", f"{key} may not be left out here")
    return Judged("right")


def _parameter(key: str, value: Any, schema: JsonObject, accepted: list[Any]) -> Judged:
    """Steps 4 and 5 for one parameter."""
    declared = _python_type(schema)
    if declared is float and type(value) is int:
        value = float(value)
    listed = _listed_type(accepted)
    if type(value) not in (declared, listed) or not _elements_fit(value, schema, accepted):
        return Judged("wrong_type", f"{key}: {value!r} is no {schema.get('type')}")
    # An answer of another type than the declared one stands for a variable and is compared as it is written.
    as_declared = type(value) is declared and listed in (None, declared)
    if _equal(value, accepted) if as_declared else value in accepted:
        return Judged("right")
    return Judged("wrong_value", f"{key}: {value!r}, not one of {accepted!r}")


def _python_type(schema: JsonObject) -> type:
    return _PYTHON[_TYPES.get(schema.get("type", "any"), "string")]


def _listed_type(accepted: Iterable[Any]) -> type | None:
    return next((type(answer) for answer in accepted if answer != ""), None)


def _elements_fit(value: Any, schema: JsonObject, accepted: list[Any]) -> bool:
    """Every element of a declared list has the items' type, or that of one answer's first element."""
    if type(value) is not list or _python_type(schema) is not list:
        return True
    items = _python_type(schema.get("items", {}))
    return any(
        type(answer) is not list
        or all(type(each) in (items, _listed_type(answer)) for each in cast(list[Any], value))
        for answer in accepted
    )


def _equal(value: Any, accepted: Iterable[Any]) -> bool:
    """Whether `value` is one of the answers, as the official checker reads them."""
    if isinstance(value, dict):
        return any(isinstance(each, dict) and _same_object(value, each) for each in accepted)
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return any(isinstance(each, list) and _same_objects(value, each) for each in accepted)
    if isinstance(value, list):
        return [_standard(each) for each in value] in (
            [_standard(each) for each in answer] for answer in accepted
        )
    return _standard(value) in (_standard(answer) for answer in accepted)


def _same_objects(value: Sequence[Any], answer: Sequence[Any]) -> bool:
    return len(value) == len(answer) and all(
        isinstance(mine, dict) and isinstance(theirs, dict) and _same_object(mine, theirs)
        for mine, theirs in zip(value, answer, strict=True)
    )


def _same_object(value: JsonObject, answer: Mapping[str, list[Any]]) -> bool:
    """Key by key: each is known and one of its answers; one that is left out lists ""."""
    return all(
        key in answer
        and (_standard(mine) in map(_standard, answer[key]) or _nested(mine, answer[key]))
        for key, mine in value.items()
    ) and all(key in value or "" in accepted for key, accepted in answer.items())


def _nested(value: Any, accepted: Iterable[Any]) -> bool:
    return isinstance(value, dict) and _equal(value, accepted)


def _standard(value: Any) -> Any:
    """Strings without case, blanks and the marks people differ in; anything else as it is."""
    if not isinstance(value, str):
        return value
    return _IGNORED.sub("", value).lower().replace("'", '"')
