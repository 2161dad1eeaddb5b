"""Chat messages as clients send them, made into what a chat template expects.

It owns the translations that every published template needs and refuses what this engine cannot do yet, naming it. It
knows no template and no token.

- Content that is a list of text parts becomes their concatenation; nothing is put between them. Missing content of an
  assistant or a tool is "". `developer` is written `system`. Media parts are refused.
- A call's arguments become a mapping: clients send JSON text ("" and null mean no arguments). Numbers and null in them
  stay as written (`Written`): templates print numbers as Python would, and null as None.
- A tool message gets the `name` of the call that its id names, else its own, else "unknown". It must follow the
  assistant message with calls that it answers, or another such result: templates drop it silently elsewhere.
- `reasoning` and `reasoning_content` are the same thing under two names, and both are set.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from onechip.errors import InvalidRequest

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


class Written:
    """A JSON number or null, printed as it was written; to a template it is no text."""

    __slots__ = ("_text",)

    def __init__(self, text: str):
        self._text = text

    def __str__(self) -> str:
        return self._text


NULL = Written("null")


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages with plain string content; `at` is their place. Raises InvalidRequest naming `messages[i]`."""
    if not messages:
        raise InvalidRequest("messages is empty: give at least one message", param="messages")
    made = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    _name_results(made)
    return [message | {"at": index} for index, message in enumerate(made)]


def merged(messages: Sequence[Message]) -> list[Message]:
    """Answers in a row as one: some templates put the second outside any turn."""
    made: list[Message] = []
    for message in messages:
        before = made[-1] if made else {}
        if (
            message["role"] == before.get("role") == "assistant"
            and not before.get("tool_calls")
            and not ("reasoning" in message and before["content"])
        ):
            made[-1] = before | message
            made[-1]["content"] = before["content"].strip() + message["content"].lstrip()
        else:
            made.append(message)
    return made


def folded(messages: Sequence[Message]) -> list[Message]:
    """Results as `tool_responses` of the message with the calls."""
    made: list[Message] = []
    for message in messages:
        if message["role"] != "tool":
            made.append(dict(message))
        else:
            result = {"name": message["name"], "response": message["content"]}
            made[-1]["tool_responses"] = [*made[-1].get("tool_responses", ()), result]
    return made


def _message(message: Mapping[str, Any], where: str) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{where}.role is {role!r}; allowed: {', '.join(ROLES)}", param=f"{where}.role"
        )
    content = _text(
        message.get("content"), f"{where}.content", optional=role in ("assistant", "tool")
    )
    made = {key: value for key, value in message.items() if value is not None}
    made |= {"role": "system" if role == "developer" else role, "content": content}
    for key in ("tool_calls", "reasoning", "reasoning_content"):
        made.pop(key, None)
    if role == "assistant":
        made |= _reasoning(message, where) | _calls(message.get("tool_calls"), where)
    elif message.get("tool_calls"):
        raise InvalidRequest(f"{where}: only an assistant makes tool calls", param=where)
    return made


def _reasoning(message: Mapping[str, Any], where: str) -> Message:
    text = message.get("reasoning") or message.get("reasoning_content")
    if not text:
        return {}
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.reasoning must be a string", param=f"{where}.reasoning")
    return {"reasoning": text, "reasoning_content": text}


def _calls(calls: Any, where: str) -> Message:
    if not calls:
        return {}
    where = f"{where}.tool_calls"
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list", param=where)
    return {"tool_calls": [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]}


def _call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where} must have a function with a name", param=where)
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    made: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    identity = cast(Mapping[str, Any], call).get("id")
    return made if identity is None else made | {"id": str(identity)}


def _arguments(given: Any, where: str) -> Message:
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    try:
        value = _parse(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON: {error}", param=where) from error
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} must be a JSON object", param=where)
    return {str(key): written(item) for key, item in value.items()}


def _parse(text: str) -> Any:
    return json.loads(text, parse_int=Written, parse_float=Written, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def written(value: Any) -> Any:
    """The value with every null as templates should print it."""
    if value is None:
        return NULL
    if isinstance(value, Mapping):
        return {str(key): written(item) for key, item in value.items()}
    if isinstance(value, list):
        return [written(item) for item in value]
    return value


def _name_results(messages: Sequence[Message]) -> None:
    """Give every tool message its name; they follow a message with calls in one row."""
    names: dict[str, str] = {}
    answering = False
    for index, message in enumerate(messages):
        if message["role"] != "tool":
            answering = bool(message.get("tool_calls"))
            for call in message.get("tool_calls", ()):
                names[call.get("id", "")] = call["function"]["name"]
        elif not answering:
            raise InvalidRequest(
                f"messages[{index}]: a tool message must follow the assistant message whose call it answers",
                param=f"messages[{index}]",
            )
        else:
            found = names.get(message.get("tool_call_id", ""))
            message["name"] = found or message.get("name") or "unknown"


def _text(content: Any, where: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{where} must be a string or a list of text parts, not {type(content).__name__}",
            param=where,
        )
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise InvalidRequest(
            f"{where} has type {kind!r}: this model is served for text only", param=where
        )
    unknown = sorted(set(part) - {"type", "text"})
    if unknown:
        raise InvalidRequest(
            f"{where}: unknown field{'s' if len(unknown) > 1 else ''}: {', '.join(unknown)}",
            param=where,
            code="unknown_field",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string", param=where)
    return text
