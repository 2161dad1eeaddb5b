"""Ranges of sampling parameters, and what becomes of a prompt and its n choices."""

from dataclasses import replace
from typing import Any

import pytest

from onechip.engine.validate import check, check_request, derive_seed, prepare
from onechip.errors import ContextLengthExceeded, InvalidRequest
from onechip.request import EngineInfo, SamplingParams

INFO = EngineInfo(1000, 100, 4, 4000, "cpu", "float32", 0.0, 0.0, 0.0)
GOOD: list[tuple[str, Any]] = [
    ("temperature", 0),
    ("temperature", 2.0),
    ("top_p", 1e-9),
    ("top_k", -1),
    ("top_k", 10**9),
    ("min_p", 1),
    ("presence_penalty", -2),
    ("repetition_penalty", 10),
    ("seed", 0),
    ("seed", 2**63 - 1),
    ("n", 128),
    ("logprobs", 20),
    ("stop", ("x",) * 16),
    ("logit_bias", {0: -100, 999: 100.0}),
    ("allowed_token_ids", (0, 999)),
    ("stop_token_ids", (999,)),
    ("max_tokens", None),
    ("min_tokens", 16),
]
BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "1"),
    ("temperature", None),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", 1.01),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("seed", -1),
    ("seed", 2**63),
    ("n", 0),
    ("n", 129),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("stop", ("",)),
    ("stop", ("x",) * 17),
    ("logit_bias", {1000: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: float("nan")}),
    ("logit_bias", {1: 100.5}),
    ("allowed_token_ids", ()),
    ("allowed_token_ids", (1000,)),
    ("stop_token_ids", (1000,)),
    ("max_tokens", 0),
    ("min_tokens", -1),
    ("min_tokens", 17),
]


@pytest.mark.parametrize(("name", "value"), GOOD, ids=str)
def test_values_in_range_pass(name: str, value: Any):
    check(SamplingParams(**{name: value}), vocab_size=1000)


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: str(v)[:30])
def test_values_out_of_range_are_refused_by_name(name: str, value: Any):
    with pytest.raises(InvalidRequest) as caught:
        check(SamplingParams(**{name: value}), vocab_size=1000)
    assert caught.value.param == name
    assert len(caught.value.message) < 250


def test_too_many_biases_are_refused():
    with pytest.raises(InvalidRequest, match="1024"):
        check(SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)), vocab_size=10**6)


@pytest.mark.parametrize("prompt", [[], [1000], [-1], [True], ["x"], [1, 7]])
def test_bad_prompts_are_refused(prompt: list[Any]):
    with pytest.raises(InvalidRequest) as caught:
        prepare("r", prompt, SamplingParams(), INFO, (1,), refused=(7,))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "granted"),
    [(99, None, 1), (99, 1, 1), (10, None, 90), (10, 90, 90), (1, 5, 5)],
)
def test_requests_that_fit_the_context_are_filled_in(
    prompt: int, max_tokens: int | None, granted: int
):
    (request,) = prepare("r", [5] * prompt, SamplingParams(max_tokens=max_tokens), INFO, ())
    assert request.sampling.max_tokens == granted


@pytest.mark.parametrize(
    ("prompt", "max_tokens"), [(100, None), (100, 1), (500, None), (10, 91), (99, 2)]
)
def test_requests_beyond_the_context_say_both_numbers(prompt: int, max_tokens: int | None):
    with pytest.raises(ContextLengthExceeded) as caught:
        prepare("r", [5] * prompt, SamplingParams(max_tokens=max_tokens), INFO, ())
    assert "100" in caught.value.message and str(prompt) in caught.value.message


def test_stop_ids_unite_the_models_with_the_requests_unless_told_otherwise():
    def stops(**fields: Any) -> tuple[int, ...]:
        return prepare("r", [5], SamplingParams(**fields), INFO, (1, 106))[0].stop_ids

    assert stops() == (1, 106)
    assert stops(stop_token_ids=(7, 1)) == (1, 106, 7)
    assert stops(stop_token_ids=(7,), ignore_eos=True) == (7,)
    with pytest.raises(InvalidRequest, match="64"):
        stops(stop_token_ids=tuple(range(200, 263)))


def test_choices_are_requests_of_their_own_with_seeds_of_their_own():
    requests = prepare("r", [5], SamplingParams(n=100, seed=9), INFO, ())
    assert [request.id for request in requests] == [f"r-{i}" for i in range(100)]
    assert len({request.sampling.seed for request in requests}) == 100
    assert requests[0].sampling.seed == 9
    assert {request.sampling.n for request in requests} == {1}
    again = prepare("q", [5], SamplingParams(n=100, seed=9), INFO, ())
    assert [r.sampling.seed for r in again] == [r.sampling.seed for r in requests]
    neighbours = prepare("q", [5], SamplingParams(n=100, seed=10), INFO, ())
    assert not {r.sampling.seed for r in neighbours} & {r.sampling.seed for r in requests}


def test_a_seed_is_fresh_where_none_is_given():
    seeds = {prepare("r", [5], SamplingParams(), INFO, ())[0].sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert all(0 <= derive_seed(2**63 - 1, i) < 2**63 for i in range(1000))


@pytest.mark.parametrize(("asked", "meant"), [(-1, 0), (0, 0), (5, 5), (1000, 0), (10**9, 0)])
def test_top_k_off_has_one_form(asked: int, meant: int):
    (request,) = prepare("r", [5], SamplingParams(top_k=asked), INFO, ())
    assert request.sampling.top_k == meant


def test_the_engine_checks_again_what_arrives():
    (request,) = prepare("r", [5], SamplingParams(), INFO, (1,))
    check_request(request, INFO)
    for broken in (
        replace(request, prompt_ids=(1000,)),
        replace(request, stop_ids=(1000,)),
        replace(request, prompt_ids=(5,) * 99),
        replace(request, sampling=replace(request.sampling, top_p=0.0)),
        replace(request, stop_ids=tuple(range(65))),
    ):
        with pytest.raises(InvalidRequest):
            check_request(broken, INFO)
