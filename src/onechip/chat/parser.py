"""The state machine that reads an answer: thought, text and tool calls.

It takes decoded text and the meanings of control tokens, one by one, and appends parts. What it says depends on that
sequence alone, never on how it was grouped. It knows no ids, no stop strings and no HTTP shapes.

    content  --channel-->  label, thought  --channel_end-->  content
    content or thought  --call-->  header  -- call:NAME{ -->  arguments  -->  tail  --call_end-->  where it came from

Rules beside the grammar:
- A thought's label is exactly "thought" and a newline; the newline before its closer is no part of it. A second thought
  is joined to the first by a newline. A closer without an opener turns the content so far into the thought (`Recall`).
- A call is begun when its header is certain; from then on its arguments come out as valid JSON, whatever follows. One
  whose header cannot be read is content, as text. With calls off (tool_choice none, no tools) every call is text.
- Delimiters outside calls are shown as `"`; other control tokens never show.
- Content that is only blanks is held back: beside calls it is nothing.
- Cut off (not ended by a stop id), a call stays as it is: never a closed object that was not.
"""

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onechip.chat.arguments import Arguments
from onechip.chat.controls import Control, PromptEnd
from onechip.chat.parts import (
    THOUGHT_LABEL,
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    Recall,
)
from onechip.chat.schemas import Schema

HEADER = re.compile(r"\s*(?:call\s*:|:)?\s*([\w.-][\w.:-]*)\s*")
NAMED = re.compile(r"\s*call\s*:\s*([\w.-][\w.:-]*)\s*")
NOT_HEADER = re.compile(r"[^\w.:\-\s]")
MAX_HEADER = 512  # characters: longer is no name
TAIL = " \t\r\n,;)]}"  # what may follow a call's last bracket and means nothing


def _unchanged(text: str) -> str:
    return text


def _nothing() -> str:
    return ""


@dataclass(frozen=True)
class Filter:
    """What content passes through on its way out, as stop strings need; `flush` gives what it held back."""

    push: Callable[[str], str] = _unchanged
    flush: Callable[[], str] = _nothing


