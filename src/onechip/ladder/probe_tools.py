"""Probes of tool calling: when to call, with what, how often, and when not to."""

import json
from collections.abc import Mapping
from typing import Any

from onechip.ladder.probes import Check, Probe, contains, first_wrong, no_calls, no_markers, once
from onechip.ladder.stream import Answer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city."},
                "unit": {
                    "type": "string",
                    "enum": ["celsius", "fahrenheit"],
                    "description": "Unit of the temperature; celsius unless the user wants the other.",
                },
            },
            "required": ["city"],
        },
    },
}
FLIGHT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "book_flight",
        "description": "Book a flight. All details must come from the user; never guess one.",
        "parameters": {
            "type": "object",
            "properties": {
                "origin": {"type": "string", "description": "City of departure."},
                "destination": {"type": "string", "description": "City of arrival."},
                "date": {"type": "string", "description": "Date of departure, YYYY-MM-DD."},
            },
            "required": ["origin", "destination", "date"],
        },
    },
}
CALL_ID = "call_00000001"  # nine or more letters and digits, which some servers insist on


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(*expected: Mapping[str, str], name: str = "get_weather") -> Check:
    """Exactly these calls, in any order; values are compared without case, and no further argument is given."""

    def check(answer: Answer) -> str | None:
        found: list[dict[str, str]] = []
        for call in answer.tool_calls:
            if call.name != name:
                return f"it called {call.name!r}, not {name!r}"
            arguments = _arguments(call.arguments)
            if arguments is None:
                return f"its arguments are no JSON object: {call.arguments[:80]!r}"
            found.append({key: str(value).lower() for key, value in arguments.items()})
        left = [each for each in expected if _like(each) not in found]
        if left or len(found) != len(expected):
            return f"it made {len(found)} calls where {json.dumps(expected)} were wanted"
        wrong = answer.finish_reason != "tool_calls"
        return f"its finish reason is {answer.finish_reason!r}, not 'tool_calls'" if wrong else None

    return check


def _like(expected: Mapping[str, str]) -> dict[str, str]:
    return {key: value.lower() for key, value in expected.items()}


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def asks(answer: Answer) -> str | None:
    return None if "?" in answer.text else "it asked nothing back"


def all_of(*checks: Check) -> Check:
    return lambda answer: first_wrong(*(check(answer) for check in checks))


def any_of(*checks: Check) -> Check:
    """The first check's complaint, unless one of them has none."""

    def check(answer: Answer) -> str | None:
        complaints = [each(answer) for each in checks]
        return None if None in complaints else complaints[0]

    return check


RESULT_HISTORY = (
    user("What is the weather in Boston, in Fahrenheit?"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": CALL_ID,
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "arguments": '{"city": "Boston", "unit": "fahrenheit"}',
                },
            }
        ],
    },
    {"role": "tool", "tool_call_id": CALL_ID, "content": '{"temperature": 61, "sky": "hail"}'},
)


def probes() -> list[Probe]:
    weather = {"tools": [WEATHER], "tool_choice": "auto", "max_tokens": 256}
    boston = called({"city": "Boston", "unit": "fahrenheit"})
    # Naming the default unit does no harm.
    both = any_of(
        called({"city": "Paris"}, {"city": "Tokyo"}),
        called({"city": "Paris", "unit": "celsius"}, {"city": "Tokyo", "unit": "celsius"}),
    )
    plain = all_of(no_calls, no_markers)
    flight = {**weather, "tools": [FLIGHT]}
    forced = {**weather, "tool_choice": "required"}
    named = {**weather, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    none = {**weather, "tool_choice": "none"}
    # A named choice ends with "stop" in OpenAI's own API, so its finish reason is not looked at.
    return [
        once("tools", "one call, optional argument inferred",
             [user("How warm is it in Boston right now? I am American, so use my unit.")], boston, **weather),
        once("tools", "answer from a result", RESULT_HISTORY, all_of(plain, contains("61", "hail")), **weather),
        once("tools", "restraint", [user("What is 7 times 8? Answer with the number alone.")],
             all_of(plain, contains("56")), **weather),
        once("tools", "parallel calls",
             [user("What is the weather in Paris and in Tokyo? Look up both at once.")], both, **weather),
        once("tools", "asks when underspecified", [user("Book me a flight, please.")],
             all_of(plain, asks), **flight),
        once("tools", "tool_choice required", [user("Good morning! Is Rome warm?")],
             _calls("get_weather"), **forced),
        once("tools", "tool_choice named", [user("Good morning! Is Rome warm?")],
             _calls("get_weather"), **named),
        once("tools", "tool_choice none", [user("What is the weather in Paris?")], plain, **none),
    ]  # fmt: skip


def _calls(name: str) -> Check:
    """At least one call, all of this function, each with a JSON object that has the city."""

    def check(answer: Answer) -> str | None:
        if not answer.tool_calls:
            return "it called nothing"
        for call in answer.tool_calls:
            arguments = _arguments(call.arguments)
            if call.name != name or arguments is None or "city" not in arguments:
                return f"{call.name}({call.arguments[:80]}) is no call of {name}"
        return None

    return check
