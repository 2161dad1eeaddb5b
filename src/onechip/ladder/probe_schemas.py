"""Probes of structured output: every spelling of a constraint that servers know, with thinking off and on.

The prompts pull away from the wanted form (a sentence of prose where an object is wanted), so a constraint that is
accepted and ignored shows. The form is checked by hand, not by a schema library, because it is this one schema.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from onechip.ladder.probes import Check, Probe, first_wrong, not_cut, once
from onechip.ladder.stream import Answer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "born": {"type": "integer"},
        "field": {"type": "string", "enum": ["mathematics", "physics", "poetry"]},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "born", "field", "alive"],
    "additionalProperties": False,
}
DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
CHOICES = ["crimson", "turquoise", "ochre"]

PERSON = "Who was Ada Lovelace? Tell me in one friendly sentence."
AS_JSON = "Describe Ada Lovelace as a JSON object with the keys name and born."
LANDING = "When did people first land on the moon? Explain in a full sentence."
COLOUR = "Say hello and tell me which colour you like, and why."


def parsed(answer: Answer) -> Any:
    try:
        return json.loads(answer.text)
    except ValueError:
        return None


def is_person(answer: Answer) -> str | None:
    value = parsed(answer)
    if not isinstance(value, dict) or set(value) != set(SCHEMA["required"]):
        return "the text is no object with the schema's keys"
    good = (
        isinstance(value["name"], str) and len(value["name"]) <= 40 and type(value["born"]) is int
        and value["field"] in SCHEMA["properties"]["field"]["enum"] and isinstance(value["alive"], bool)
    )  # fmt: skip
    return None if good else "a value does not fit the schema"


def is_object(answer: Answer) -> str | None:
    return None if isinstance(parsed(answer), dict) else "the text is no JSON object"


def is_date(answer: Answer) -> str | None:
    return None if re.fullmatch(DATE, answer.text) else f"the text does not match {DATE}"


def is_choice(answer: Answer) -> str | None:
    return None if answer.text in CHOICES else f"the text is none of {', '.join(CHOICES)}"


SPELLINGS: tuple[tuple[str, str, Mapping[str, Any], Check], ...] = (
    ("response_format json_schema", PERSON,
     {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}},
     is_person),
    ("response_format json_object", AS_JSON, {"response_format": {"type": "json_object"}}, is_object),
    ("guided_json", PERSON, {"guided_json": SCHEMA}, is_person),
    ("structured_outputs json", PERSON, {"structured_outputs": {"json": SCHEMA}}, is_person),
    ("guided_regex", LANDING, {"guided_regex": DATE}, is_date),
    ("structured_outputs regex", LANDING, {"structured_outputs": {"regex": DATE}}, is_date),
    ("guided_choice", COLOUR, {"guided_choice": CHOICES}, is_choice),
    ("structured_outputs choice", COLOUR, {"structured_outputs": {"choice": CHOICES}}, is_choice),
)  # fmt: skip


def probes() -> list[Probe]:
    return [_probe(*spelling, thinking) for thinking in (False, True) for spelling in SPELLINGS]


def _probe(
    name: str, prompt: str, fields: Mapping[str, Any], check: Check, thinking: bool
) -> Probe:
    # Off is not said: it is the template's default, and a server that takes no such field still has its constraints.
    more: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}} if thinking else {}
    return once(
        "schemas",
        f"{name}, thinking {'on' if thinking else 'off'}",
        [{"role": "user", "content": prompt}],
        lambda answer: first_wrong(not_cut(answer), check(answer)),
        max_tokens=2048 if thinking else 256,
        **more,
        **fields,
    )