UNFILTERED = Filter()


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class Parser:
    """Feed with `text` and `control`, end with `end`; `parts` holds what was said since the caller cleared it.

    `tools`: parameter schemas by name; None: not known. `calls` False: calls are text. `completed` counts whole calls.
    """

    def __init__(
        self,
        start: PromptEnd = "no_channel",
        tools: Mapping[str, Schema] | None = None,
        *,
        calls: bool = True,
        content: Filter = UNFILTERED,
        new_id: Callable[[], str] = call_id,
    ):
        self.parts: list[Part] = []
        self.completed = 0
        self._tools: Mapping[str, Schema] = tools or {}
        self._calls = calls
        self._filter = content
        self._new_id = new_id
        self._begun = 0
        self._blank = calls  # whether content is only blanks so far, and held back
        self._blanks: list[str] = []
        self._thoughts = int(start == "open_channel")
        self._thought_said = False
        self._newline = (
            ""  # before more of the thought: held back, because the last one is no part of it
        )
        self._buffer = ""  # a label or a header
        self._arguments: Arguments | None = None
        self._state: Callable[[str], None] = self._think if self._thoughts else self._content
        self._back = self._state  # where a call returns to

    @property
    def thinking(self) -> bool:
        return self._state in (self._label, self._think)

    @property
    def in_call(self) -> bool:
        return self._state in (self._header, self._argue, self._tail, self._call_text)

    @property
    def plain(self) -> bool:
        """Whether text is content and nothing is held: until the next control token it may go past this machine."""
        return self._state == self._content and not self._blank

    def text(self, text: str) -> None:
        if text:
            self._state(text)

    def control(self, control: Control) -> None:
        if self.in_call and control == "quote":
            self._quote_in_call()
            return
        if self.in_call and control != "other":
            self._end_call(complete=True)
        match control:
            case "channel":
                self._open_thought()
            case "channel_end":
                self._close_thought()
            case "call":
                self._open_call()
            case "quote":
                self.text('"')
            case _:
                pass

    def end(self, *, stopped: bool) -> None:
        """Nothing more comes. `stopped`: the model ended it (a stop id), so what is open counts as complete."""
        if self.in_call:
            self._end_call(complete=stopped)
        if self._state == self._label:
            self._end_label()
        if self._state == self._think and self._newline and not stopped:
            self.parts.append(Reasoning("\n"))
        self._show(self._filter.flush())
        if not self._begun:
            self._show_blanks()

    # Content

    def _content(self, text: str) -> None:
        self._show(self._filter.push(text))

    def _show(self, text: str) -> None:
        if self._blank and not text.strip():
            self._blanks.append(text)
        elif text:
            self._show_blanks()
            self._blank = False
            self.parts.append(Content(text))

    def _show_blanks(self) -> None:
        self.parts += [Content(blank) for blank in self._blanks if blank]
        self._blanks = []

    # Thought

    def _open_thought(self) -> None:
        if self._state == self._content:
            self._show(self._filter.flush())
            self._newline = "\n" if self._thought_said else ""
            self._thoughts += 1
        elif self._state == self._label:
            self._end_label()
        self._state = self._label

    def _close_thought(self) -> None:
        if self._state == self._content:
            self._recall()
            return
        if self._state == self._label:
            self._end_label()
        self._newline = ""
        self._state = self._content

    def _recall(self) -> None:
        """A closer without an opener; after a thought or a call it means nothing."""
        if self._thoughts or self._begun:
            return
        self._show(self._filter.flush())
        self.parts.append(Recall())
        self._thoughts, self._thought_said = 1, True
        self._blank, self._blanks = self._calls, []

    def _label(self, text: str) -> None:
        self._buffer += text
        if THOUGHT_LABEL.startswith(self._buffer) and self._buffer != THOUGHT_LABEL:
            return
        self._buffer = self._buffer.removeprefix(THOUGHT_LABEL)
        self._end_label()

    def _end_label(self) -> None:
        """What is no label is thought."""
        text, self._buffer = self._buffer, ""
        self._state = self._think
        self.text(text)

    def _think(self, text: str) -> None:
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        shown = text.removesuffix("\n")
        if shown:
            self._thought_said = True
            self.parts.append(Reasoning(shown))

    # Calls

    def _open_call(self) -> None:
        if not self._calls:
            return
        if self._state == self._label:
            self._end_label()
        if self._state == self._content:
            self._show(self._filter.flush())
        self._back, self._state = self._state, self._header

    def _header(self, text: str) -> None:
        found = NOT_HEADER.search(text)
        end = found.start() if found else len(text)
        self._buffer += text[:end]
        if len(self._buffer) > MAX_HEADER:
            self._give_up(text[end:])
        elif found is not None:
            name = self._name(HEADER) if found.group() in "{(" else None
            if name is None:
                self._give_up(text[end:])
            else:
                self._begin(name, found.group())
                self.text(text[end + 1 :])

    def _name(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.fullmatch(self._buffer)
        name = match[1] if match else ""
        if name not in self._tools:
            name = name.rstrip(":")
            name = "" if name == "call" else name
        return name or None

    def _begin(self, name: str, bracket: str) -> None:
        self._buffer = ""
        self._arguments = Arguments(self._tools.get(name, {}), round_bracket=bracket == "(")
        self.parts.append(CallStart(self._begun, self._new_id(), name))
        self._begun += 1
        self._state = self._argue
        self._send()

    def _argue(self, text: str) -> None:
        assert self._arguments is not None
        rest = self._arguments.text(text)
        self._send()
        self.text(rest)

    def _send(self) -> None:
        assert self._arguments is not None
        made = self._arguments.take()
        if made:
            self.parts.append(CallArguments(self._begun - 1, made))
        if self._arguments.done:
            self.completed += 1
            self._state = self._tail

    def _quote_in_call(self) -> None:
        if self._state == self._argue:
            assert self._arguments is not None
            self._arguments.delimiter()
            self._send()
        elif self._state == self._header:
            self._give_up('"')
        else:
            self.text('"')

    def _tail(self, text: str) -> None:
        rest = text.lstrip(TAIL)
        if rest:
            self._state = self._call_text
            self.text(rest)

    def _call_text(self, text: str) -> None:
        self._content(text)

    def _give_up(self, text: str) -> None:
        """The header is none: the call is text."""
        text, self._buffer = self._buffer + text, ""
        self._state = self._call_text
        self.text(text)

    def _end_call(self, *, complete: bool) -> None:
        if self._state == self._header:
            name = self._name(NAMED)
            if complete and name in self._tools:
                assert name is not None
                self._begin(name, "{")
            else:
                self._give_up("")
        if self._state == self._argue and complete:
            assert self._arguments is not None
            self._arguments.close()
            self._send()
        self._show(self._filter.flush())
        self._state = self._back
