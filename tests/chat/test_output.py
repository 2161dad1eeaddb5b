"""One choice: grouping of tokens into events changes nothing but the size of the deltas."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dialect_tokenizer import dialect, ids_of
from tests.tiny_tokenizer import EOS, byte_ids, tiny

from onechip.chat.controls import controls_of
from onechip.chat.output import ChoiceOutput, Entry
from onechip.chat.parts import Content, Gathered
from onechip.chat.reading import Reading
from onechip.request import Event, SamplingParams, TokenLogprobs

SENTENCE = "The quick brown fox jumps"


@dataclass
class Said:
    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    finish: str | None = None
    tokens: int = 0
    stop_hit: bool = False


def run(tokens: list[int], size: int, finish: Any, **sampling: Any) -> Said:
    output = ChoiceOutput(tiny(), SamplingParams(**sampling))
    said = Said()
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        last = start + size >= len(tokens)
        scores = tuple(TokenLogprobs(i, -1.0, (i,), (-1.0,)) for i in part)
        event = Event(
            "r",
            tuple(part),
            logprobs=scores if "logprobs" in sampling else (),
            finish=finish if last else None,
            stopped_by=part[-1] if last and finish == "stop" else None,
        )
        delta = output.push(event)
        said.text += delta.text
        said.entries += delta.entries
        said.finish, said.tokens = delta.finish, output.completion_tokens
        if delta.finish:
            said.stop_hit = delta.stop_hit
            break
    return said


@given(
    st.lists(st.integers(16, tiny().vocab_size - 1), min_size=1, max_size=30),
    st.sampled_from([2, 3, 7, 30]),
    st.sampled_from(["stop", "length"]),
    st.fixed_dictionaries(
        {},
        optional={
            "stop": st.sampled_from([("a",), ("ab", "The"), (" ",), ("é",)]),
            "logprobs": st.just(1),
            "min_tokens": st.integers(0, 5),
            "include_stop_str_in_output": st.booleans(),
        },
    ),
)
def test_grouping_changes_nothing(
    tokens: list[int], size: int, finish: str, sampling: dict[str, Any]
):
    one, many = run(tokens, 1, finish, **sampling), run(tokens, size, finish, **sampling)
    assert (one.text, one.entries, one.finish) == (many.text, many.entries, many.finish)
    assert one.tokens == many.tokens


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_stop_split_inside_a_character_is_found(size: int):
    tokens = byte_ids("ab日本cd")
    said = run(tokens, size, "length", stop=("本",))
    assert (said.text, said.finish, said.stop_hit) == ("ab日", "stop", True)
    assert said.tokens == 2 + 3 + 3


def test_stops_are_not_looked_for_before_min_tokens():
    tokens = tiny().encode(SENTENCE)
    early = run(tokens, 1, "length", stop=("quick", "fox"), min_tokens=3)
    assert (early.text, early.finish, early.tokens) == ("The quick brown ", "stop", 4)


def test_what_was_held_comes_out_at_the_end():
    tokens = tiny().encode(SENTENCE)
    assert run(tokens, 1, "length", stop=("jumps over",)).text == SENTENCE
    assert run([*tokens, EOS], 1, "stop", stop=("jumps over",)).text == SENTENCE
    assert run(byte_ids("a日")[:3], 1, "length", stop=("日",)).text == "a\ufffd"


def test_entries_give_offsets_into_the_text():
    said = run([*tiny().encode(SENTENCE), EOS], 1, "stop", logprobs=1)
    assert len(said.entries) == 5
    assert said.tokens == 6
    for entry in said.entries:
        assert said.text[entry.offset :].startswith(entry.chosen.token)


ANSWERS = [
    "<|channel>thought\nA END B\n<channel|>C END D",
    'x<|tool_call>call:f{a:<|"|>END<|"|>,n:12}<tool_call|>\n<|tool_call>call:f{}<tool_call|> END',
    "\n\nEND",
    "R<channel|>C",
]


@given(
    st.sampled_from(ANSWERS),
    st.integers(0, 40),
    st.sampled_from([1, 2, 3, 7, 99]),
    st.sampled_from(["stop", "length"]),
    st.sampled_from([None, {"f": {}}]),
    st.booleans(),
    st.fixed_dictionaries(
        {},
        optional={
            "stop": st.sampled_from([("END",), ("EN",), ("\n\n",), ("ENDE",)]),
            "logprobs": st.just(1),
            "min_tokens": st.integers(0, 12),
            "skip_special_tokens": st.booleans(),
            "include_stop_str_in_output": st.booleans(),
        },
    ),
)
def test_grouping_changes_nothing_of_thoughts_and_calls(
    text: str, cut: int, size: int, finish: Any, tools: Any, parallel: bool, sampling: Any
):
    ids = [*ids_of(text)[: cut or None], *([106] if finish == "stop" else [])]
    if not ids:
        return
    reading = Reading(controls_of(dialect()), "no_channel", tools, parallel)
    one, many = (read(ids, n, finish, reading, sampling) for n in (1, size))
    assert one == many


def read(ids: list[int], size: int, finish: Any, reading: Reading, sampling: Any) -> Any:
    """Everything a choice says but its calls' ids, and what it counted."""
    output = ChoiceOutput(dialect(), SamplingParams(**sampling), reading=reading)
    said, entries = Gathered(), list[Entry]()
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        last = start + size >= len(ids)
        scores = tuple(TokenLogprobs(i, -1.0, (i,), (-1.0,)) for i in part)
        delta = output.push(
            Event(
                "r",
                tuple(part),
                logprobs=scores if "logprobs" in sampling else (),
                finish=finish if last else None,
                stopped_by=part[-1] if last and finish == "stop" else None,
            )
        )
        assert delta.text == "".join(p.text for p in delta.pieces if isinstance(p, Content))
        said.add(delta.pieces)
        entries += delta.entries
        if delta.finish:
            break
    calls = [(call.name, call.arguments) for call in said.calls]
    counted = (output.finish, output.stop_reason, output.completion_tokens, output.reasoning_tokens)
    return said.content, said.reasoning, calls, entries, counted
