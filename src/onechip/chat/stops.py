"""Stop strings in a stream of text: finds the first, and lets through everything that cannot be part of one.

An Aho-Corasick automaton over characters. After each character its depth is the length of the longest suffix that
begins some stop string: exactly that much is held back, no more. The match that ends first wins, and of those that end
together the longest; so the result is the same for every way the text is cut into pieces. It knows no tokens.
"""

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Feed text with `push`; once `matched` is set, the stream has ended and nothing more may be pushed."""

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self.matched: str | None = None
        self._include = include
        self._held = ""
        self._state = 0
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fail = [0]
        self._hit: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()

    def push(self, text: str) -> str:
        """The text that is now certain to be visible; up to the stop string (or its end, if included) on a match."""
        assert self.matched is None
        text_before = len(self._held)
        buffer = self._held + text
        for index, char in enumerate(text):
            self._state = self._step(self._state, char)
            hit = self._hit[self._state]
            if hit is not None:
                self.matched, self._held = hit, ""
                end = text_before + index + 1
                return buffer[: end if self._include else end - len(hit)]
        visible = len(buffer) - self._depth[self._state]
        self._held = buffer[visible:]
        return buffer[:visible]

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._fail.append(0)
                self._hit.append(None)
            state = self._next[state][char]
        self._hit[state] = stop

    def _link(self) -> None:
        """Breadth first: where to go on when a character does not fit, and which stop ends at a node's suffix."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], char)
                if self._hit[child] is None:
                    self._hit[child] = self._hit[self._fail[child]]
                queue.append(child)
