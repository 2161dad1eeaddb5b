"""Token ids to text, piece by piece, for one sequence.

The rule that makes deltas equal the whole: text is the UTF-8 decoding of the joined bytes of the visible pieces, and an
incremental decoder of bytes gives the same characters however the bytes are grouped. A character split over several
byte pieces appears with its last one; bytes that cannot become a character any more turn into U+FFFD, at the latest in
`flush`. Pieces carry their own spaces (U+2581 is already a space in `piece_bytes`), so nothing depends on position.
It knows nothing of stop ids or stop strings.
"""

import codecs
from collections.abc import Iterable

from onechip.chat.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decoding of one sequence: O(1) a token, whatever came before."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The characters these ids complete."""
        piece, hidden = self._tokenizer.piece_bytes, self._hidden
        return self._decoder.decode(b"".join([piece(i) for i in ids if i not in hidden]))

    def flush(self) -> str:
        """At the end: U+FFFD for bytes whose character never came, else nothing."""
        return self._decoder.decode(b"", final=True)


def token_text(raw: bytes) -> str:
    """One token as a string of its own: its text, or `bytes:\\xNN...` (OpenAI's form) when it is no whole character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
