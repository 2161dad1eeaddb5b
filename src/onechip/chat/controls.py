"""What control tokens mean to the reader of an answer, and how a prompt ended.

Both follow from ids, never from flags or from text: the same characters in ordinary pieces are text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from onechip.chat.tokenizer import GEMMA4_CONTROL, Tokenizer
from onechip.request import Grammar

Control = Literal["call", "call_end", "quote", "channel", "channel_end", "turn", "end", "other"]
PromptEnd = Literal["no_channel", "open_channel", "closed_channel"]

MEANINGS: Mapping[str, Control] = {
    "<|tool_call>": "call",
    "<tool_call|>": "call_end",
    '<|"|>': "quote",
    "<|channel>": "channel",
    "<channel|>": "channel_end",
    "<|tool_response>": "end",
    "<|turn>": "turn",
    "<turn|>": "end",
    "<eos>": "end",
}


def controls_of(tokenizer: Tokenizer) -> dict[int, Control]:
    """The meaning of each control id; empty where the dialect has no thought channel (Gemma 3). "other": never shown,
    means nothing.
    """
    names = [*GEMMA4_CONTROL, "<eos>"]
    ids = {name: index for name in names if (index := tokenizer.id_of(name)) is not None}
    if "<channel|>" not in ids:
        return {}
    return {index: MEANINGS.get(name, "other") for name, index in ids.items()}


def prompt_end(ids: Sequence[int], controls: Mapping[int, Control]) -> PromptEnd:
    """How a prompt ends: inside a thought, after one, or neither."""
    for token in reversed(ids):
        match controls.get(token):
            case "channel":
                return "open_channel"
            case "channel_end":
                return "closed_channel"
            case "turn" | "end" | "call" | "call_end":
                return "no_channel"
            case _:
                pass
    return "no_channel"


def after_thought(
    grammar: Grammar, controls: Mapping[int, Control], ids: Sequence[int], *, thinking: bool
) -> Grammar:
    """The grammar of an answer to the prompt `ids`, begun where the thought ends.

    Inside an open channel the thought comes first; after a closed one, or with thinking off, there is none; else the
    model may open one.
    """
    tokens = {meaning: index for index, meaning in controls.items()}
    end = prompt_end(ids, controls)
    if not tokens or end == "closed_channel" or (end == "no_channel" and not thinking):
        return grammar
    state = "open" if end == "open_channel" else "may_open"
    return replace(grammar, thought=state, opener=tokens["channel"], closer=tokens["channel_end"])
