"""How a prompt ends decides where an answer's structure begins."""

import pytest
from tests.dialect_tokenizer import (
    BOS,
    CALL,
    CALL_END,
    CHANNEL,
    CHANNEL_END,
    RESPONSE,
    RESPONSE_END,
    TURN,
    dialect,
)
from tests.tiny_tokenizer import tiny

from onechip.chat.controls import after_thought, controls_of
from onechip.request import Grammar

GRAMMAR = Grammar("choice", '["a"]')
OPEN = [BOS, TURN, 300, CHANNEL, 301]
CLOSED = [BOS, TURN, 300, CHANNEL, 301, CHANNEL_END]
NONE = [BOS, TURN, 300]
AFTER_RESULT = [
    BOS,
    TURN,
    CHANNEL,
    301,
    CHANNEL_END,
    CALL,
    302,
    CALL_END,
    RESPONSE,
    303,
    RESPONSE_END,
]


@pytest.mark.parametrize(
    ("prompt", "thinking", "state"),
    [
        (NONE, False, "none"),
        (NONE, True, "may_open"),
        (CLOSED, False, "none"),
        (CLOSED, True, "none"),
        (OPEN, True, "open"),
        (OPEN, False, "open"),
        (AFTER_RESULT, False, "none"),
        (AFTER_RESULT, True, "may_open"),
        ([*AFTER_RESULT, CHANNEL, 301], True, "open"),
    ],
)
def test_a_structure_begins_where_the_thought_ends(
    prompt: list[int], thinking: bool, state: str
) -> None:
    found = after_thought(GRAMMAR, controls_of(dialect()), prompt, thinking=thinking)
    assert found.thought == state
    if state != "none":
        assert (found.opener, found.closer) == (CHANNEL, CHANNEL_END)


def test_a_dialect_without_thoughts_begins_at_once() -> None:
    assert after_thought(GRAMMAR, controls_of(tiny("gemma3")), NONE, thinking=True) == GRAMMAR
