"""Text to token ids and back.

Owns the tokenizer of a checkpoint, loaded from its tokenizer.json or converted from its GGUF vocabulary, and the table
of control pieces that the chat dialect counts on. Two rules live here. BOS is never added: who renders a prompt writes
it. And control text that a user typed never becomes a control id: only template literals, encoded with `control=True`,
may produce those. Refuses to know templates, pages and jax.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from onechip.chat.gguf_vocab import SPACE, tokenizer_json
from onechip.checkpoint.base import Checkpoint, TokenizerFiles
from onechip.errors import CheckpointError

# Control pieces by family, at the ids that models were trained with.
GEMMA3_CONTROL: Mapping[str, int] = {
    "<start_of_turn>": 105,
    "<end_of_turn>": 106,
    "<start_of_image>": 255_999,
    "<end_of_image>": 256_000,
}
GEMMA4_CONTROL: Mapping[str, int] = {
    "<|tool>": 46,
    "<tool|>": 47,
    "<|tool_call>": 48,
    "<tool_call|>": 49,
    "<|tool_response>": 50,
    "<tool_response|>": 51,
    '<|"|>': 52,
    "<|think|>": 98,
    "<|channel>": 100,
    "<channel|>": 101,
    "<|turn>": 105,
    "<turn|>": 106,
    "<|image>": 255_999,
    "<|audio>": 256_000,
    "<|image|>": 258_880,
    "<|audio|>": 258_881,
    "<image|>": 258_882,
    "<audio|>": 258_883,
    "<|video|>": 258_884,
}
CONTROL: Mapping[str, Mapping[str, int]] = {"gemma3": GEMMA3_CONTROL, "gemma4": GEMMA4_CONTROL}
EOS_PIECES: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("<eos>", "<end_of_turn>"),
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
}
BOS = "<bos>"
UNKNOWN = "<unk>"

# A vocabulary this large is a Gemma's own and must have every control piece; a test's small one need not.
FULL_VOCABULARY = 262_144

# Pieces that one source calls ordinary and another control; nothing ever means their text.
PLACEHOLDERS = frozenset({"<mask>", "[multimodal]"})
UNUSED = re.compile(r"<unused\d+>")
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A checkpoint's tokenizer. Safe to use from several threads.

    `special_ids` are the control pieces, `eos_ids` those of them that end generation, `vocab_size` the number of ids
    (added tokens included), `source` the file it came from.
    """

    def __init__(self, backend: Backend, source: str, bos_id: int, eos_ids: tuple[int, ...]):
        backend.encode_special_tokens = True  # special pieces in text are spelled out; see `encode`
        self._backend = backend
        self.source = source
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: index for index, token in added.items() if token.special}
        self.special_ids = frozenset(self._special.values())
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._pieces: dict[int, bytes] = {}
        self._lengths = sorted({len(piece) for piece in self._special}, reverse=True)
        self._openers = re.compile(_any_of(piece[0] for piece in self._special if piece))

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """Token ids of `text`, without BOS.

        With `control`, control pieces in it become their ids: for template literals. Without, they are spelled with
        ordinary pieces: for everything that came from a user.
        """
        if not control:
            return self._encode_plain(text)
        ids: list[int] = []
        for part in self.split_controls(text):
            ids.extend(self._encode_plain(part) if isinstance(part, str) else (part,))
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids if text else []

    def split_controls(self, text: str) -> Iterator[str | int]:
        """`text` cut at its control pieces, which come as ids; the longest one at the earliest place wins."""
        done = 0
        for match in self._openers.finditer(text):
            start = match.start()
            piece = self._special_at(text, start) if start >= done else None
            if piece is not None:
                yield text[done:start]
                yield self._special[piece]
                done = start + len(piece)
        yield text[done:]

    def _special_at(self, text: str, start: int) -> str | None:
        pieces = (text[start : start + length] for length in self._lengths)
        return next((piece for piece in pieces if piece in self._special), None)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing.

        The same bytes by the same rule as `chat.detokenize`: a stream's deltas add up to this, broken characters too.
        """
        hidden = self.special_ids if skip_special else frozenset[int]()
        return b"".join(map(self.piece_bytes, (i for i in ids if i not in hidden))).decode(
            errors="replace"
        )

    def piece_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for: of a byte piece that byte, of a special piece its text.

        An id beyond the vocabulary, as padded embedding tables have, stands for nothing. Remembered, because every
        generated token asks.
        """
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self.special_ids:
            return piece.encode()
        byte = BYTE_PIECE.fullmatch(piece)
        return bytes.fromhex(byte[1]) if byte else piece.replace(SPACE, " ").encode()

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is a control piece."""
        return token_id in self.special_ids

    def id_of(self, piece: str) -> int | None:
        """The id of exactly `piece`, None when the vocabulary lacks it; never that of the unknown piece."""
        found = self._backend.token_to_id(piece)
        assert found is None or self._backend.id_to_token(found) == piece
        return found

    @property
    def json(self) -> str:
        """The `tokenizers` document, with all special pieces marked (33 MB for a Gemma; made anew on each call)."""
        return self._backend.to_str()


def load_tokenizer(checkpoint: Checkpoint, cache_dir: Path | None = None) -> Tokenizer | None:
    """The checkpoint's tokenizer; None where it has none, and callers work with ids only.

    One converted from a GGUF vocabulary is kept in `cache_dir` (None: converted each time, some seconds). Raises
    CheckpointError for a file that cannot be used, or whose control pieces have other ids than the model's family.
    """
    files = checkpoint.tokenizer_files()
    if files is None:
        return None
    family = family_of(checkpoint.config)
    control = CONTROL.get(family, {})
    if isinstance(files, TokenizerFiles):
        source = str(files.path)
        backend = _mark_special(_from_file(files.path), control)
    else:
        source = files.source
        forced = control.keys() | PLACEHOLDERS
        backend = _parse(tokenizer_json(files, forced, cache_dir), source)
    _check_control(backend, control, source)
    eos = (backend.token_to_id(piece) for piece in EOS_PIECES.get(family, ("<eos>",)))
    return Tokenizer(
        backend,
        source,
        bos_id=_require(backend, BOS, source),
        eos_ids=tuple(index for index in eos if index is not None),
    )


def family_of(config: Mapping[str, Any]) -> str:
    """ "gemma3" or "gemma4", or whatever else the config's model_type begins with."""
    return str(config.get("model_type", "")).partition("_")[0]


