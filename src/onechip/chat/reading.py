"""From token ids to parts: the detokeniser and the state machine, driven together for one choice.

A control token ends the characters before it: bytes that were to become one character turn into U+FFFD there, so a
field never borrows bytes from another. It knows no stop strings; `output` does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onechip.chat.controls import Control, PromptEnd
from onechip.chat.detokenize import Detokenizer
from onechip.chat.parser import Filter, Parser
from onechip.chat.parts import Part, Recall, merged
from onechip.chat.schemas import Schema
from onechip.chat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reading:
    """How the answers to one prompt are read. `tools`: parameter schemas by name, None when calls are to be text.

    `parallel`: else the first call ends the answer.
    """

    controls: Mapping[int, Control]
    start: PromptEnd = "no_channel"
    tools: Mapping[str, Schema] | None = None
    parallel: bool = True


class Reader:
    """Feed ids with `push`, end with `end`; `take` gives the parts made since."""

    def __init__(
        self, reading: Reading, tokenizer: Tokenizer, content: Filter, *, skip_special: bool
    ):
        self.reasoning_tokens = 0
        self._tokens = 0
        self._reading = reading
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._parser = Parser(
            reading.start, reading.tools, calls=reading.tools is not None, content=content
        )

    def uniform(self, ids: Sequence[int]) -> bool:
        """Whether these ids are text of one kind, which may be pushed together."""
        return self._reading.controls.keys().isdisjoint(ids)

    def plain(self, ids: Sequence[int]) -> str | None:
        """The text of ids that are nothing but more content, past the machine; None where they may be more. Most tokens
        of most answers go this way.
        """
        if not self._parser.plain or not self.uniform(ids):
            return None
        self._tokens += len(ids)
        return self._detokenizer.push(ids)

    def push(self, ids: Sequence[int]) -> None:
        """Take one id, or several that are `uniform`."""
        parser, before = self._parser, self._parser.thinking
        said = len(parser.parts)
        control = self._reading.controls.get(ids[0]) if ids else None
        if control is None:
            parser.text(self._detokenizer.push(ids))
        else:
            parser.text(self._detokenizer.flush())
            parser.control(control)
        self._tokens += len(ids)
        if before or parser.thinking:
            self.reasoning_tokens += len(ids)
        elif any(isinstance(part, Recall) for part in parser.parts[said:]):
            self.reasoning_tokens = self._tokens

    def end(self, *, stopped: bool) -> None:
        self._parser.text(self._detokenizer.flush())
        self._parser.end(stopped=stopped)

    @property
    def called(self) -> bool:
        """Whether a whole call has been made."""
        return self._parser.completed > 0

    @property
    def full(self) -> bool:
        """Whether the one call that was allowed has been made."""
        return not self._reading.parallel and self.called and not self._parser.in_call

    def take(self) -> tuple[Part, ...]:
        parts, self._parser.parts = self._parser.parts, []
        return merged(parts)
