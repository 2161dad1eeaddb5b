"""A conversation and its settings, as data: what was said, what is sent, how it is saved. It prints nothing."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onechip.errors import InvalidRequest

NUMBERS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}
NAMES = (*NUMBERS, "stop")


@dataclass
class Stats:
    """The numbers of the last answer; times in seconds."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first: float | None = None
    total: float = 0.0

    def line(self) -> str:
        """For example: 212 tokens, 38.4 tokens/s, first after 0.21 s, prompt 1,024 tokens."""
        parts: list[str] = []
        if self.completion_tokens is not None:
            plural = "" if self.completion_tokens == 1 else "s"
            parts.append(f"{self.completion_tokens:,} token{plural}")
            seconds = self.total - (self.first or 0.0)
            if self.first is not None and self.completion_tokens > 1 and seconds > 0:
                parts.append(f"{(self.completion_tokens - 1) / seconds:.1f} tokens/s")
        if self.first is not None:
            parts.append(f"first after {self.first:.2f} s")
        if self.prompt_tokens is not None:
            parts.append(f"prompt {self.prompt_tokens:,} tokens")
        return ", ".join(parts) or "no answer yet"


@dataclass
class Session:
    """What is sent with the next message. `messages` holds no system prompt: `system` is sent before them."""

    model: str
    system: str = ""
    thinking: bool = False
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    last: Stats = field(default_factory=Stats)
    pending: str | None = None  # a message that got no answer; /retry sends it again

    def body(self) -> dict[str, Any]:
        """The request that asks for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, *self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.settings,
        }
        if self.thinking:
            body["chat_template_kwargs"] = {"enable_thinking": True}
        return body

    def set(self, name: str, value: str) -> None:
        """Set a sampling value from text; an empty text leaves it to the server again."""
        if name not in NAMES:
            raise InvalidRequest(f"no setting {name!r}; there are {', '.join(NAMES)}")
        if not value:
            self.settings.pop(name, None)
        elif name == "stop":
            self.settings["stop"] = [value.replace("\\n", "\n")]
        else:
            try:
                self.settings[name] = NUMBERS[name](value)
            except ValueError as error:
                kind = "a whole number" if NUMBERS[name] is int else "a number"
                raise InvalidRequest(f"{name} is {kind}, not {value!r}") from error

    def finish(self, said: str, stats: Stats) -> None:
        """Take an answer in. Without one the message is set aside, so that the next does not follow on it."""
        self.last, self.pending = stats, None
        if said:
            self.messages.append({"role": "assistant", "content": said})
        else:
            self.pending = self.messages.pop()["content"]

    def again(self) -> bool:
        """Make the conversation end in the message to answer again; False if there is none."""
        if self.pending is not None:
            self.messages.append({"role": "user", "content": self.pending})
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        return bool(self.messages)

    def save(self, path: Path) -> None:
        """Write the conversation as JSON that `load` and any OpenAI client can read."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        text = json.dumps({"messages": [*system, *self.messages]}, indent=1, ensure_ascii=False)
        try:
            path.expanduser().write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"cannot write {path}: {error.strerror or error}") from error

    def load(self, path: Path) -> None:
        """Take up a saved conversation in place of this one."""
        try:
            found = json.loads(path.expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidRequest(f"cannot read {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise InvalidRequest(f"{path} is not JSON: {error}") from error
        messages = _messages(found)
        if messages is None:
            raise InvalidRequest(f'{path} holds no conversation: {{"messages": [...]}} is expected')
        self.system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
        self.messages = [m for m in messages if m["role"] != "system"]


def _messages(found: Any) -> list[dict[str, str]] | None:
    listed = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(listed, list):
        return None
    for message in listed:
        if not isinstance(message, dict) or message.get("role") not in (
            "system",
            "user",
            "assistant",
        ):
            return None
        if not isinstance(message.get("content"), str):
            return None
    return [{"role": m["role"], "content": m["content"]} for m in listed]
