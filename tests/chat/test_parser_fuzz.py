"""Random answers: no exception, nothing lost, the same in any grouping, and time linear in their length."""

import json
import random
import time
from typing import Any

import pytest
from tests.chat.test_parsing import tool
from tests.dialect_tokenizer import dialect, ids_of

from onechip.chat import parse

MARKERS = [f"{letter}{digit}" for letter in "kvwxyz" for digit in range(3)]
SYNTAX = [
    *(
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "<|channel>",
        "<channel|>",
        "thought",
        "\n",
        "call",
        ":",
        "call:",
    ),
    *"{}[](),=\"'`\\ 10-.eé日😊",
    *("\\u", "\\n", "  ", "null", "true"),
    *("<|tool_response>", "<turn|>", "<|image|>", "<|think|>", "<unused9>"),
]
WHOLE = [
    '<|tool_call>call:f{a:<|"|>k0<|"|>,n:1}<tool_call|>',
    "<|tool_call>call:f{",
    "<|channel>thought\n",
    "<tool_call|><|tool_call>call:f(k1:",
]
TOOLS = [tool(n={"type": "integer"}, s={"type": "string"}, o={"type": "object"})]
STOPS = {1, 50, 106}


def pieces() -> list[list[int]]:
    texts = [*SYNTAX, *SYNTAX, *MARKERS, *WHOLE]
    return [ids_of(text) for text in texts]


def sequence(rng: random.Random, choices: list[list[int]]) -> list[int]:
    count = rng.choice((3, 8, 20, 60))
    if rng.random() < 0.1:
        return [rng.randrange(dialect().vocab_size) for _ in range(count)]
    ids = [i for _ in range(count) for i in rng.choice(choices)]
    return ids if rng.random() < 0.5 else [i for i in ids if i not in STOPS]


def check(ids: list[int], rng: random.Random) -> None:
    options: dict[str, Any] = {
        "tools": rng.choice((None, TOOLS)),
        "prompt_ended": rng.choice(("no_channel", "open_channel", "closed_channel")),
        "finish": rng.choice(("stop", "length")),
        "tokenizer": dialect(),
    }
    whole = parse(ids, **options)
    group = rng.choice((1, 2, 3, 5, [rng.randrange(1, 6) for _ in range(8)]))
    assert parse(ids, group=group, **options) == whole
    read = ids[: next((n for n, i in enumerate(ids) if i in STOPS), len(ids))]
    stopped = whole["finish"] != "length"
    assert stopped == (options["finish"] == "stop" or len(read) < len(ids))
    for call in whole["tool_calls"]:
        assert call["name"]
        if stopped:
            assert isinstance(json.loads(call["arguments"]), dict)
    if stopped:
        assert (whole["finish"] == "tool_calls") == bool(whole["tool_calls"])
        nothing_lost(read, whole)


def nothing_lost(read: list[int], whole: dict[str, Any]) -> None:
    """Every marker that was generated is there as often: in a thought, in text, in a name or in arguments."""
    said = [whole["reasoning"] or "", whole["content"] or ""]
    said += [call["name"] + " " + call["arguments"] for call in whole["tool_calls"]]
    shown = "\n".join(said)
    generated = dialect().decode(read, skip_special=False)  # a marker has no control token inside
    for marker in MARKERS:
        assert shown.count(marker) >= generated.count(marker), (generated, whole)


def run(count: int, seed: int) -> int:
    rng, choices, tokens = random.Random(seed), pieces(), 0
    for _ in range(count):
        ids = sequence(rng, choices)
        check(ids, rng)
        tokens += len(ids)
    return tokens


def test_random_answers_are_read_without_loss_in_any_grouping():
    run(1500, seed=1)


@pytest.mark.slow
def test_a_hundred_thousand_random_answers():
    started = time.process_time()
    tokens = run(100_000, seed=2)
    seconds = time.process_time() - started
    print(f"100,000 sequences, {tokens:,} tokens, {seconds:.0f} s")


@pytest.mark.parametrize("seed", range(4))
def test_time_is_linear_in_the_length_of_a_random_answer(seed: int):
    """Four times the tokens take less than ten times as long, in groups and at once."""
    rng, choices = random.Random(seed), pieces()
    ids = [i for _ in range(2000) for i in rng.choice(choices) if i not in STOPS]

    def seconds(ids: list[int], group: int | None) -> float:
        """The best of three: the machine may have other things to do."""
        times: list[float] = []
        for _ in range(3):
            started = time.process_time()
            parse(ids, TOOLS, group=group, tokenizer=dialect())
            times.append(time.process_time() - started)
        return min(times)

    for group in (None, 1):
        assert seconds(ids * 4, group) < 10 * seconds(ids, group) + 0.02
