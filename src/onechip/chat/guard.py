"""Private characters in text that came from a client, so that no control token can form in it or out of it.

It knows the spellings of control tokens and nothing of templates; `template` tells how it is used.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

Message = dict[str, Any]

PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True)
class Marks:
    """Private characters: `guard` in texts, `cut` at the end of a message to continue, `spot` round a place's
    number.
    """

    guard: str
    cut: str
    spot: str


class Guard:
    """Keeps control tokens from forming in, or out of, message text. `controls`: their spellings."""

    def __init__(self, controls: Sequence[str]):
        firsts = re.escape("".join(sorted({control[0] for control in controls})))
        lasts = re.escape("".join(sorted({control[-1] for control in controls})))
        self._first = re.compile(f"[{firsts}]")
        self._last = re.compile(f"[{lasts}]")
        self._joined = "\n".join(controls)

    def apply(self, messages: list[Message], mark: str) -> list[Message]:
        """Guarded copies; a message's role is no text of its author, and templates compare it."""
        return [
            self._value(message, mark) | ({"role": message["role"]} if "role" in message else {})
            for message in messages
        ]

    def _value(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self.string(value, mark)
        if isinstance(value, Mapping):
            return {
                self.string(key, mark, name=True): self._value(item, mark)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._value(item, mark) for item in value]
        return value

    def string(self, text: str, mark: str, *, name: bool = False) -> str:
        """Untouched unless it could take part in a control token: most strings are compared, not only printed."""
        inside = text.strip()
        carried = not name and inside in self._joined
        if inside and (carried or self._last.search(inside)):
            head = text[: len(text) - len(text.lstrip())]
            text = head + mark + text[len(head) :]
        return self._first.sub(lambda match: match.group() + mark, text)


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


def unused(source: str, values: list[Any]) -> Marks:
    """Private characters of which neither the template nor the values have any."""
    used = set(source).union(*(set(text) for text in _strings(values)))
    return Marks(*islice((chr(code) for code in PRIVATE_USE if chr(code) not in used), 3))
