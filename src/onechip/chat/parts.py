"""What the state machine says, in order, and its sum.

A stream sends parts as they come; a whole answer is their sum. Both are made from the same parts, so they agree. One
part cannot be streamed: `Recall` (see below). It knows no tokens and no HTTP shapes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Call:
    """One call in full. `arguments` is JSON text; it is cut short where generation was."""

    id: str
    name: str
    arguments: str


class Gathered:
    """The sum of parts, which may come in any grouping."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []

    @property
    def content(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._thoughts)

    @property
    def calls(self) -> list[Call]:
        return [Call(start.id, start.name, "".join(texts)) for start, texts in self._calls]

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case Content(text):
                    self._texts.append(text)
                case Reasoning(text):
                    self._thoughts.append(text)
                case CallStart():
                    self._calls.append((part, []))
                case CallArguments(index, text):
                    self._calls[index][1].append(text)
                case Recall():
                    self._thoughts.append(_thought(self.content))
                    self._texts.clear()


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
