"""What the terminal shows: answers as they come, thoughts dimmed, news and errors apart from both.

Owns styles and what may reach a terminal at all: control characters in a model's text are dropped, since an escape
sequence could rewrite what was shown before. Text goes to stdout, everything about it to stderr where stdout is a pipe.
"""

import sys
from dataclasses import dataclass
from typing import TextIO

# C0 and C1 without tab and newline, and the marks that turn the direction of text.
UNSAFE = dict.fromkeys(
    (*range(9), *range(11, 32), *range(127, 160), *range(8234, 8239), *range(8294, 8298))
)
DIM, BOLD, RED, RESET = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"


def safe(text: str) -> str:
    """The text without what could steer a terminal."""
    return text.translate(UNSAFE)


@dataclass
class Screen:
    """Where an answer goes. `color`: the terminal may be styled. `quiet`: only the answer itself is wanted (a pipe)."""

    out: TextIO
    color: bool
    quiet: bool
    _mode: str = ""
    _column: int = 0

    def thought(self, text: str) -> None:
        if self.quiet:
            return
        if self._mode != "thought":
            self._turn("thought", DIM)
        self._write(text)

    def text(self, text: str) -> None:
        if self._mode != "text":
            self._turn("text", "")
        self._write(text)

    def end(self) -> None:
        """Close what is open: styles, and the line."""
        self._style(RESET if self._mode == "thought" else "")
        if self._column and self._mode:
            self.out.write("\n")
        self.out.flush()
        self._mode, self._column = "", 0

    def note(self, text: str) -> None:
        """A line about the conversation; not part of it."""
        if not self.quiet:
            self._style(DIM)
            self.out.write(safe(text))
            self._style(RESET)
            self.out.write("\n")
            self.out.flush()

    def error(self, text: str) -> None:
        self.end()
        line = " ".join(safe(text).split())
        if self.quiet:
            print(f"onechip: error: {line}", file=sys.stderr, flush=True)
            return
        self._style(RED)
        self.out.write(line)
        self._style(RESET)
        self.out.write("\n")
        self.out.flush()

    def _turn(self, mode: str, style: str) -> None:
        """Thought and text each begin on a line of their own."""
        if self._mode:
            self._style(RESET)
            self.out.write("\n\n" if self._column else "\n")
        self._mode, self._column = mode, 0
        self._style(style)

    def _style(self, code: str) -> None:
        if self.color and code:
            self.out.write(code)

    def _write(self, text: str) -> None:
        clean = safe(text)
        self.out.write(clean)
        self.out.flush()
        self._column = len(clean.rpartition("\n")[2]) + (0 if "\n" in clean else self._column)
