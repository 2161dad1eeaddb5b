"""Keeps turns balanced in a rendered prompt, because published templates do not always.

A prompt is a sequence of control ids and texts. At the point of generation exactly one turn must be open, the model's;
otherwise the model continues something that it has never seen. What is repaired:

- a turn that begins while another is open (an answer whose calls have no results, results followed by a user): the
  open one is closed first, and a call's marker for results that never came goes
- no turn open at the end: the model's is opened

Everything else that breaks the rule is refused. It knows ids only.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from onechip.errors import InvalidRequest

Piece = str | int


@dataclass(frozen=True)
class Turns:
    """The ids that open and close a turn, and that announce a call's result."""

    opens: int
    closes: int
    response: int | None

    def balanced(self, pieces: Iterable[Piece], *, generate: bool) -> list[Piece]:
        """The pieces with every turn closed; with `generate`, ending in the model's open one."""
        made: list[Piece] = []
        role_at = -1  # where the open turn's role is; -1: none is open
        for piece in pieces:
            if piece == self.opens:
                if role_at >= 0:
                    self._close(made)
                role_at = len(made) + 1
            elif piece == self.closes:
                role_at = -1
            if piece != "":
                made.append(piece)
        if not generate or self.opens not in made:  # a template without turns has its reasons
            return made
        if role_at < 0:
            return [*made, self.opens, "model\n"]
        role = made[role_at] if role_at < len(made) else ""
        if not isinstance(role, str) or not role.startswith("model"):
            raise InvalidRequest(
                "the chat template left a turn open that is not the model's: end the conversation with a user or"
                " tool message",
                param="messages",
            )
        return made

    def _close(self, made: list[Piece]) -> None:
        if made[-1] == self.response:
            made.pop()
        made += [self.closes, "\n"]
