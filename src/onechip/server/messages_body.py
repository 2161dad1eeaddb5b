"""Anthropic's request bodies, and what they mean in the terms of a chat request.

It owns the translation: system, content blocks, tools and thinking become the messages and fields of `schema.ChatBody`,
which is then served as any other chat. What cannot be translated is refused by name. It knows no routes and no answers.

- Tool results come before the other text of their message, each as a message of its own; one that is an error begins
  with "Error: ".
- A last assistant message is continued, not answered.
- `thinking` is on or off here: a budget and an effort are taken as hints and do not cut the thought; max_tokens does.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from onechip.errors import InvalidRequest
from onechip.server.schema import LABEL, ChatBody, Strict, as_chat_body, refused

HOSTED = "this server runs no tools itself"


class Block(Strict):
    cache_control: Annotated[dict[str, Any] | None, LABEL] = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[Any, refused("citations are not supported", [])] = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Annotated[dict[str, Any] | None, LABEL] = None


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str | None, LABEL] = None


ContentBlock = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock,
    Field(discriminator="type"),
]


class InputMessage(Strict):
    role: Literal["user", "assistant"]
    content: str | list[ContentBlock]


class Tool(Strict):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Annotated[dict[str, Any] | None, LABEL] = None
    eager_input_streaming: Annotated[bool | None, LABEL] = None
    input_examples: Annotated[Any, refused("the prompt has no place for examples", [])] = None
    defer_loading: Annotated[Any, refused(HOSTED, False)] = None
    allowed_callers: Annotated[Any, refused(HOSTED, ["direct"])] = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int | None, LABEL] = Field(default=None, ge=1)
    display: Annotated[Any, refused("thoughts are shown in full or not made", "summarized")] = None


class JsonFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    format: JsonFormat | None = None
    effort: Annotated[Literal["low", "medium", "high", "xhigh", "max"] | None, LABEL] = None


class Prompt(Strict):
    """What both routes take: everything that becomes prompt tokens."""

    model: str
    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Annotated[dict[str, Any] | None, LABEL] = None
    context_management: Annotated[Any, refused("the conversation is used as it is sent")] = None
    mcp_servers: Annotated[Any, refused(HOSTED, [])] = None
    speed: Annotated[Any, refused("there is one speed", "standard")] = None


class CountBody(Prompt):
    """POST /v1/messages/count_tokens."""


class MessagesBody(Prompt):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: Annotated[dict[str, Any] | None, LABEL] = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, LABEL] = None
    container: Annotated[Any, refused(HOSTED)] = None
    inference_geo: Annotated[Any, refused("there is one place: here")] = None
    diagnostics: Annotated[Any, refused("there are none")] = None


def chat_body(body: Prompt) -> ChatBody:
    """The same request as a chat. Raises InvalidRequest."""
    choice = body.tool_choice or ToolChoice(type="auto")
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": list(_messages(body)),
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "tool_choice": _tool_choice(choice) if body.tools else None,
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
        "chat_template_kwargs": {"enable_thinking": _thinks(body)},
        "response_format": _format(body.output_config),
    }
    if body.messages and body.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        for name in ("max_tokens", "stream", "temperature", "top_p", "top_k"):
            fields[name] = getattr(body, name)
        fields["stop"] = body.stop_sequences
    return as_chat_body(fields)


def _thinks(body: Prompt) -> bool:
    return body.thinking is not None and body.thinking.type != "disabled"


def _messages(body: Prompt) -> Iterator[dict[str, Any]]:
    if body.system:
        system = body.system
        text = system if isinstance(system, str) else "".join(block.text for block in system)
        yield {"role": "system", "content": text}
    for index, message in enumerate(body.messages):
        blocks = message.content
        if isinstance(blocks, str):
            yield {"role": message.role, "content": blocks}
        elif message.role == "user":
            yield from _user(blocks, f"messages[{index}]")
        else:
            yield _assistant(blocks, f"messages[{index}]")


def _user(blocks: Sequence[Any], where: str) -> Iterator[dict[str, Any]]:
    texts: list[dict[str, str]] = []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append({"type": "text", "text": block.text})
            case ToolResultBlock():
                yield {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": _result(block),
                }
            case _:
                raise _misplaced(block, where, "user")
    if texts or not blocks:
        yield {"role": "user", "content": texts}


def _result(block: ToolResultBlock) -> str:
    parts = block.content or ""
    text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
    return f"Error: {text}" if block.is_error else text


def _assistant(blocks: Sequence[Any], where: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                calls.append(_call(block))
            case _:
                raise _misplaced(block, where, "assistant")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _misplaced(block: Any, where: str, role: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}.content: a {role} message has no {block.type} block", param=where
    )


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise InvalidRequest("tool_choice.name is required", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _format(config: OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    schema = {"name": "output", "schema": config.format.schema_, "strict": True}
    return {"type": "json_schema", "json_schema": schema}
