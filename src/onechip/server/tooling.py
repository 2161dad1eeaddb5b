"""What a chat request says of tools and of thinking, checked, in the terms of `chat`.

- Calls are read only where tools are declared and tool_choice is not "none"; otherwise a call the model makes all the
  same comes back as text. The declarations are in the prompt in both cases.
- `reasoning_effort` is a switch here: "none" is off, any other effort on. `enable_thinking` in chat_template_kwargs
  outranks it. Neither given: off.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from onechip.chat.controls import Control, prompt_end
from onechip.chat.reading import Reading
from onechip.chat.schemas import tool_schemas
from onechip.chat.tools import declared
from onechip.errors import InvalidRequest
from onechip.server.schema import ChatBody, NamedTool, Tool

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class ToolUse:
    """The declared tools in OpenAI's shape and which of them may be called. `name`: the one that must be, if one."""

    tools: tuple[dict[str, Any], ...] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    name: str | None = None
    parallel: bool = True

    @property
    def calls(self) -> bool:
        return bool(self.tools) and self.choice != "none"

    def reading(self, controls: Mapping[int, Control], ids: list[int]) -> Reading:
        """How the answers to the prompt `ids` are read."""
        schemas = tool_schemas(self.tools) if self.calls else None
        return Reading(controls, prompt_end(ids, controls), schemas, self.parallel)


def declared_tools(tools: Sequence[Tool] | None) -> tuple[dict[str, Any], ...]:
    return tuple(declared([tool.model_dump(exclude_unset=True) for tool in tools or ()]))


def tool_use(body: ChatBody) -> ToolUse:
    """Raises InvalidRequest for tools that cannot be declared, or a choice among them that is none."""
    tools = declared_tools(body.tools)
    choice = body.tool_choice
    parallel = body.parallel_tool_calls is not False
    if not tools and (isinstance(choice, NamedTool) or choice == "required"):
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    if not tools:
        return ToolUse()
    if not isinstance(choice, NamedTool):
        return ToolUse(tools, choice or "auto", None, parallel)
    names = [tool["function"]["name"] for tool in tools]
    if choice.function.name not in names:
        raise InvalidRequest(
            f"tool_choice names {choice.function.name!r}; declared: {', '.join(names)}",
            param="tool_choice",
        )
    return ToolUse(tools, "named", choice.function.name, parallel)


def template_variables(body: ChatBody) -> dict[str, Any]:
    """chat_template_kwargs, with reasoning_effort as the switch it is."""
    variables = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is None:
        return variables
    if effort not in EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort is {effort!r}; allowed: {', '.join(EFFORTS)}",
            param="reasoning_effort",
        )
    return {"enable_thinking": effort != "none"} | variables
