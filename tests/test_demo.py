"""The real Gemma 3 270M against the reference: prompt log probabilities, greedy tokens, and what bfloat16 costs.

The reference computed in float32 from the same GGUF's weights (tests/data/gemma3-270m.json). Greedy choices are only
compared while they are decided: from the first step on whose two best logits are closer than TIE, either may follow
and the case stops there.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onechip.checkpoint.source import DEMO_PACKAGE
from onechip.llm import LLM, Completion
from onechip.request import SamplingParams

pytestmark = [
    pytest.mark.demo,
    pytest.mark.skipif(find_spec(DEMO_PACKAGE) is None, reason="needs onechip[demo]"),
]

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "gemma3-270m.json").read_text()
)["cases"]
NAMES = [case["prompt"][:24] for case in CASES]
STEPS = 48
TOP = 5
TIE = 0.01  # nats between best and second under which the order is a matter of rounding
EXACT = (
    2e-3  # nats: the reference's file is rounded to 1e-5, float32 sums in another order do the rest
)
# bfloat16 keeps 8 bits of what goes into a matmul. Measured on a CPU: mean 0.0026 and at most 0.073 nats, 98.7% of the
# greedy choices. The bounds are for any device.
BF16_MEAN = 0.01
BF16_MOST = 0.25
BF16_TOP1 = 0.96

PARAMS = SamplingParams(
    max_tokens=STEPS, temperature=0.0, ignore_eos=True, logprobs=TOP, prompt_logprobs=0
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM("demo", dtype="float32", max_seqs=len(CASES), max_model_len=1024)
    yield llm
    llm.engine.check_idle()


@pytest.fixture(scope="module")
def together(llm: LLM) -> list[Completion]:
    return llm.generate([case["prompt_ids"] for case in CASES], PARAMS)


def prompt_logprobs(done: Completion) -> np.ndarray:
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    return np.array([one.logprob for one in done.prompt_logprobs[1:] if one is not None])


def decided_steps(case: dict[str, Any]) -> int:
    """Steps before the first whose two best are a tie in the reference."""
    gaps = [step["top"][0][1] - step["top"][1][1] for step in case["greedy"]]
    return next((n for n, gap in enumerate(gaps) if gap < TIE), STEPS)


def check_against_reference(done: Completion, case: dict[str, Any]) -> None:
    np.testing.assert_allclose(prompt_logprobs(done), case["prompt_logprobs"], rtol=0, atol=EXACT)
    decided = decided_steps(case)
    steps = case["greedy"]
    assert list(done.token_ids[:decided]) == [step["id"] for step in steps[:decided]]
    if decided < STEPS:
        assert done.token_ids[decided] in [token for token, _ in steps[decided]["top"][:2]]
    for step, found in zip(steps[:decided], done.logprobs, strict=False):
        assert found.token_id == step["id"]
        check_top(found.top_ids, found.top_logprobs, step["top"])


def check_top(ids: tuple[int, ...], logprobs: tuple[float, ...], expected: list[Any]) -> None:
    """The best few: equal values in order, and equal ids where no tie lets two change places."""
    wanted = [logprob for _, logprob in expected]
    np.testing.assert_allclose(logprobs, wanted, rtol=0, atol=EXACT)
    gaps = [a - b for a, b in pairwise(wanted)]
    for rank, (token, _) in enumerate(expected[:-1]):
        if all(gap > TIE for gap in gaps[max(0, rank - 1) : rank + 1]):
            assert ids[rank] == token


def test_the_tokenizer_gives_the_references_ids(llm: LLM):
    assert llm.tokenizer is not None
    for case in CASES:
        assert [llm.tokenizer.bos_id, *llm.tokenizer.encode(case["prompt"])] == case["prompt_ids"]


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
def test_eight_prompts_in_one_batch_match_the_reference(index: int, together: list[Completion]):
    check_against_reference(together[index], CASES[index])


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
def test_a_prompt_alone_matches_the_reference(index: int, llm: LLM):
    check_against_reference(llm.generate([CASES[index]["prompt_ids"]], PARAMS)[0], CASES[index])


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
def test_the_text_is_the_references(index: int, together: list[Completion]):
    if decided_steps(CASES[index]) == STEPS:
        assert together[index].text == CASES[index]["text"]


def test_most_steps_are_compared():
    assert sum(decided_steps(case) for case in CASES) >= 0.7 * STEPS * len(CASES)


@pytest.mark.slow  # programs of their own
def test_bfloat16_stays_near_the_reference():
    """Every prompt and reference answer is scored whole, so one early flip does not end the comparison.

    Bounds: the mean and the largest distance of all log probabilities that the reference recorded, and how often the
    reference's greedy choice is bfloat16's best too.
    """
    llm = LLM("demo", dtype="bfloat16", max_seqs=len(CASES), max_model_len=1024)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    answers = [[step["id"] for step in case["greedy"]] for case in CASES]
    prompts = [case["prompt_ids"] + answer for case, answer in zip(CASES, answers, strict=True)]
    errors: list[float] = []
    agreed: list[bool] = []
    for case, done in zip(CASES, llm.generate(prompts, params), strict=True):
        assert done.prompt_logprobs is not None
        found = [one for one in done.prompt_logprobs if one is not None]
        prompt, answer = found[:-STEPS], found[-STEPS:]
        pairs = zip(prompt, case["prompt_logprobs"], strict=True)
        errors += [abs(one.logprob - wanted) for one, wanted in pairs]
        for one, step in zip(answer, case["greedy"], strict=True):
            errors.append(abs(one.logprob - step["top"][0][1]))
            agreed.append(one.top_ids[0] == step["id"])
    assert np.mean(errors) < BF16_MEAN
    assert max(errors) < BF16_MOST
    assert np.mean(agreed) > BF16_TOP1
    llm.engine.check_idle()
