"""Request bodies: OpenAI's fields and vLLM's sampling extensions, strictly typed.

A field we do not know is an error that names it; a field we know is honoured or refused. The only fields accepted
without effect are the labels OpenAI keeps for its own accounting: user, metadata, store and safety_identifier.
It knows no token ids and no engine; ranges are `engine.validate`'s.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from onechip.errors import InvalidRequest
from onechip.request import SamplingParams

Body = TypeVar("Body", bound="Strict")

COMPLETION_TOKENS = 16  # OpenAI's default for completions; chat runs to the end of the context
PLAIN = (  # fields that SamplingParams has under the same name and type
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
ARMS = frozenset({"str", "int", "float", "bool", "list", "dict", "none"})
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Strict(BaseModel):
    """No unknown fields and no conversions: "5" is not a number, and "yes" is not true."""

    model_config = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Refusal:
    """Why a field we know cannot be honoured. Null and the `harmless` values pass: they ask for nothing."""

    reason: str
    harmless: tuple[Any, ...]

    def __call__(self, value: Any) -> Any:
        if value is None or value in self.harmless:
            return value
        raise PydanticCustomError("refused", "{reason}", {"reason": self.reason})


def refused(reason: str, *harmless: Any) -> BeforeValidator:
    """Annotates a field that is refused."""
    return BeforeValidator(Refusal(reason, harmless))


class Label:
    """Annotates a field that is accepted without effect: it is for the client's or the provider's own accounting."""


LABEL = Label()


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Strict):
    """`strict` false asks for less than is given: a schema is always enforced."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's; see `request.StructuredOutputsParams`."""

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class Sampling(Strict):
    """What both generating routes share. None means "not set": the model's defaults apply."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    timeout: float | None = None
    user: Annotated[str | None, LABEL] = None
    metadata: Annotated[dict[str, str] | None, LABEL] = None
    store: Annotated[bool | None, LABEL] = None
    safety_identifier: Annotated[str | None, LABEL] = None


class CalledFunction(Strict):
    name: str
    arguments: Any = None


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
    index: Annotated[int | None, LABEL] = None


class Message(Strict):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: Annotated[str | None, LABEL] = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any] | None, LABEL] = None


class Function(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    response: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class ChatBody(Sampling):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prompt_only: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(Sampling):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: list[int] = Field(max_length=10_000_000)


def parse(kind: type[Body], raw: bytes) -> Body:
    """The body of that kind. Raises InvalidRequest naming the first field at fault, or all unknown ones."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(error) from error


def as_chat_body(fields: Mapping[str, Any]) -> ChatBody:
    """A chat request of another dialect's fields; None means "not set"."""
    try:
        return ChatBody.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError as error:
        raise _explain(error) from error


def chat_sampling(body: ChatBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Checks the chat-only fields and fills the sampling parameters; max_completion_tokens outranks max_tokens."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _sampling(body, defaults, limit, logprobs, body.prompt_logprobs)


def completion_sampling(body: CompletionBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """The same for completions. With echo, logprobs covers the prompt too; echo with max_tokens 0 generates nothing
    that is shown (the engine's one token is dropped by the route).
    """
    if body.suffix:
        raise InvalidRequest("suffix is not supported: these models do not infill", param="suffix")
    if body.best_of not in (None, body.n or 1):
        raise InvalidRequest("best_of must equal n: candidates are not ranked", param="best_of")
    limit = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if limit == 0 and body.echo:
        limit = 1
    prompt = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    return _sampling(body, defaults, limit, body.logprobs, prompt)


def _sampling(
    body: Sampling,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    given = {name: defaults[name] for name in DEFAULTED if name in defaults}
    given |= {name: value for name in PLAIN if (value := getattr(body, name)) is not None}
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=_stops(body.stop),
        logit_bias=_bias(body.logit_bias),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        **given,
    )


def time_limit(body: Sampling, server_limit: float | None) -> float | None:
    """Seconds the request may take: the smaller of its own `timeout` and the server's."""
    if body.timeout is None:
        return server_limit
    if not 0 < body.timeout < math.inf:
        raise InvalidRequest(
            f"timeout is {body.timeout}; allowed: seconds above 0", param="timeout"
        )
    return body.timeout if server_limit is None else min(body.timeout, server_limit)


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): value for token, value in (bias or {}).items()}
    except ValueError as error:
        raise InvalidRequest(
            f"logit_bias keys must be token ids: {error}", param="logit_bias"
        ) from error


def _explain(error: ValidationError) -> InvalidRequest:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [_path(p["loc"]) for p in problems if p["type"] == "extra_forbidden"]
    if unknown:
        return InvalidRequest(
            f"unknown field{'s' if len(unknown) > 1 else ''}: {', '.join(unknown)}",
            param=unknown[0],
            code="unknown_field",
        )
    about = [p for p in problems if p["loc"][:1] == problems[0]["loc"][:1]]
    first = max(about, key=lambda p: len(p["loc"]))  # the arm of a union that came furthest
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {first['msg']}", code="invalid_json")
    path = _path(first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(f"{path} is required", param=path, code="missing_field")
    if first["type"] == "refused":
        return InvalidRequest(f"{path}: {first['msg']}", param=path, code="unsupported_field")
    kinds = [p["msg"] for p in problems if _path(p["loc"]) == path]
    return InvalidRequest(f"{path}: {' or: '.join(dict.fromkeys(kinds))}", param=path or None)


def _path(loc: Sequence[int | str]) -> str:
    """`messages[0].role`; the names pydantic gives to the arms of a union are left out."""
    text = ""
    for step in loc:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.isidentifier() and not step[0].isupper() and step not in ARMS:
            text += f".{step}" if text else step
    return text