def _any_of(characters: Iterable[str]) -> str:
    """A pattern for one of the characters; of none, a pattern that never matches."""
    found = "".join(re.escape(character) for character in sorted(set(characters)))
    return f"[{found}]" if found else "(?!)"


def _from_file(path: Path) -> Backend:
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; download it again") from error
    return _parse(text, str(path))


def _parse(text: str, source: str) -> Backend:
    try:
        return Backend.from_str(text)
    except Exception as error:  # what tokenizers raises for a bad document is no narrower class
        raise CheckpointError(
            f"{source} holds no usable tokenizer: {error}; download it again"
        ) from error


def _mark_special(backend: Backend, control: Mapping[str, int]) -> Backend:
    """Mark the family's control pieces and the placeholders as special, where tokenizer.json does not."""
    added = backend.get_added_tokens_decoder().values()
    ordinary = [token.content for token in added if not token.special]
    forced = control.keys() | PLACEHOLDERS
    names = [name for name in ordinary if name in forced or UNUSED.fullmatch(name)]
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return backend


def _check_control(backend: Backend, control: Mapping[str, int], source: str) -> None:
    """Raise when a control piece has another id than its family's, or a whole vocabulary lacks it."""
    full = backend.get_vocab_size(with_added_tokens=True) >= FULL_VOCABULARY
    for piece, wanted in control.items():
        found = backend.token_to_id(piece)
        if found != wanted and (full or found is not None):
            raise CheckpointError(
                f"{source}: control piece {piece} has id {found}, the model expects {wanted};"
                " use the tokenizer that belongs to this checkpoint"
            )


def _require(backend: Backend, piece: str, source: str) -> int:
    found = backend.token_to_id(piece)
    if found is None or (found == backend.token_to_id(UNKNOWN) and piece != UNKNOWN):
        raise CheckpointError(
            f"{source} has no piece {piece}; use the tokenizer that belongs to this checkpoint"
        )
    return found
