"""Structured output through the whole engine, offline, on a tiny model with random weights.

Random weights are a hard model: nothing in them prefers the structure, so only the grammar can have made it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from tests.grammar_walk import EOS, FIRST_BYTE, MERGED, write_checkpoint

from onechip import LLM, SamplingParams, StructuredOutputsParams
from onechip.cache.pages import PageTable
from onechip.engine.counts import compiles
from onechip.engine.runner import DeviceRunner
from onechip.errors import OnechipError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a", "b", 3]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "list"],
    "additionalProperties": False,
}
JSON = StructuredOutputsParams(json=SCHEMA)
HOT = SamplingParams(max_tokens=200, temperature=1.0, seed=1, structured_outputs=JSON)
COLD = replace(HOT, temperature=0.0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    return LLM(
        folder, random_weights=True, dtype="float32", max_seqs=4, chunk_size=16, max_model_len=320
    )


def structure(**wish: Any) -> SamplingParams:
    return replace(HOT, structured_outputs=StructuredOutputsParams(**wish))


@pytest.mark.parametrize("seed", range(6))
def test_a_schema_holds_at_any_temperature(llm: LLM, seed: int) -> None:
    hot, cold = llm.generate([[5, 6, 7, 8 + seed]] * 2, [replace(HOT, seed=seed), COLD])
    for one in (hot, cold):
        assert one.finish_reason == "stop" and one.token_ids[-1] in EOS
        jsonschema.validate(json.loads(one.text), SCHEMA)


def test_every_kind_of_structure_holds(llm: LLM) -> None:
    assert llm.generate([[5]], structure(choice=("left", "right")))[0].text in ("left", "right")
    number = llm.generate([[5]], structure(regex=r"^\d{3}/[ab]$"))[0].text
    assert len(number) == 5 and number[:3].isdigit() and number[3:] in ("/a", "/b")
    assert isinstance(json.loads(llm.generate([[5]], structure(json_object=True))[0].text), dict)
    lark = 'start: "x" n "y"\nn: /[0-9]/'
    assert llm.generate([[5]], structure(grammar=lark))[0].text[2:] == "y"
    gbnf = 'root ::= "(" [0-9] ")"'
    assert llm.generate([[5]], structure(grammar=gbnf))[0].text[::2] == "()"


def test_batch_mates_change_nothing_and_are_not_changed(llm: LLM) -> None:
    free = replace(HOT, structured_outputs=None, max_tokens=40)
    wishes = [HOT, free, replace(HOT, seed=7), replace(free, seed=3), COLD, replace(free, seed=4)]
    prompts = [[9, 10 + i] for i in range(len(wishes))]
    together = llm.generate(prompts, wishes)
    for prompt, wish, one in zip(prompts, wishes, together, strict=True):
        assert llm.generate([prompt], wish)[0].token_ids == one.token_ids


def test_choices_differ_and_each_holds(llm: LLM) -> None:
    found = llm.generate([[5, 6]], replace(HOT, n=4))
    assert len({one.text for one in found}) > 1
    for one in found:
        jsonschema.validate(json.loads(one.text), SCHEMA)


def test_log_probabilities_are_the_models_and_finite(llm: LLM) -> None:
    """They are of its own distribution: masked tokens may be among the best, none is minus infinity."""
    one = llm.generate([[5, 6]], replace(HOT, logprobs=5))[0]
    assert len(one.logprobs) == len(one.token_ids)
    for token, entry in zip(one.token_ids, one.logprobs, strict=True):
        assert entry.token_id == token and -100 < entry.logprob <= 0
        assert len(entry.top_ids) == 5 and all(-100 < value <= 0 for value in entry.top_logprobs)
    assert llm.generate([[5, 6]], HOT)[0].token_ids == one.token_ids


@pytest.mark.parametrize("ending", [(), (106,)])
def test_no_bias_makes_a_whitespace_loop(llm: LLM, ending: tuple[int, ...]) -> None:
    blanks = [FIRST_BYTE + b for b in b" \n\t\r"]
    blanks += [FIRST_BYTE + 256 + i for i, text in enumerate(MERGED) if not text.strip()]
    bias = dict.fromkeys([*blanks, *ending], 100.0)
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "k": {"const": 7}, "e": {"enum": ["x", "y"]}},
        "required": ["on", "k", "e"],
        "additionalProperties": False,
    }
    wish = StructuredOutputsParams(json=schema)
    params = replace(COLD, logit_bias=bias, structured_outputs=wish, max_tokens=300)
    one = llm.generate([[5]], params)[0]
    assert one.finish_reason == "stop" and one.text.endswith("}")
    jsonschema.validate(json.loads(one.text), schema)
    longest = max(
        len(run) for run in "".join(c if c.isspace() else "|" for c in one.text).split("|")
    )
    assert longest <= 8


def test_penalties_and_bias_meet_the_grammar(llm: LLM) -> None:
    params = replace(
        HOT, presence_penalty=1.5, repetition_penalty=1.3, logit_bias={300: 5.0}, top_k=5
    )
    one = llm.generate([[5, 6]], replace(params, top_p=0.9, min_p=0.01, max_tokens=300))[0]
    assert one.finish_reason == "stop"
    jsonschema.validate(json.loads(one.text), SCHEMA)


@contextmanager
def pages(llm: LLM, full: int, sliding: int) -> Iterator[None]:
    """The same engine with fewer pages to give out."""
    runner = llm.engine.runner
    assert isinstance(runner, DeviceRunner)
    before = runner.pages
    shapes = {
        kind: replace(shape, pages=full if kind == "full" else sliding)
        for kind, shape in before.shapes.items()
    }
    runner.pages = llm.engine.scheduler.pages = PageTable(before.page_size, shapes)
    yield
    runner.pages = llm.engine.scheduler.pages = before


def test_preemption_changes_nothing(llm: LLM) -> None:
    wishes = [replace(HOT, seed=seed, max_tokens=60) for seed in range(4)]
    prompts = [[9, 10 + i] for i in range(4)]
    before = llm.generate(prompts, wishes)
    count = llm.engine.scheduler.preemptions
    with pages(llm, full=9, sliding=40):
        after = llm.generate(prompts, wishes)
    assert llm.engine.scheduler.preemptions > count
    assert [one.token_ids for one in after] == [one.token_ids for one in before]


def test_nothing_is_compiled_for_a_second_grammar(llm: LLM) -> None:
    llm.generate([[5]], structure(choice=("a",)))
    before = compiles()
    llm.generate([[5]], structure(regex="[0-9]{4}"))
    assert compiles() == before


def test_a_wish_that_cannot_be_granted_is_an_error_with_its_reason(llm: LLM) -> None:
    with pytest.raises(OnechipError, match="uniqueItems"):
        llm.generate([[5]], structure(json={"type": "array", "uniqueItems": True}))
    with pytest.raises(OnechipError, match="exactly one"):
        llm.generate([[5]], structure(json={}, regex="a"))
    with pytest.raises(OnechipError, match="exactly one"):
        llm.generate([[5]], structure())
    assert llm.generate([[5]], structure(choice=("ok",)))[0].text == "ok"
