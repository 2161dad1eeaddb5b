"""Which grammar a request's answer must follow: from OpenAI's and vLLM's fields, and from tool_choice, to `Grammar`.

| field | means |
|---|---|
| `response_format` | json_object, or json_schema (`strict` or not: a schema is always enforced) |
| `structured_outputs` | vLLM's: json, regex, choice, grammar or json_object |
| `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar` | the same under vLLM's old names |
| `tool_choice` "required", or a named function | calls in Gemma's syntax, of the declared tools; a named one once |
| tools with "auto" beside one of the above | the structure or calls |

When it starts: at once; after the thought where the prompt ends inside one; with thinking on, where it does not,
after a thought that the model may open first. Nothing is silently skipped: what the engine cannot compile is a 400.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onechip.chat.call_grammar import CallTokens, call_rules
from onechip.chat.controls import Control, after_thought
from onechip.chat.schemas import tool_schemas
from onechip.engine.json_schema import checked_schema
from onechip.engine.validate import grammar_of
from onechip.errors import InvalidRequest
from onechip.request import Grammar, StructuredOutputsParams
from onechip.server import schema
from onechip.server.tooling import ToolUse, template_variables

GUIDED = ("json", "regex", "choice", "grammar")


def wish_of(body: schema.Sampling) -> Grammar | None:
    """The structure of the text that a body asks for, under whichever name. Raises InvalidRequest for two."""
    wishes: dict[str, StructuredOutputsParams] = {}
    formatted = _format(body.response_format)
    if formatted is not None:
        wishes["response_format"] = formatted
    if body.structured_outputs is not None:
        wishes["structured_outputs"] = _params(body.structured_outputs.model_dump(by_alias=True))
    blanks = body.guided_whitespace_pattern
    for name in GUIDED:
        value = getattr(body, f"guided_{name}")
        if value is not None:
            wishes[f"guided_{name}"] = _params({name: value, "whitespace_pattern": blanks})
    if len(wishes) > 1:
        raise InvalidRequest(
            f"{' and '.join(wishes)} ask for different structures: give one of them",
            param=list(wishes)[-1],
        )
    return next((grammar_of(wish, param) for param, wish in wishes.items()), None)


def chat_grammar(
    body: schema.ChatBody, use: ToolUse, controls: Mapping[int, Control], ids: Sequence[int]
) -> Grammar | None:
    """The grammar of a chat's answer to the prompt `ids`. `controls`: the model's control tokens, by id."""
    wish = wish_of(body)
    if use.choice in ("required", "named"):
        wish = Grammar("calls", "", _calls(use, controls), param="tool_choice")
    elif wish is not None and use.calls:
        if wish.kind == "lark":
            raise InvalidRequest(
                f'{wish.param}: a grammar cannot stand beside tools; use tool_choice "none"',
                param=wish.param,
            )
        wish = replace(wish, calls=_calls(use, controls))
    thinking = template_variables(body).get("enable_thinking") is True
    return wish and after_thought(wish, controls, ids, thinking=thinking)


def _calls(use: ToolUse, controls: Mapping[int, Control]) -> str:
    """The rules of the calls that an answer may or must consist of."""
    tokens = {meaning: index for index, meaning in controls.items()}
    if not {"call", "call_end", "quote"} <= tokens.keys():
        raise InvalidRequest(
            "this model cannot be made to call tools: its vocabulary has no tokens for calls",
            param="tool_choice",
        )
    tools = tool_schemas(use.tools)
    if use.name is not None:
        tools = {use.name: tools[use.name]}
    for parameters in tools.values():
        checked_schema(json.dumps(parameters), "tools")
    ids = CallTokens(tokens["call"], tokens["call_end"], tokens["quote"])
    return call_rules(tools, ids, many=use.name is None and use.parallel)


def _format(wanted: schema.ResponseFormat | None) -> StructuredOutputsParams | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if wanted.type != "json_schema":
        raise InvalidRequest(
            f"response_format.type is {wanted.type!r:.40}; allowed: text, json_object, json_schema",
            param="response_format",
        )
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequest(
            "response_format of type json_schema needs json_schema.schema", param="response_format"
        )
    return StructuredOutputsParams(json=wanted.json_schema.schema_)


def _params(fields: Mapping[str, Any]) -> StructuredOutputsParams:
    given = {name: value for name, value in fields.items() if value is not None}
    if "choice" in given:
        given["choice"] = tuple(given["choice"])
    return StructuredOutputsParams(**given)
