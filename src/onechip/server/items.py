"""An answer as a row of items - thoughts, texts, calls - in the order in which the model made them.

Anthropic calls them content blocks and OpenAI's Responses output items; both stream them as start, more, end. It turns
the parts of `chat.parts` into these changes, once for both dialects, streamed or whole. It knows no JSON.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from onechip.chat.parts import (
    THOUGHT_LABEL,
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    Recall,
)

Kind = Literal["thought", "text", "call"]


@dataclass(eq=False)
class Item:
    """One item; a call's text is its arguments as JSON. `ended`: nothing more will come, and it was not cut off."""

    kind: Kind
    index: int
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list[str])
    ended: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class Change:
    what: Literal["start", "more", "end"]
    item: Item
    text: str = ""


class Items:
    """The items so far. Feed parts with `add`, then `end`."""

    def __init__(self) -> None:
        self.all: list[Item] = []

    def add(self, parts: Iterable[Part]) -> Iterator[Change]:
        """What each part changes. A Recall changes nothing: what a stream has said is said."""
        for part in parts:
            match part:
                case Reasoning(text):
                    yield from self._more("thought", text)
                case Content(text):
                    yield from self._more("text", text)
                case CallStart(_, key, name):
                    yield from self._start(Item("call", len(self.all), key, name))
                case CallArguments(_, text):
                    yield from self._more("call", text)
                case Recall():
                    pass

    def end(self, *, cut: bool) -> Iterator[Change]:
        """The end of the answer; `cut`: at the token limit, so that the last item may be unfinished."""
        if self.all:
            last = self.all[-1]
            last.ended = not cut
            yield Change("end", last)

    def _more(self, kind: Kind, text: str) -> Iterator[Change]:
        if not self.all or self.all[-1].kind != kind:
            yield from self._start(Item(kind, len(self.all)))
        item = self.all[-1]
        item.pieces.append(text)
        yield Change("more", item, text)

    def _start(self, item: Item) -> Iterator[Change]:
        yield from self.end(cut=False)
        self.all.append(item)
        yield Change("start", item)


def whole_items(parts: Iterable[Part], *, cut: bool) -> list[Item]:
    """The items of a whole answer: text that turned out to be a thought (Recall) is one."""
    items = Items()
    for part in parts:
        if isinstance(part, Recall):
            items.all = _recalled(items.all)
        else:
            list(items.add((part,)))
    list(items.end(cut=cut))
    return items.all


def _recalled(said: list[Item]) -> list[Item]:
    """The texts so far as one thought in front, without its label and the newline before the closer."""
    text = "".join(item.text for item in said if item.kind == "text")
    thought = text.removeprefix(THOUGHT_LABEL).removesuffix("\n")
    kept = [item for item in said if item.kind != "text"]
    if thought:
        kept.insert(0, Item("thought", 0, pieces=[thought], ended=True))
    for index, item in enumerate(kept):
        item.index = index
    return kept
