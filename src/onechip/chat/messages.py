"""Chat messages as clients send them, made into what a chat template expects.

It owns the small translations that every published template needs and refuses what this engine cannot do yet, naming
it. It knows no template and no token.

- Content that is a list of text parts becomes their concatenation; nothing is put between them.
- `developer` is written `system`. Missing assistant content becomes "".
- Media parts, tools and tool messages are refused with a 400 that names them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from onechip.errors import InvalidRequest

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant")


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages with plain string content. Raises InvalidRequest naming `messages[i]`."""
    if not messages:
        raise InvalidRequest("messages is empty: give at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> Message:
    role = message.get("role")
    if role == "tool" or message.get("tool_calls"):
        raise InvalidRequest(f"{where}: tool calls are not supported yet", param=f"{where}.role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{where}.role is {role!r}; allowed: {', '.join(ROLES)}", param=f"{where}.role"
        )
    content = _text(message.get("content"), f"{where}.content", optional=role == "assistant")
    rest = {key: value for key, value in message.items() if value is not None}
    return rest | {"role": "system" if role == "developer" else role, "content": content}


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
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string", param=where)
    return text
