"""Chat messages to prompt ids, through the checkpoint's own jinja template.

It owns rendering (sandboxed, as transformers does it) and the promise that no text from a message becomes a control
token. It does not know what any control token means.

1. Every string of the messages is guarded: a private character, absent from all of them and from the template, goes
   after each character that could begin a control token, and before the text if it could complete or carry one that
   a template literal began. Whitespace stays outside, so `trim`, concatenation and slicing work as published.
2. The template renders. Control tokens are recognised in the result; one that touches guarded text is broken by the
   private character, so only those the template itself wrote are whole.
3. Between them, the private character is removed and the text is tokenised as ordinary text, in one run where template
   and message text meet, exactly as the whole would be.
4. Exactly one BOS starts the prompt, whether or not the template wrote it.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onechip.chat.dialects import GEMMA3, GEMMA4
from onechip.chat.messages import Message, normalise
from onechip.chat.tokenizer import Tokenizer
from onechip.errors import CheckpointError, InvalidRequest

# Names a template reads that a request must not set (vLLM's CVE-2025-61620 and CVE-2025-62426 were of this kind).
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "chat_template",
        "raise_exception",
        "strftime_now",
        "empty_thought",
    }
)
# What template code may raise on odd messages: jinja's own errors, and Python's from the expressions in it.
TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
PRIVATE_USE = range(0xF0000, 0xFFFFE)


class ChatTemplate:
    """A compiled template and the control tokens of its tokenizer. Raises CheckpointError if it does not compile."""

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        origin: str,
        fixed: Mapping[str, Any] | None = None,
    ):
        self.source = source
        self.origin = origin
        self.sha256 = hashlib.sha256(source.encode()).hexdigest()
        self._tokenizer = tokenizer
        controls = [tokenizer.piece_bytes(i).decode() for i in sorted(tokenizer.special_ids)]
        self._guard = Guard(controls)
        self._thinks = "<channel|>" in controls
        self._fixed = {
            "bos_token": tokenizer.piece_bytes(tokenizer.bos_id).decode(),
            "eos_token": "<eos>",
            **(fixed or {}),
        }
        try:
            self._template = _environment().from_string(source, globals=dict(FUNCTIONS))
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template of {origin} is malformed: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, for people to read; `encode` is what a model gets. Raises InvalidRequest."""
        return self._render(normalise(messages), add_generation_prompt, variables or {})

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Prompt ids, BOS first; `variables` are the request's own (chat_template_kwargs). Raises InvalidRequest, with
        the template's message when it refuses.
        """
        plain = [self._without_thoughts(message) for message in normalise(messages)]
        mark = _unused_character(self.source, plain)
        guarded = self._guard.apply(plain, mark)
        text = self._render(guarded, add_generation_prompt, variables or {})
        ids = list(self._encode(text, mark))
        start = next(
            (n for n, token in enumerate(ids) if token != self._tokenizer.bos_id), len(ids)
        )
        return [self._tokenizer.bos_id, *ids[start:]]

    def _render(
        self, messages: list[Message], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        taken = sorted(RESERVED.intersection(variables))
        if taken:
            raise InvalidRequest(
                f"chat_template_kwargs may not set {', '.join(taken)}", param="chat_template_kwargs"
            )
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render({**variables, **self._fixed, **own})
        except TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"the chat template refused: {error}", param="messages") from error

    def _encode(self, text: str, mark: str) -> Iterator[int]:
        """Control tokens by name, and everything between them as ordinary text without the private character."""
        for part in self._tokenizer.split_controls(text):
            if isinstance(part, str):
                yield from self._tokenizer.encode(part.replace(mark, ""))
            else:
                yield part

    def _without_thoughts(self, message: Message) -> Message:
        """Drop channel blocks from earlier answers, as Gemma 4's templates do: guarded text hides them from these."""
        if message["role"] != "assistant" or not self._thinks:
            return message
        kept = re.sub(r"<\|channel>.*?(<channel\|>|\Z)", "", message["content"], flags=re.DOTALL)
        return message | {"content": kept.replace("<channel|>", "")}


class Guard:
    """Keeps control tokens from forming in, or out of, message text. `controls`: their spellings."""

    def __init__(self, controls: Sequence[str]):
        firsts = re.escape("".join(sorted({control[0] for control in controls})))
        lasts = re.escape("".join(sorted({control[-1] for control in controls})))
        self._first = re.compile(f"[{firsts}]")
        self._last = re.compile(f"[{lasts}]")
        self._joined = "\n".join(controls)

    def apply(self, messages: list[Message], mark: str) -> list[Message]:
        return [self._value(message, mark) for message in messages]

    def _value(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._string(value, mark)
        if isinstance(value, Mapping):
            return {
                self._string(key, mark, name=True): item
                if key == "role"
                else self._value(item, mark)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._value(item, mark) for item in value]
        return value

    def _string(self, text: str, mark: str, *, name: bool = False) -> str:
        """Untouched unless it could take part in a control token: most strings are compared, not only printed."""
        inside = text.strip()
        carried = not name and inside in self._joined
        if inside and (carried or self._last.search(inside)):
            head = text[: len(text) - len(text.lstrip())]
            text = head + mark + text[len(head) :]
        return self._first.sub(lambda match: match.group() + mark, text)


def choose(
    tokenizer: Tokenizer, source: str | None, *, origin: str, empty_thought: bool = False
) -> ChatTemplate | None:
    """The checkpoint's template, else the built-in one that its control tokens call for, else None (no chat)."""
    if source is not None:
        return ChatTemplate(source, tokenizer, origin=origin)
    names = {tokenizer.piece_bytes(i) for i in tokenizer.special_ids}
    if {b"<|turn>", b"<turn|>"} <= names:
        fixed = {"empty_thought": empty_thought}
        return ChatTemplate(GEMMA4, tokenizer, origin="built in: gemma4", fixed=fixed)
    if {b"<start_of_turn>", b"<end_of_turn>"} <= names:
        return ChatTemplate(GEMMA3, tokenizer, origin="built in: gemma3")
    return None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """transformers' filter: jinja's own escapes HTML characters, which no model has seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


FUNCTIONS: Mapping[str, Any] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _unused_character(source: str, messages: list[Message]) -> str:
    used = set(source).union(*(set(text) for text in _strings(messages)))
    return next(chr(code) for code in PRIVATE_USE if chr(code) not in used)
