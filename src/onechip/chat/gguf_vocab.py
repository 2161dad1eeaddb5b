"""A GGUF file's vocabulary as a `tokenizers` JSON document.

    1. Pieces: user-defined ones are stored with real spaces; the model's own mark is U+2581.
    2. Merges: taken from the file ("gemma4"), or derived from the scores ("llama"): a piece can be made of any two
       pieces that spell it, and better pieces are made first. For Gemma 3 this gives back the published 514,906
       merges, in their order.
    3. Added tokens: control pieces are special, user-defined ones are matched whole but are ordinary text.
    4. The document is cached under the vocabulary's hash, with its own hash in front: conversion takes seconds.

Refuses to know what control pieces mean; the caller says which are special whatever the file claims.
"""

import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from onechip.checkpoint.base import GgufVocabulary
from onechip.errors import CheckpointError

logger = logging.getLogger(__name__)

SPACE = "\u2581"  # how a piece spells a space
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # llama.cpp's token types that matter here
CACHE_FORMAT = "v2"  # part of a cached file's name: raise it when the conversion changes
DIGEST_CHARS = 64


def tokenizer_json(
    vocabulary: GgufVocabulary, forced_special: Collection[str], cache_dir: Path | None
) -> str:
    """The `tokenizers` document for `vocabulary`; pieces in `forced_special` become special tokens.

    Kept in `cache_dir` unless that is None. Raises CheckpointError for a vocabulary that cannot be converted.
    """
    key = hashlib.sha256(f"{vocabulary.digest} {sorted(forced_special)}".encode()).hexdigest()
    path = cache_dir and cache_dir / f"tokenizer-{key[:32]}-{CACHE_FORMAT}.json"
    text = path and _read_cache(path)
    if text:
        return text
    text = json.dumps(_document(vocabulary, forced_special), ensure_ascii=False)
    if path:
        _write_cache(path, text)
    return text


def _read_cache(path: Path) -> str | None:
    """The cached document, or None: where there is none, or where it is not what was written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("cannot read the cached tokenizer %s (%s); converting again", path, error)
        return None
    body = data[DIGEST_CHARS + 1 :]
    if data[:DIGEST_CHARS] != hashlib.sha256(body).hexdigest().encode():
        logger.warning("the cached tokenizer %s is damaged; converting again", path)
        return None
    return body.decode()


def _write_cache(path: Path, text: str) -> None:
    """Write under a name of our own, then rename: a reader sees a whole file or none."""
    body = text.encode()
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        partial.replace(path)
    except OSError as error:
        logger.warning(
            "cannot cache the tokenizer in %s (%s); it is converted anew each time", path, error
        )


def _document(vocabulary: GgufVocabulary, forced_special: Collection[str]) -> dict[str, Any]:
    pieces = _pieces(vocabulary)
    space, joined = {"String": SPACE}, {"String": " "}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(pieces, vocabulary.types, forced_special)),
        "normalizer": {"type": "Replace", "pattern": joined, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": space, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": _unknown_piece(vocabulary, pieces),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": _ids(vocabulary, pieces),
            "merges": _spelled(_merges(vocabulary, pieces)),
        },
    }


def _error(vocabulary: GgufVocabulary, problem: str) -> CheckpointError:
    return CheckpointError(f"{vocabulary.source}: {problem}; convert the model again")


def _pieces(vocabulary: GgufVocabulary) -> list[str]:
    if len(vocabulary.types) != len(vocabulary.pieces):
        raise _error(
            vocabulary, f"{len(vocabulary.pieces)} pieces, but {len(vocabulary.types)} token types"
        )
    return [
        piece.replace(" ", SPACE) if kind == USER_DEFINED else piece
        for piece, kind in zip(vocabulary.pieces, vocabulary.types, strict=True)
    ]


def _ids(vocabulary: GgufVocabulary, pieces: Sequence[str]) -> dict[str, int]:
    ids = {piece: index for index, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        twice = next(piece for index, piece in enumerate(pieces) if ids[piece] != index)
        raise _error(vocabulary, f"the piece {twice!r} occurs twice in the vocabulary")
    return ids


def _unknown_piece(vocabulary: GgufVocabulary, pieces: Sequence[str]) -> str:
    index = vocabulary.unk_id
    if index is None or not 0 <= index < len(pieces):
        raise _error(
            vocabulary, f"the id of the unknown piece is {index}, not one of {len(pieces)}"
        )
    return pieces[index]


def _added_tokens(
    pieces: Sequence[str], types: Sequence[int], forced_special: Collection[str]
) -> Iterator[dict[str, Any]]:
    for index, (piece, kind) in enumerate(zip(pieces, types, strict=True)):
        special = kind == CONTROL or piece in forced_special
        if special or kind == USER_DEFINED:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            yield {"id": index, "content": piece, **flags, "special": special}


def _merges(vocabulary: GgufVocabulary, pieces: Sequence[str]) -> list[tuple[str, str]]:
    if vocabulary.model == "llama":
        return derive_merges(_mergeable(vocabulary, pieces))
    if vocabulary.model != "gemma4":
        raise _error(vocabulary, f"the tokenizer model {vocabulary.model!r} is not supported")
    # A merge is "left right"; the first character is never the separator.
    cuts = ((merge, merge.find(" ", 1)) for merge in vocabulary.merges)
    merges = [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts if cut > 0]
    if not merges or len(merges) != len(vocabulary.merges):
        raise _error(
            vocabulary, f"{len(vocabulary.merges)} merges, of which {len(merges)} are pairs"
        )
    known = set(pieces)
    for left, right in merges:
        if left not in known or right not in known or left + right not in known:
            raise _error(vocabulary, f"the merge {left!r} {right!r} is not of pieces")
    return merges


def _spelled(merges: list[tuple[str, str]]) -> list[str] | list[tuple[str, str]]:
    """Merges as "left right", which loads in half the time, unless a piece holds a space."""
    if any(" " in left or " " in right for left, right in merges):
        return merges
    return [f"{left} {right}" for left, right in merges]


def _mergeable(vocabulary: GgufVocabulary, pieces: Sequence[str]) -> dict[str, float]:
    """Pieces that merges may touch, with their scores, in the order of their ids.

    User-defined pieces come before all others, as sentencepiece had them, whatever the file says (-1000).
    """
    if len(vocabulary.scores) != len(pieces):
        raise _error(vocabulary, f"{len(pieces)} pieces, but {len(vocabulary.scores)} scores")
    rows = zip(pieces, vocabulary.scores, vocabulary.types, strict=True)
    return {
        piece: 0.0 if kind == USER_DEFINED else score
        for piece, score, kind in rows
        if kind in (NORMAL, USER_DEFINED)
    }


def derive_merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merges from piece scores, most wanted first.

    Every split of a piece into two pieces is a merge. Order: score of the merged piece, then length of the left part,
    then of the right one, all descending; ties keep the order of the pieces.
    """
    merges: list[tuple[str, str]] = []
    ranked = sorted(scores, key=lambda piece: -scores[piece])
    for _, equal in groupby(ranked, key=scores.__getitem__):
        found = [
            (left, right)
            for piece in equal
            for cut in range(len(piece) - 1, 0, -1)
            if (left := piece[:cut]) in scores and (right := piece[cut:]) in scores
        ]
        found.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
        merges += found
    return merges
