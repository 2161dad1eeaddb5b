"""The vocabulary read from a document is the loaded tokenizer's: the same bytes and the same control tokens."""

import json
from pathlib import Path

import pytest
from tests import grammar_walk as walk
from tests.dialect_tokenizer import FIRST_BYTE, vocabulary
from tests.tiny_tokenizer import document, document_of

from onechip.chat.tokenizer import Tokenizer, load_tokenizer
from onechip.chat.vocabulary import Vocabulary, read_vocabulary
from onechip.checkpoint.base import TokenizerFiles
from onechip.checkpoint.source import default_cache_dir, open_checkpoint
from onechip.errors import CheckpointError


class Files:
    """A checkpoint that is a tokenizer.json and a model type."""

    def __init__(self, path: Path, model_type: str):
        self.config = {"model_type": model_type}
        self._path = path

    def tokenizer_files(self) -> TokenizerFiles:
        return TokenizerFiles(self._path, None)


def check_equal(known: Vocabulary, tokenizer: Tokenizer) -> None:
    assert known.special_ids == tokenizer.special_ids
    assert len(known.pieces) == tokenizer.vocab_size
    for index, piece in enumerate(known.pieces):
        assert piece == tokenizer.piece_bytes(index), index


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("gemma4", json.dumps(walk.document())),
        ("gemma4", json.dumps(walk.document()).replace('"special": true', '"special": false')),
        ("other", json.dumps(document_of(vocabulary(), FIRST_BYTE))),
        ("other", json.dumps(document("gemma3"))),
    ],
)
def test_a_document_gives_what_its_tokenizer_has(tmp_path: Path, family: str, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    checkpoint = Files(tmp_path / "tokenizer.json", family)
    tokenizer = load_tokenizer(checkpoint)  # type: ignore[arg-type]
    known = read_vocabulary(checkpoint)  # type: ignore[arg-type]
    assert tokenizer is not None and known is not None
    check_equal(known, tokenizer)


@pytest.mark.demo
def test_a_gguf_vocabulary_gives_what_its_tokenizer_has() -> None:
    checkpoint = open_checkpoint("demo")
    tokenizer = load_tokenizer(checkpoint, default_cache_dir())
    known = read_vocabulary(checkpoint, default_cache_dir())
    assert tokenizer is not None and known is not None
    check_equal(known, tokenizer)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model": {}}', '{"model": {"vocab": 3}, "added_tokens": []}']
)
def test_a_useless_document_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="usable tokenizer"):
        read_vocabulary(Files(tmp_path / "tokenizer.json", "gemma4"))  # type: ignore[arg-type]
