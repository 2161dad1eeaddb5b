"""A small tokenizer of Gemma's kind (BPE, byte fallback, U+2581 for spaces) through the real Tokenizer class."""

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer as Backend

from onechip.chat.tokenizer import Tokenizer

SPECIALS = {
    "gemma3": ["<start_of_turn>", "<end_of_turn>", "<start_of_image>", "[multimodal]"],
    "gemma4": ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|image|>", "<|think|>"],
}
WORDS = ["The", "▁quick", "▁brown", "▁fox", "▁jumps", "own", "user", "model", "thought", "▁é"]
FIRST_BYTE = 16
EOS = 1
BOS = 2
TURN_END = 5  # <end_of_turn> or <turn|>


def pieces(family: str) -> list[str]:
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", *SPECIALS[family]]
    specials += [f"<unused{i}>" for i in range(FIRST_BYTE - len(specials))]
    chars = ["▁", "\n", "\n\n", *(chr(c) for c in range(33, 127)), "é", "ü", "日", "😊"]
    parts = list(dict.fromkeys(word[:n] for word in WORDS for n in range(2, len(word) + 1)))
    return specials + [f"<0x{b:02X}>" for b in range(256)] + chars + parts


def document(family: str) -> dict[str, Any]:
    return document_of(pieces(family), FIRST_BYTE)


def document_of(vocabulary: list[str], specials: int) -> dict[str, Any]:
    """A tokenizer.json of these pieces, of which the first `specials` are control pieces."""
    parts = list(dict.fromkeys(word[:n] for word in WORDS for n in range(2, len(word) + 1)))
    special = range(specials)
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": vocabulary[i],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i in special
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: i for i, piece in enumerate(vocabulary)},
            "merges": [["\n", "\n"], *([part[:-1], part[-1]] for part in parts)],
        },
    }


@cache
def tiny(family: str = "gemma3") -> Tokenizer:
    backend = Backend.from_str(json.dumps(document(family)))
    return Tokenizer(backend, f"tiny {family}", bos_id=BOS, eos_ids=(EOS, TURN_END))


def byte_ids(text: str) -> list[int]:
    """The text as byte pieces only."""
    return [FIRST_BYTE + b for b in text.encode()]
