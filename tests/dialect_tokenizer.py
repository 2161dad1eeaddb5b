"""A small tokenizer with Gemma 4's control pieces at their real ids and its byte pieces at 238 + byte."""

import json
from functools import cache

from tests.tiny_tokenizer import document_of, pieces
from tokenizers import Tokenizer as Backend

from onechip.chat.tokenizer import GEMMA4_CONTROL, Tokenizer

FIRST_BYTE = 238
EOS, BOS = 1, 2
CALL, CALL_END, RESPONSE, RESPONSE_END, QUOTE = 48, 49, 50, 51, 52
THINK, CHANNEL, CHANNEL_END, TURN, TURN_END = 98, 100, 101, 105, 106


def vocabulary() -> list[str]:
    names = [f"<unused{i}>" for i in range(FIRST_BYTE)]
    names[:4] = ["<pad>", "<eos>", "<bos>", "<unk>"]
    for order, (name, index) in enumerate(GEMMA4_CONTROL.items()):
        names[index if index < FIRST_BYTE else 200 + order] = name  # media pieces lie far out
    ordinary = pieces("gemma4")
    return names + ordinary[ordinary.index("<0x00>") :]


@cache
def dialect() -> Tokenizer:
    backend = Backend.from_str(json.dumps(document_of(vocabulary(), FIRST_BYTE)))
    return Tokenizer(backend, "tiny dialect", bos_id=BOS, eos_ids=(EOS, TURN_END, RESPONSE))


def ids_of(text: str) -> list[int]:
    """Token ids of text in which control pieces are spelled out."""
    return dialect().encode(text, control=True)
