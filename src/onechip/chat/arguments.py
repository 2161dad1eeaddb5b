r"""One call's arguments, from Gemma's syntax to JSON, piece by piece.

It owns the inside of `{...}`: text and string delimiters go in, JSON text comes out as soon as it can no longer change.
The JSON is complete and valid whatever came in, once `close` was called. It knows no token ids and no call headers.

    { KEY : VALUE , KEY : VALUE }      VALUE = <|"|>TEXT<|"|> | literal | [ VALUE , ... ] | { ... }

What real models write beside this is read as they mean it, and no letter of it is lost:
- keys or strings in "", '' or ``; a quote ends its string only where a separator follows
- `=` for `:`, `(` for the outer `{`, doubled braces, trailing and missing commas, brackets that nobody opened or closed
- unquoted words, which become strings; a key without a value, which gets null

The mode says what is expected next; each handler takes text from a place and returns how far it has read. Delimited and
quoted text is taken in whole runs, so time is linear in the text.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from onechip.chat.schemas import (
    Node,
    Schema,
    Types,
    bare,
    delimited,
    escaped,
    wants_number,
)

MAX_DEPTH = 100  # deeper brackets are text: most JSON readers give up not far beyond
QUOTES = "\"'`"
BARE_END = re.compile(r"[,}\])]")
KEY_END = re.compile(r"[:=,}\])]")
QUOTED_END = {quote: re.compile(rf"[\\{quote}]") for quote in QUOTES}
ESCAPES = frozenset('"\\/bfnrt')  # JSON's, besides \uXXXX
HEX = frozenset("0123456789abcdefABCDEF")


@dataclass
class Level:
    """An open bracket. `object`: else an array; `empty`: nothing written in it yet."""

    object: bool
    node: Node
    empty: bool = True


class Arguments:
    """Feed with `text` and `delimiter`, end with `close`; `take` gives the JSON made since. `done`: the outer bracket
    has closed, what follows is no part of it. `round`: it was opened by `(`.
    """

    def __init__(self, schema: Schema, *, round_bracket: bool = False):
        self.done = False
        self._round = round_bracket
        self._types = Types(schema)
        self._out = ["{"]
        self._levels = [Level(True, self._types.top)]
        self._arrays = 0
        self._node: Node = ()  # of the value that comes next
        self._pending = False  # a key waits for its value
        self._held: list[str] = []  # a bare word, or a string that must be complete, so far
        self._gap: list[str] = []  # blanks after a quote that may have ended its string
        self._escape = ""
        self._quote = ""
        self._holding = False
        self._in_key = False
        self._mode: Callable[[str, int], int] = self._key

    def text(self, text: str) -> str:
        """Take text; what is returned came after the end."""
        at = 0
        while at < len(text):
            if self.done:
                return text[at:]
            at = self._mode(text, at)
        return ""

    def delimiter(self) -> None:
        """Take a string delimiter."""
        mode = self._mode
        if mode == self._delimited:
            self._end_string()
        elif mode in (self._quoted, self._escaped):
            self._flush_escape()
            self._put('\\"')
        elif mode == self._quote_end:
            self._end_string()
            self.delimiter()
        elif mode in (self._bare, self._bare_key):
            self._end_word()
            self.delimiter()
        else:
            if mode == self._after:
                self._next()
            self._begin_string(self._delimited, key=self._mode == self._key)

    def close(self) -> None:
        """The call has ended: complete what is open."""
        if self._mode in (self._delimited, self._quoted, self._quote_end, self._escaped):
            self._flush_escape()
            self._end_string()
        elif self._mode in (self._bare, self._bare_key):
            self._end_word()
        while self._levels:
            self._pop()

    def take(self) -> str:
        """The JSON made since the last time."""
        made, self._out = "".join(self._out), []
        return made

    # Structure

    def _key(self, text: str, at: int) -> int:
        char = text[at]
        if char.isspace() or char in ",{(":  # a bracket here doubles the one before
            return at + 1
        if self._closes(char):
            return self._close_bracket(char, at)
        if char in QUOTES:
            return self._begin_quoted(char, at, key=True)
        self._mode = self._bare_key
        return at

    def _bare_key(self, text: str, at: int) -> int:
        found = KEY_END.search(text, at)
        if found is None:
            self._held.append(text[at:])
            return len(text)
        char, end = found.group(), found.start()
        if char in ":=," or self._closes(char):
            self._held.append(text[at:end])
            self._end_word()
            return end
        self._held.append(text[at : end + 1])
        return end + 1

    def _separator(self, text: str, at: int) -> int:
        char = text[at]
        if char.isspace():
            return at + 1
        self._mode = self._value
        return at + 1 if char in ":=" else at

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char.isspace():
            return at + 1
        if char == ",":
            self._fill()
            self._next()
            return at + 1
        if self._closes(char):
            return self._close_bracket(char, at)
        if char in "{[" and len(self._levels) < MAX_DEPTH:
            self._open(char)
            return at + 1
        if char in QUOTES:
            return self._begin_quoted(char, at, key=False)
        self._mode = self._bare
        return at

    def _bare(self, text: str, at: int) -> int:
        found = BARE_END.search(text, at)
        if found is None:
            self._held.append(text[at:])
            return len(text)
        end = found.start()
        if found.group() == "," or self._closes(found.group()):
            self._held.append(text[at:end])
            self._end_word()
            return end
        self._held.append(text[at : end + 1])
        return end + 1

    def _after(self, text: str, at: int) -> int:
        char = text[at]
        if char.isspace():
            return at + 1
        if self._closes(char):
            return self._close_bracket(char, at)
        self._next()
        return at + 1 if char == "," else at

    def _closes(self, char: str) -> bool:
        """Whether this is a bracket that ends something: any other is text."""
        if char == ")":
            return self._round and len(self._levels) == 1
        return char == "}" or (char == "]" and self._arrays > 0)

    def _close_bracket(self, char: str, at: int) -> int:
        """End the innermost bracket of this kind, and what is open inside it."""
        wants_object = char != "]"
        while self._levels[-1].object != wants_object:
            self._pop()
        self._pop()
        return at + 1

    def _open(self, char: str) -> None:
        self._item()
        self._out.append(char)
        self._levels.append(Level(char == "{", self._node))
        self._arrays += char == "["
        self._next()

    def _pop(self) -> None:
        self._fill()
        level = self._levels.pop()
        self._arrays -= not level.object
        self._out.append("}" if level.object else "]")
        self._mode = self._after
        self.done = not self._levels

    def _fill(self) -> None:
        """A key that got no value has null."""
        if self._pending:
            self._item()
            self._out.append("null")

    def _next(self) -> None:
        """Expect the innermost bracket's next key or item."""
        level = self._levels[-1]
        self._mode = self._key if level.object else self._value
        if not level.object:
            self._node = self._types.items(level.node)

    def _item(self) -> None:
        """Before a value is written: the comma between an array's items, or nothing after a key."""
        level = self._levels[-1]
        if self._pending:
            self._pending = False
        elif not level.empty:
            self._out.append(", ")
        level.empty = False

    # Words and strings

    def _end_word(self) -> None:
        """A bare key or value is complete."""
        word, self._held = "".join(self._held).strip(), []
        if self._mode == self._bare_key:
            self._name(escaped(word))
            return
        self._item()
        self._out.append(bare(word, self._node))
        self._mode = self._after

    def _name(self, key: str) -> None:
        """A key is complete; `key` is escaped for JSON."""
        level = self._levels[-1]
        self._out.append(f'"{key}": ' if level.empty else f', "{key}": ')
        level.empty = False
        self._node = self._types.member(level.node, json.loads(f'"{key}"'))
        self._pending = True
        self._mode = self._separator

    def _begin_quoted(self, quote: str, at: int, *, key: bool) -> int:
        self._quote = quote
        self._begin_string(self._quoted, key=key)
        return at + 1

    def _begin_string(self, mode: Callable[[str, int], int], *, key: bool) -> None:
        self._in_key = key
        self._holding = key or wants_number(self._node)
        if not key:
            self._item()
        if not self._holding:
            self._out.append('"')
        self._mode = mode

    def _put(self, fragment: str) -> None:
        """More of a string, escaped for JSON."""
        (self._held if self._holding else self._out).append(fragment)

    def _end_string(self) -> None:
        held, self._held, self._gap = "".join(self._held), [], []
        if self._in_key:
            self._name(held)
            return
        self._out.append(delimited(held, self._node) if self._holding else '"')
        self._mode = self._after

    def _delimited(self, text: str, at: int) -> int:
        self._put(escaped(text[at:] if at else text))
        return len(text)

    def _quoted(self, text: str, at: int) -> int:
        found = QUOTED_END[self._quote].search(text, at)
        end = found.start() if found else len(text)
        self._put(escaped(text[at:end]))
        if found is None:
            return end
        if found.group() == "\\":
            self._escape, self._mode = "\\", self._escaped
        else:
            self._mode = self._quote_end
        return end + 1

    def _escaped(self, text: str, at: int) -> int:
        r"""After a backslash: `\n` and its like, `\uXXXX`, the own quote; anything else is a backslash and itself."""
        char = text[at]
        if self._escape == "\\" and char in ESCAPES | {self._quote}:
            self._put(escaped(char) if char in "'`" else f"\\{char}")
            self._escape, self._mode = "", self._quoted
            return at + 1
        if (self._escape == "\\" and char == "u") or (len(self._escape) > 1 and char in HEX):
            self._escape += char
            if len(self._escape) == 6:
                self._put(self._escape)
                self._escape, self._mode = "", self._quoted
            return at + 1
        self._flush_escape()
        return at

    def _flush_escape(self) -> None:
        """An escape that never was one is text."""
        if self._mode == self._escaped:
            self._put(escaped(self._escape))
            self._escape, self._mode = "", self._quoted

    def _quote_end(self, text: str, at: int) -> int:
        """A quote ended its string if a separator follows; else it was part of it."""
        char = text[at]
        if char.isspace():
            self._gap.append(char)
            return at + 1
        ends = ":=,}" if self._in_key else ",}])"
        if char in ends and (char not in "])" or self._closes(char)):
            self._end_string()
            return at
        self._put(escaped(self._quote + "".join(self._gap)))
        self._gap, self._mode = [], self._quoted
        return at
