"""What the state machine says, in order, and its sum.

A stream sends parts as they come; a whole answer is their sum. Both are made from the same parts, so they agree. One
part cannot be streamed: `Recall` (see below). It knows no tokens and no HTTP shapes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

THOUGHT_LABEL = "thought\n"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the visible answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. Its arguments follow, before any other call's."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Recall:
    """A thought ended that had no beginning: the content so far was reasoning.

    A stream has sent it as content and leaves it there; a whole answer moves it.
    """


Part = Reasoning | Content | CallStart | CallArguments | Recall


@dataclass
class Call:
    """One call in full. `arguments` is JSON text; it is cut short where generation was."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Gathered:
    """The sum of parts. `parts` may come in any grouping."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list[Call])
    _texts: list[str] = field(default_factory=list[str])
    _thoughts: list[str] = field(default_factory=list[str])
    _arguments: list[list[str]] = field(default_factory=list[list[str]])

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case Content(text):
                    self._texts.append(text)
                case Reasoning(text):
                    self._thoughts.append(text)
                case CallStart(_, key, name):
                    self.calls.append(Call(key, name))
                    self._arguments.append([])
                case CallArguments(index, text):
                    self._arguments[index].append(text)
                case Recall():
                    self._thoughts.append(_thought("".join(self._texts)))
                    self._texts.clear()

    def done(self) -> "Gathered":
        """Join what was added; call once, at the end."""
        self.content, self.reasoning = "".join(self._texts), "".join(self._thoughts)
        for call, fragments in zip(self.calls, self._arguments, strict=True):
            call.arguments = "".join(fragments)
        return self


def _thought(text: str) -> str:
    """Text that turned out to be a thought: without its label and the newline before the closer."""
    return text.removeprefix(THOUGHT_LABEL).removesuffix("\n")


def merged(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The same with neighbours of one kind joined, and nothing empty."""
    found: list[Part] = []
    runs: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallStart | Recall):
            found.append(part)
            runs.append([])
        elif found and _same(found[-1], part):
            runs[-1].append(part.text)
        elif part.text:
            found.append(part)
            runs.append([part.text])
    return tuple(_with(part, texts) for part, texts in zip(found, runs, strict=True))


def _same(one: Part, other: Part) -> bool:
    index: Any = getattr(one, "index", None)
    return type(one) is type(other) and index == getattr(other, "index", None)


def _with(part: Part, texts: Sequence[str]) -> Part:
    match part:
        case Reasoning():
            return Reasoning("".join(texts))
        case Content():
            return Content("".join(texts))
        case CallArguments(index):
            return CallArguments(index, "".join(texts))
        case _:
            return part
