"""The bytes of every token, read from a tokenizer's document without building the tokenizer.

For who needs to know what tokens spell, but never tokenises: the grammars of the engine process. The document is the
one that `chat.tokenizer` loads, and control pieces are told by the same rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from onechip.chat.gguf_vocab import SPACE, tokenizer_json
from onechip.chat.tokenizer import BYTE_PIECE, CONTROL, PLACEHOLDERS, UNUSED, family_of
from onechip.checkpoint.base import Checkpoint, TokenizerFiles
from onechip.errors import CheckpointError


@dataclass(frozen=True)
class Vocabulary:
    """`pieces[id]` are a token's bytes, of a special one its name; ids without a piece have none."""

    pieces: tuple[bytes, ...]
    special_ids: frozenset[int]


def read_vocabulary(checkpoint: Checkpoint, cache_dir: Path | None = None) -> Vocabulary | None:
    """The checkpoint's vocabulary; None where it has no tokenizer. Raises CheckpointError for a useless file."""
    files = checkpoint.tokenizer_files()
    if files is None:
        return None
    forced = CONTROL.get(family_of(checkpoint.config), {}).keys() | PLACEHOLDERS
    if isinstance(files, TokenizerFiles):
        text, source = files.path.read_bytes(), str(files.path)
    else:
        text, source = tokenizer_json(files, forced, cache_dir).encode(), files.source
    try:
        document = msgspec.json.decode(text)
        return vocabulary_of(document, forced)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source} holds no usable tokenizer: {error!r}") from error


def vocabulary_of(document: Mapping[str, Any], forced: frozenset[str] | set[str]) -> Vocabulary:
    """The vocabulary of a `tokenizers` document; added pieces named in `forced` are special whatever it says."""
    ids: dict[str, int] = document["model"]["vocab"]
    added = {token["content"]: token for token in document["added_tokens"]}
    special = frozenset(
        token["id"]
        for name, token in added.items()
        if token["special"] or name in forced or UNUSED.fullmatch(name)
    )
    names = dict(ids) | {name: token["id"] for name, token in added.items()}
    pieces = [b""] * (max(names.values()) + 1)
    for name, index in names.items():
        pieces[index] = name.encode() if index in special else _spelled(name)
    return Vocabulary(tuple(pieces), special)


def _spelled(name: str) -> bytes:
    byte = BYTE_PIECE.fullmatch(name) if name.startswith("<0x") else None
    return bytes.fromhex(byte[1]) if byte else name.replace(SPACE, " ").encode()
