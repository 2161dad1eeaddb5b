"""A model that draws at random from the masks: what a grammar really lets through, thousands of tokens a second."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tests.tiny_model import write_tiny

from onechip.chat.vocabulary import Vocabulary
from onechip.engine.grammar import Dead, RowGrammar
from onechip.engine.grammar_compiler import GrammarCompiler
from onechip.engine.sequence import Sequence
from onechip.errors import InvalidRequest
from onechip.request import Grammar, Request, SamplingParams

# Gemma 4's control tokens and byte pieces at their own ids, and pieces that span what a grammar would tell apart.
CONTROL = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>",
    51: "<tool_response|>", 52: '<|"|>', 100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>",
}  # fmt: skip
EOS = (1, 106, 50)
OPENER, CLOSER = 100, 101
FIRST_BYTE = 238
MERGED = [
    '"}', '"]', '":', '": ', '",', '", "', "{}", "[]", "}}", "]]", '{"', '["', "[[", "  ", "    ", "\n\n", "\t\t",
    "\n  ", "true", "false", "null", "tru", "10", "123", "-1", ".5", "e5", "call:", "thought", "thought\n", '"}\n',
    "1}", "é", "日本", "\\n", '\\"', "\\u00", "foo", "bar", '"foo":', '"a":', "a:", "}\n", ",{",
]  # fmt: skip
SIZE = 600


def vocabulary() -> Vocabulary:
    pieces = [b""] * SIZE
    for index, name in CONTROL.items():
        pieces[index] = name.encode()
    for byte in range(256):
        pieces[FIRST_BYTE + byte] = bytes([byte])
    for index, text in enumerate(MERGED, FIRST_BYTE + 256):
        pieces[index] = text.encode()
    return Vocabulary(tuple(pieces), frozenset(CONTROL))


VOCABULARY = vocabulary()
ENDINGS = frozenset(VOCABULARY.pieces.index(text) for text in (b'"', b"}", b"]", b'"}', b'"]'))


def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary, SIZE, EOS)


def start(grammars: GrammarCompiler, grammar: Grammar, **sampling: object) -> RowGrammar:
    """The grammar's place before its first token. Raises InvalidRequest as the engine would answer."""
    params = SamplingParams(seed=0, **sampling)  # type: ignore[arg-type]
    stops = () if params.ignore_eos else EOS
    sequence = Sequence(Request("r", (2,), params, (*stops, *params.stop_token_ids), grammar), [2])
    grammars.start(sequence)
    found = []
    while not found:
        found = grammars.ready(wait=True)
    ((_, outcome),) = found
    if isinstance(outcome, InvalidRequest):
        raise outcome
    return outcome


def allowed(grammars: GrammarCompiler, row: RowGrammar) -> set[int]:
    """The ids of the row's mask."""
    mask = grammars.masks({0: row})[0]
    assert not isinstance(mask, Dead), mask
    return set(np.flatnonzero(np.unpackbits(mask.words.view(np.uint8), bitorder="little")).tolist())


def walk(
    grammars: GrammarCompiler, row: RowGrammar, draw: random.Random, most: int = 400
) -> tuple[list[int], bool]:
    """Random allowed tokens up to a stop id: (tokens without it, whether it came within `most`).

    Tokens that close something are preferred, or random strings and arrays would seldom end.
    """
    tokens: list[int] = []
    while len(tokens) < most:
        choices = allowed(grammars, row)
        stops = choices & set(EOS)
        if stops and (stops == choices or draw.random() < 0.5):
            return tokens, True
        ends = [CLOSER] if CLOSER in choices else sorted(choices & ENDINGS)
        near = ends and draw.random() < 0.3
        token = draw.choice(ends if near else sorted(choices - stops))
        row.advance(token)
        tokens.append(token)
    return tokens, False


def text_of(tokens: Iterable[int]) -> str:
    return b"".join(VOCABULARY.pieces[token] for token in tokens).decode(errors="replace")


def tokens_of(text: str) -> list[int]:
    """One byte piece a byte; control pieces are not spelled."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def document() -> dict[str, Any]:
    """The vocabulary as a tokenizer.json: what a tiny checkpoint needs to be served under grammars.

    Its text is spelled with single characters and the merged pieces that two others make; the rest is never encoded.
    """
    names = {index: f"<unused{index}>" for index in range(SIZE)} | CONTROL | {3: "<unk>"}
    names |= {FIRST_BYTE + byte: f"<0x{byte:02X}>" for byte in range(256)}
    names |= {i: text.replace(" ", "\u2581") for i, text in enumerate(MERGED, FIRST_BYTE + 256)}
    special = [
        i for i, name in names.items() if name.startswith("<") and not name.startswith("<0x")
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": names[i], **flags, "special": True} for i in special],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {name: i for i, name in names.items()},
            "merges": [],
        },
    }


def write_checkpoint(folder: Path, **changes: Any) -> str:
    """A tiny Gemma 4 with this vocabulary, for `random_weights=True`."""
    write_tiny(
        folder, vocab_size=SIZE, vocab_size_per_layer_input=SIZE, eos_token_id=list(EOS), **changes
    )
    (folder / "tokenizer.json").write_text(json.dumps(document()))
    return str(folder)
