"""OpenAI's Responses request bodies, and what they mean in the terms of a chat request.

It owns the translation: instructions, input items, tools and text format become the messages and fields of
`schema.ChatBody`, which is then served as any other chat. What cannot be translated is refused by name. It knows no
routes, no store and no answers.

- Reasoning, the assistant's text and its function calls, in a row, are one assistant message.
- Instructions stand before the conversation and are not carried over by previous_response_id, as OpenAI has it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from onechip.server.schema import LABEL, ChatBody, Strict, as_chat_body, refused

HOSTED = "this server runs no tools itself; declare functions"
PLAIN = (  # fields that ChatBody has under the same name
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "timeout",
    "parallel_tool_calls",
    "chat_template_kwargs",
)


class TextPart(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any] | None, LABEL] = None
    logprobs: Annotated[list[Any] | None, LABEL] = None


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class MessageItem(Strict):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    type: Literal["message"] | None = None
    id: Annotated[str | None, LABEL] = None
    status: Annotated[str | None, LABEL] = None
    phase: Annotated[str | None, LABEL] = None


class CallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Annotated[str | None, LABEL] = None
    status: Annotated[str | None, LABEL] = None


class CallOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextPart]
    id: Annotated[str | None, LABEL] = None
    status: Annotated[str | None, LABEL] = None


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    id: Annotated[str | None, LABEL] = None
    status: Annotated[str | None, LABEL] = None
    encrypted_content: Annotated[Any, refused("thoughts are not encrypted here")] = None


def _item_type(value: Any) -> str:
    """Messages may leave their type out."""
    found: Any = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return str(found or "message")


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]


class FunctionTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[Any, refused(HOSTED, False)] = None
    allowed_callers: Annotated[Any, refused(HOSTED, ["direct"])] = None
    output_schema: Annotated[Any, refused("results are used as they are sent")] = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class Format(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    format: Format | None = None
    verbosity: Annotated[Any, refused("the model has one way to speak", "medium")] = None


class Reasoning(Strict):
    effort: str | None = None
    summary: Annotated[Any, refused("thoughts are given in full", "auto")] = None
    generate_summary: Annotated[Any, refused("thoughts are given in full", "auto")] = None
    context: Annotated[Any, refused("thoughts live inside one tool chain", "auto")] = None
    mode: Annotated[Any, refused("there is one mode", "standard")] = None


class ResponseStreamOptions(Strict):
    include_obfuscation: Annotated[Any, refused("streams are not padded", False)] = None


class ResponsesBody(Strict):
    """POST /v1/responses."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    # This server's own, as in chat completions.
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    timeout: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: Annotated[str | None, LABEL] = None
    metadata: Annotated[dict[str, str] | None, LABEL] = None
    safety_identifier: Annotated[str | None, LABEL] = None
    prompt_cache_key: Annotated[str | None, LABEL] = None
    prompt_cache_retention: Annotated[str | None, LABEL] = None
    service_tier: Annotated[str | None, LABEL] = None
    background: Annotated[Any, refused("send the request and wait, or stream", False)] = None
    conversation: Annotated[
        Any, refused("use previous_response_id or send the conversation as input")
    ] = None
    include: Annotated[
        Any, refused("answers have all there is", [], ["reasoning.encrypted_content"])
    ] = None
    max_tool_calls: Annotated[Any, refused(HOSTED)] = None
    moderation: Annotated[Any, refused("nothing is moderated")] = None
    prompt: Annotated[Any, refused("there are no stored prompts")] = None
    top_logprobs: Annotated[Any, refused("use /v1/chat/completions for log probabilities", 0)] = (
        None
    )
    truncation: Annotated[
        Any, refused("a conversation that is too long is refused, never cut", "disabled")
    ] = None
    context_management: Annotated[Any, refused("the conversation is used as it is sent")] = None


def input_items(body: ResponsesBody) -> list[dict[str, Any]]:
    """The request's own input as items, as they can be stored and sent again."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    return [item.model_dump(exclude_none=True, by_alias=True) for item in body.input]


def chat_body(body: ResponsesBody, conversation: Sequence[Mapping[str, Any]]) -> ChatBody:
    """The request as a chat; `conversation`: all input items, those of previous responses first."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in PLAIN}
    fields |= {
        "messages": _messages(body.instructions, conversation),
        "max_tokens": body.max_output_tokens,
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "tool_choice": _tool_choice(body),
        "response_format": _format(body.text),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }
    return as_chat_body(fields)


def _messages(
    instructions: str | None, conversation: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in conversation:
        match item.get("type", "message"):
            case "message" if item["role"] == "assistant":
                _assistant(messages)["content"] += _text(item["content"])
            case "message":
                messages.append({"role": item["role"], "content": _text(item["content"])})
            case "reasoning":
                texts = item.get("content") or item.get("summary") or ()
                _think(_assistant(messages), "".join(part["text"] for part in texts))
            case "function_call":
                _assistant(messages).setdefault("tool_calls", []).append(_call(item))
            case _:
                output = {"tool_call_id": item["call_id"], "content": _text(item["output"])}
                messages.append({"role": "tool", **output})
    return messages


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant message that is being put together."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _think(message: dict[str, Any], text: str) -> None:
    if text:
        before = message.get("reasoning_content")
        message["reasoning_content"] = text if before is None else f"{before}\n{text}"


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", part.get("refusal", "")) for part in content)


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    function = {name: value for name in names if (value := getattr(tool, name)) is not None}
    return {"type": "function", "function": function}


def _tool_choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    if not isinstance(choice, NamedFunction):
        return choice
    return {"type": "function", "function": {"name": choice.name}}


def _format(text: TextConfig | None) -> dict[str, Any] | None:
    if text is None or text.format is None or text.format.type == "text":
        return None
    if text.format.type == "json_object":
        return {"type": "json_object"}
    named = text.format.model_dump(exclude_none=True, exclude={"type"}, by_alias=True)
    return {"type": "json_schema", "json_schema": {"name": "output", **named}}
