"""Chat messages to prompt ids, through the checkpoint's own jinja template.

It owns rendering (sandboxed, as transformers does it) and the promise that no text from a message, a tool or a result
becomes a control token. What control tokens mean it leaves to `turns` and `messages`.

1. Messages and tools are put right (`messages`, `tools`); for Gemma 4, answers in a row become one, and thoughts inside
   earlier content go. Text beside calls is taken out and its place marked: published templates print it after the
   results, outside any turn.
2. Every string is guarded: a private character, absent from all of them and from the template, goes after each
   character that could begin a control token, and before the text if it could complete or carry one that a template
   literal began. Whitespace stays outside, so `trim`, concatenation and slicing work as published.
3. The template renders. Text beside calls goes back before its first call; a final message to be continued is cut
   where it ends. Control tokens are recognised in the result; one that touches guarded text is broken by the private
   character, so only those the template itself wrote are whole.
4. Turns are balanced (`turns`). Between control tokens the private character is removed and the text is tokenised as
   ordinary text, in one run where template and message text meet, exactly as the whole would be.
5. Exactly one BOS starts the prompt, whether or not the template wrote it.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onechip.chat.dialects import GEMMA3, GEMMA4
from onechip.chat.guard import Guard, Marks, unused
from onechip.chat.messages import Message, Written, folded, merged, normalise
from onechip.chat.tokenizer import Tokenizer
from onechip.chat.tools import printable, shielded
from onechip.chat.turns import Piece, Turns
from onechip.errors import CheckpointError, InvalidRequest

# Names a template reads that a request must not set (vLLM's CVE-2025-61620 and CVE-2025-62426 were of this kind).
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "chat_template",
        "raise_exception",
        "strftime_now",
        "empty_thought",
    }
)
SWITCHES = ("enable_thinking", "preserve_thinking")
# What template code may raise on odd messages: jinja's own errors, and Python's from the expressions in it.
TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
CALL_LITERAL = "<|tool_call>call:"


@dataclass(frozen=True)
class Ask:
    """What is to be rendered. `variables` are the request's own (chat_template_kwargs)."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


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
        opens, closes = tokenizer.id_of("<|turn>"), tokenizer.id_of("<turn|>")
        self._turns = (
            Turns(opens, closes, tokenizer.id_of("<|tool_response>"))
            if opens is not None and closes is not None
            else None
        )
        self._fixed = {
            "bos_token": tokenizer.piece_bytes(tokenizer.bos_id).decode(),
            "eos_token": "<eos>",
            **(fixed or {}),
        }
        try:
            environment = _environment()
            self._template = environment.from_string(source, globals=dict(FUNCTIONS))
            variables = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template of {origin} is malformed: {error}") from error
        self.takes_tools = "tools" in variables and "<|tool_call>" in controls
        self.takes_thinking = "enable_thinking" in variables and self._thinks
        # Templates before April 2026's second revision want results inside the message with the calls.
        self._folds_results = "tool_responses" in source and "tool_call_id" not in source

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt as text, for people to read; `encode` is what a model gets. Raises InvalidRequest."""
        return self._tokenizer.decode(self.encode(messages, **options), skip_special=False)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Prompt ids, BOS first; `variables` are the request's own (chat_template_kwargs), `tools` have been checked
        (`tools.declared`). Raises InvalidRequest, with the template's message when it refuses.
        """
        ask = Ask(messages, tools, variables, add_generation_prompt, continue_final_message)
        self._check(ask)
        plain, places = self._prepare(normalise(messages), fold=self._folds_results)
        declared = [printable(tool) for tool in tools]
        marks = unused(self.source, [*plain, *declared])
        text = self._render(self._guarded(plain, marks, ask), self._shielded(declared, marks), ask)
        text = self._put_back(text, places, marks)
        if ask.continue_final_message:
            text = _cut(text, marks.cut)
        pieces: list[Piece] = list(self._tokenizer.split_controls(text))
        if self._turns is not None:
            pieces = self._turns.balanced(pieces, generate=add_generation_prompt)
        ids = list(self._encode(pieces, marks.guard))
        bos = self._tokenizer.bos_id
        start = next((n for n, token in enumerate(ids) if token != bos), len(ids))
        return [bos, *ids[start:]]

    def _check(self, ask: Ask) -> None:
        variables = ask.variables or {}
        taken = sorted(RESERVED.intersection(variables))
        if taken:
            raise InvalidRequest(
                f"chat_template_kwargs may not set {', '.join(taken)}", param="chat_template_kwargs"
            )
        for name in SWITCHES:
            if not isinstance(variables.get(name, False), bool):
                raise InvalidRequest(f"{name} must be true or false", param="chat_template_kwargs")
        if variables.get("enable_thinking") and not self.takes_thinking:
            raise InvalidRequest(
                "enable_thinking: this model's chat template has no thinking",
                param="chat_template_kwargs",
            )
        if ask.tools and not self.takes_tools:
            raise InvalidRequest("this model's chat template declares no tools", param="tools")
        if ask.continue_final_message:
            self._check_continuation(ask)

    def _check_continuation(self, ask: Ask) -> None:
        if ask.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        last = ask.messages[-1] if ask.messages else {}
        if last.get("role") != "assistant" or last.get("tool_calls"):
            raise InvalidRequest(
                "continue_final_message needs a last message of the assistant, without tool calls",
                param="continue_final_message",
            )

    def _prepare(self, messages: list[Message], *, fold: bool) -> tuple[list[Message], list[str]]:
        """Messages as templates print them best, and the texts that belong before calls."""
        if self._turns is None:
            return messages, []
        made = merged([self._without_thoughts(message) for message in messages])
        places: list[str] = []
        for message in made:
            if message.get("tool_calls") and message["content"].strip():
                message["place"] = len(places)
                places.append(message["content"].strip())
                message["content"] = ""
        return (folded(made) if fold else made), places

    def _guarded(self, plain: list[Message], marks: Marks, ask: Ask) -> list[Message]:
        guarded = self._guard.apply(plain, marks.guard)
        for message in guarded:
            if "place" in message:
                spot = f"{marks.spot}{message.pop('place')}{marks.spot}"
                function = message["tool_calls"][0]["function"]
                function["name"] = spot + function["name"]
        if ask.continue_final_message:
            guarded[-1]["content"] += marks.cut
        return guarded

    def _shielded(self, declared: list[Message], marks: Marks) -> list[Message]:
        return [shielded(tool, marks.guard) for tool in self._guard.apply(declared, marks.guard)]

    def _put_back(self, text: str, places: Sequence[str], marks: Marks) -> str:
        """The texts beside calls, each before its first call; spots elsewhere (names of results) go."""
        spot = f"{marks.spot}([0-9]+){marks.spot}"
        if places:
            guarded = [self._guard.string(place, marks.guard) for place in places]
            text = re.sub(
                re.escape(CALL_LITERAL) + spot,
                lambda found: guarded[int(found[1])] + CALL_LITERAL,
                text,
            )
        return re.sub(spot, "", text)

    def _render(self, messages: list[Message], tools: list[Message], ask: Ask) -> str:
        """Raises InvalidRequest that names the first message with which the template fails."""
        try:
            return self._try(messages, tools, ask, ask.add_generation_prompt)
        except TEMPLATE_ERRORS as error:
            where = self._culprit(messages, tools, ask)
            raise InvalidRequest(
                f"the chat template refused {where}: {error}", param=where
            ) from error

    def _try(self, messages: list[Message], tools: list[Message], ask: Ask, generate: bool) -> str:
        own = {
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": generate,
        }
        return self._template.render({**(ask.variables or {}), **self._fixed, **own})

    def _culprit(self, messages: list[Message], tools: list[Message], ask: Ask) -> str:
        """The last message of the shortest conversation that fails, found by halving."""
        good, bad = 0, len(messages) + 1
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                self._try(messages[:middle], tools, ask, False)
                good = middle
            except TEMPLATE_ERRORS:
                bad = middle
        return f"messages[{messages[bad - 1]['at']}]" if bad <= len(messages) else "messages"

    def _encode(self, pieces: Sequence[Piece], mark: str) -> Iterator[int]:
        """Control tokens by name, and everything between them as ordinary text without the private character."""
        for piece in _runs(pieces):
            if isinstance(piece, str):
                yield from self._tokenizer.encode(piece.replace(mark, ""))
            else:
                yield piece

    def _without_thoughts(self, message: Message) -> Message:
        """Drop channel blocks from earlier answers, as Gemma 4's templates do: guarded text hides them from these."""
        if message["role"] != "assistant" or not self._thinks:
            return message
        kept = re.sub(r"<\|channel>.*?(<channel\|>|\Z)", "", message["content"], flags=re.DOTALL)
        return message | {"content": kept.replace("<channel|>", "")}


def _cut(text: str, mark: str) -> str:
    """The text up to the end of the message that is to be continued."""
    end = text.rfind(mark)
    if end < 0:
        raise InvalidRequest(
            "the chat template leaves the last message out: it cannot be continued",
            param="continue_final_message",
        )
    return text[:end]


def _runs(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The same with neighbouring texts joined: they are tokenised in one run."""
    held = ""
    for piece in pieces:
        if isinstance(piece, str):
            held += piece
        else:
            yield held
            yield piece
            held = ""
    yield held


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
    return json.dumps(value, ensure_ascii=ensure_ascii, default=_plain, **options)


def _plain(value: Any) -> Any:
    if not isinstance(value, Written):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return json.loads(str(value))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


FUNCTIONS: Mapping[str, Any] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
