"""The whole engine, offline: equal to the reference, and the same whatever else runs, however it is cut.

The goldens are the reference's (tests/data/README.md). The invariances run on a four-layer model with random weights;
its engine is shared, with its tables, pages and parameters changed and put back, because compiling is what costs.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.fake_runner import FixedPace, Outcome, gather
from tests.tiny_model import VOCAB, write_tiny

from onechip import LLM, SamplingParams
from onechip.engine.buckets import Bucket, BucketTable
from onechip.engine.loop import run_until_idle
from onechip.engine.runner import DeviceRunner, Pending
from onechip.engine.sequence import Plan
from onechip.engine.validate import prepare
from onechip.errors import ConfigError, InvalidRequest, OnechipError
from onechip.llm import Completion
from onechip.model import stack

GOLDEN = Path(__file__).parent / "data" / "golden"
FAMILIES = (
    "gemma3-mini",
    "gemma4-e2b-mini",
    "gemma4-e4b-mini",
    "gemma4-31b-mini",
    "gemma4-26b-a4b-mini",
)
CHUNK = 160  # whole: longer than any golden prompt
PROMPTS = ("", "batch_1/", "batch_2/", "batch_3/")
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def device(llm: LLM) -> DeviceRunner:
    assert isinstance(llm.engine.runner, DeviceRunner)
    return llm.engine.runner


@contextmanager
def chunks(llm: LLM, size: int) -> Iterator[None]:
    before, llm.engine.scheduler.chunk = llm.engine.scheduler.chunk, size
    yield
    llm.engine.scheduler.chunk = before


def ids(values: np.ndarray) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


# Goldens.


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, np.load(GOLDEN / request.param / "golden.npz")


@pytest.fixture(scope="module")
def engine_of(golden: tuple[str, Any]) -> Callable[[int], LLM]:
    """The engine of a page size, with as few programs as the goldens need, compiled side by side."""
    family, _ = golden
    shape = {"dtype": "float32", "chunk_size": CHUNK, "max_seqs": 4, "max_model_len": 256}
    decode = (Bucket(4, 4),) if family in ("gemma4-e2b-mini", "gemma4-26b-a4b-mini") else ()
    score, mixed = Bucket(CHUNK, 4, score=True), Bucket(CHUNK, 4)

    @cache
    def engine(page_size: int) -> LLM:
        made = LLM(str(GOLDEN / family), page_size=page_size, **shape)
        buckets = (score,) if page_size == 4 else (*decode, mixed, score)
        device(made).table = BucketTable(buckets, CHUNK)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(device(made).programs.__getitem__, buckets))
        return made

    return engine


# Pages of 4 tokens cost half a minute of compiling a family.
@pytest.mark.parametrize("page_size", [16, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunk", [1, 7, 16, CHUNK])
def test_logits_are_the_references_at_every_position(
    golden: tuple[str, Any], engine_of: Callable[[int], LLM], page_size: int, chunk: int
):
    _, arrays = golden
    llm = engine_of(page_size)
    with chunks(llm, chunk):
        for name in PROMPTS:
            prompt, logits = ids(arrays[name + "prompt"]), arrays[name + "logits"]
            scored = llm.score(prompt)
            assert scored.shape == logits.shape
            np.testing.assert_allclose(scored, logits, rtol=0, atol=1e-3)
    llm.engine.check_idle()


@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
def test_greedy_tokens_are_the_references(
    golden: tuple[str, Any], engine_of: Callable[[int], LLM], together: bool
):
    _, arrays = golden
    prompts = [ids(arrays[name + "prompt"]) for name in PROMPTS]
    greedy = [ids(arrays[name + "greedy"]) for name in PROMPTS]
    params = [replace(GREEDY, max_tokens=len(tokens)) for tokens in greedy]
    llm = engine_of(16)
    if together:
        answers = llm.generate(prompts, params)
    else:
        answers = [llm.generate([p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    assert [answer.token_ids for answer in answers] == greedy
    llm.engine.check_idle()


@pytest.mark.parametrize(
    "family",
    [
        "gemma3-mini",
        "gemma4-e2b-mini",
        "gemma4-31b-mini",
        pytest.param("gemma4-e4b-mini", marks=pytest.mark.slow),  # a minute of compiling
    ],
)
def test_layers_run_in_loops_are_the_references_too(family: str):
    arrays = np.load(GOLDEN / family / "golden.npz")
    shape = {"dtype": "float32", "chunk_size": 7, "max_seqs": 4, "max_model_len": 256}
    llm = LLM(str(GOLDEN / family), scan_layers="on", **shape)
    device(llm).table = BucketTable((Bucket(16, 4), Bucket(16, 4, score=True)), 7)
    stores = stack.stores(device(llm).shapes.config)
    assert len(device(llm).caches) == len(stores) == 2
    assert max(len(store.owners) for store in stores) > 1
    prompts = [ids(arrays[name + "prompt"]) for name in PROMPTS]
    greedy = [ids(arrays[name + "greedy"]) for name in PROMPTS]
    answers = llm.generate(prompts, [replace(GREEDY, max_tokens=len(tokens)) for tokens in greedy])
    assert [answer.token_ids for answer in answers] == greedy
    scored = llm.score(prompts[0])
    np.testing.assert_allclose(scored, arrays["logits"], rtol=0, atol=1e-3)
    llm.engine.check_idle()


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_loops_over_owners_and_sharers_change_no_token(dtype: Any, tmp_path: Path):
    """Both halves of the stack repeat, each with a layer of full attention: as in the published E2B and E4B."""
    kinds = ["sliding_attention", "full_attention"] * 4
    folder = write_tiny(tmp_path, num_hidden_layers=8, layer_types=kinds, num_kv_shared_layers=4)
    prompts = [list(range(5, 5 + length)) for length in (3, 21, 40)]
    answers: list[Any] = []
    for scan in ("off", "on"):
        llm = LLM(
            folder, dtype=dtype, chunk_size=16, max_seqs=4, max_model_len=64, random_weights=True,
            scan_layers=scan,
        )  # fmt: skip
        config = device(llm).shapes.config
        looped = [(run.start, run.size, run.turns) for run in stack.runs(config) if run.turns > 1]
        assert looped == ([(0, 2, 2), (4, 2, 2)] if scan == "on" else [])
        device(llm).table = BucketTable((Bucket(4, 4), Bucket(16, 4)), 16)
        answers.append([answer.token_ids for answer in llm.generate(prompts, GREEDY)])
    assert answers[0] == answers[1]


def test_experts_are_not_run_in_loops():
    with pytest.raises(
        ConfigError, match="scan_layers is on, but a kernel that reads some experts"
    ):
        LLM(str(GOLDEN / "gemma4-26b-a4b-mini"), scan_layers="on")


# Invariance.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    made = tiny(folder, max_seqs=32)
    runner = device(made)
    kept = [b for b in runner.table.buckets if not b.decode or b.rows in (4, 32)]
    runner.table = BucketTable(tuple(kept), runner.table.chunk)
    return made


def tiny(folder: str, **flags: Any) -> LLM:
    shape = {"dtype": "float32", "page_size": 4, "chunk_size": 32, "max_model_len": 128}
    return LLM(folder, random_weights=True, **{**shape, **flags})


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        request.getfixturevalue("llm").engine.check_idle()


def mixed_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 60 ids, half of them drawn with seeds, some with penalties, bias or log probabilities."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, VOCAB, rng.integers(1, 60)).tolist() for _ in range(count)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 40},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 2},
        {"temperature": 1.3, "top_p": 0.9, "presence_penalty": 0.7},
        {"temperature": 0.8, "min_p": 0.02, "logit_bias": {5: 3.0, 9: -4.0}, "min_tokens": 4},
    ]
    params = [
        SamplingParams(
            max_tokens=4 + i % 17, seed=1000 + i, ignore_eos=True, **kinds[i % len(kinds)]
        )
        for i in range(count)
    ]
    return prompts, params


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Completion]:
    """The 32 requests, each in an engine of its own, so to speak."""
    return [llm.generate([p], [s])[0] for p, s in zip(*mixed_requests(32), strict=True)]


def same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert len(one.logprobs) == len(other.logprobs)
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert (a.token_id, a.top_ids) == (b.token_id, b.top_ids)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_the_requests_differ_from_each_other(alone: list[Completion]):
    assert len({one.token_ids for one in alone}) == 32
    assert max(len(set(one.token_ids)) for one in alone) > 4


def test_company_changes_nothing(llm: LLM, alone: list[Completion]):
    same(llm.generate(*mixed_requests(32)), alone)


def test_several_steps_a_launch_change_nothing(folder: str, llm: LLM):
    """Mixed lengths, stop ids that come in the middle of a launch, draws and penalties; and an abort while it runs."""
    several = tiny(folder, max_seqs=8, decode_steps=4)
    device(several).table = BucketTable((Bucket(8, 8), Bucket(33, 8)), 32)
    several.engine.pace = FixedPace(4)
    _, kinds = mixed_requests(16)
    plain = [replace(k, logprobs=None, stop=(), max_tokens=5 + i) for i, k in enumerate(kinds)]
    prompts = [list(range(9 * i + 5, 9 * i + 8 + i)) for i in range(16)]
    expected = llm.generate(prompts, plain)
    stop = expected[3].token_ids[6]
    plain[3] = replace(plain[3], stop_token_ids=(stop,))
    expected[3] = llm.generate([prompts[3]], [plain[3]])[0]
    seen: set[int] = set()
    for start in range(0, 16, 4):  # few at a time: a launch of several steps needs an empty queue
        part = slice(start, start + 4)
        with watch(several, seen):
            same(several.generate(prompts[part], plain[part]), expected[part])
    assert max(seen) == 4
    requests = [
        prepare(f"r{i}", tuple(prompts[i]), plain[i], several.engine.info, ())[0] for i in range(4)
    ]
    for request in requests:
        several.engine.submit(request)
    events = [event for _ in range(3) for event in several.engine.step()]
    several.engine.abort(requests[1].id)
    found = gather(events + run_until_idle(several.engine))
    assert [found[r.id].finish for r in requests] == ["length", "abort", "length", "stop"]
    for request, answer in zip(requests, expected, strict=False):
        tokens = tuple(found[request.id].tokens)
        assert tokens == answer.token_ids[: len(tokens)]
    several.engine.check_idle()


@contextmanager
def watch(llm: LLM, seen: set[int]) -> Iterator[None]:
    """Note the steps of every launch."""
    runner = device(llm)
    dispatch = runner.dispatch

    def noted(plan: Plan) -> Pending:
        seen.add(plan.steps)
        return dispatch(plan)

    runner.dispatch = noted  # type: ignore[method-assign]
    yield
    runner.dispatch = dispatch  # type: ignore[method-assign]


@pytest.mark.parametrize("chunk", [1, 5])
def test_chunking_changes_nothing(llm: LLM, alone: list[Completion], chunk: int):
    with chunks(llm, chunk):
        same(llm.generate(*mixed_requests(32)), alone)


def test_a_padded_bucket_changes_nothing(llm: LLM, alone: list[Completion]):
    runner = device(llm)
    before = runner.table
    runner.table = BucketTable((Bucket(33, 32),), before.chunk)
    try:
        same(llm.generate(*mixed_requests(8)), alone[:8])
    finally:
        runner.table = before


def test_preemption_changes_nothing(llm: LLM):
    """Text, draws, penalties and log probabilities go on where they were."""
    _, kinds = mixed_requests(8)
    prompts = [list(range(20 * i + 5, 20 * i + 13)) for i in range(8)]
    params = [replace(kind, max_tokens=30) for kind in kinds]
    expected = [llm.generate([p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    pool = llm.engine.scheduler.pages.pools["full"]
    before = llm.engine.stats().preemptions
    taken = pool.take(
        len(pool.free) - 24
    )  # left to eight sequences that begin with 3 pages and end with 10
    try:
        found = llm.generate(prompts, params)
    finally:
        pool.give(taken)
    assert llm.engine.stats().preemptions > before + 3
    same(found, expected)


def test_an_aborted_neighbour_was_never_there(llm: LLM, alone: list[Completion]):
    prompts, params = mixed_requests(16)
    info, outcomes = llm.engine.info, []
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        (request,) = prepare(f"r{index}", prompt, one, info, ())
        llm.engine.submit(request)
    for index in range(0, 16, 2):
        outcomes += llm.engine.step()
        llm.engine.abort(f"r{index}-0")
    found = gather([*outcomes, *run_until_idle(llm.engine)])
    for index in range(1, 16, 2):
        assert tuple(found[f"r{index}-0"].tokens) == alone[index].token_ids


def test_choices_differ_and_the_first_is_that_of_n_1(llm: LLM):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=11, ignore_eos=True)
    choices = llm.generate([[5, 6, 7]], replace(params, n=4))
    assert len({choice.token_ids for choice in choices}) == 4
    assert choices[0] == llm.generate([[5, 6, 7]], params)[0]


def test_unseeded_requests_differ(llm: LLM):
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    answers = llm.generate([[5, 6, 7]] * 4, params)
    assert len({answer.token_ids for answer in answers}) == 4


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_log_probabilities_are_the_models_own(llm: LLM, temperature: float):
    """Not those after bias, penalties or temperature."""
    prompt = [5, 6, 7, 300, 301, 302, 8]
    params = SamplingParams(
        max_tokens=10, temperature=temperature, seed=3, logprobs=5, ignore_eos=True,
        frequency_penalty=0.5, logit_bias={77: 2.0},
    )  # fmt: skip
    (answer,) = llm.generate([prompt], params)
    scores = log_softmax(llm.score([*prompt, *answer.token_ids]))[len(prompt) - 1 :]
    assert len(answer.logprobs) == 10
    for entry, row in zip(answer.logprobs, scores, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
        np.testing.assert_allclose(entry.top_logprobs, np.sort(row)[::-1][:5], atol=1e-4)
        np.testing.assert_allclose(entry.top_logprobs, row[list(entry.top_ids)], atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 32])
@pytest.mark.parametrize("length", [1, 2, 33, 64])
def test_prompt_log_probabilities_predict_each_token_from_those_before(
    llm: LLM, chunk: int, length: int
):
    prompt = np.random.default_rng(length).integers(3, VOCAB, length).tolist()
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3, ignore_eos=True)
    with chunks(llm, chunk):
        (answer,) = llm.generate([prompt], params)
    rows = answer.prompt_logprobs
    assert rows is not None and rows[0] is None and len(rows) == length
    scores = log_softmax(llm.score(prompt))
    for token, entry, row in zip(prompt[1:], rows[1:], scores, strict=False):
        assert entry is not None and entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        np.testing.assert_allclose(entry.top_logprobs, np.sort(row)[::-1][:3], atol=1e-4)


def test_decoding_agrees_with_scoring_the_whole(llm: LLM, alone: list[Completion]):
    """Every greedy token is the best one of a single pass over the text before it: decode equals prefill."""
    prompts, params = mixed_requests(5)
    assert params[0].temperature == 0
    prompt, tokens = prompts[0], list(alone[0].token_ids)
    best = llm.score([*prompt, *tokens]).argmax(-1)[len(prompt) - 1 : -1]
    assert best.tolist() == tokens


@pytest.mark.parametrize(
    "flags",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"kv_dtype": "bfloat16"},
    ],
    ids=lambda flags: " ".join(f"{k}={v}" for k, v in flags.items()),
)
def test_other_dtypes_give_nearly_the_same_distribution(
    llm: LLM, folder: str, flags: dict[str, str]
):
    other = tiny(folder, max_seqs=4, **flags)
    prompt = list(range(40, 70))
    exact, rough = log_softmax(llm.score(prompt)), log_softmax(other.score(prompt))
    off = np.abs(exact - rough).max()
    assert 0 < off < 0.5


# Parameters of sampling, end to end on a model whose logits are all zero.


@contextmanager
def parameters(llm: LLM, change: Callable[[Any], Any]) -> Iterator[None]:
    runner = device(llm)
    before, runner.params = runner.params, change(runner.params)
    try:
        yield
    finally:
        runner.params = before
        # Whatever the changed model wrote goes too, so that a failure here is not the next test's.
        runner.caches = jax.tree.map(jax.numpy.zeros_like, runner.caches)


@pytest.fixture
def zero(llm: LLM) -> Iterator[LLM]:
    with parameters(llm, lambda tree: jax.tree.map(lambda x: jax.numpy.zeros_like(x), tree)):
        yield llm


A, B = 200, 300


def biased(zero: LLM, prompt: Sequence[int] = (5,), bias: Any = None, **values: Any) -> list[int]:
    params = {
        "max_tokens": 9,
        "temperature": 0.0,
        "logit_bias": bias or {A: 50.0, B: 49.0},
        **values,
    }
    (answer,) = zero.generate([list(prompt)], SamplingParams(**params))
    return list(answer.token_ids)


def letters(tokens: Sequence[int]) -> str:
    return "".join({A: "A", B: "B"}.get(token, "?") for token in tokens)


def test_penalties_count_what_was_generated_and_end_with_their_request(zero: LLM):
    assert letters(biased(zero)) == "AAAAAAAAA"
    assert letters(biased(zero, presence_penalty=2.0)) == "ABAAAAAAA"
    assert letters(biased(zero, frequency_penalty=0.3)) == "AAAABABAB"
    assert letters(biased(zero, [A] * 20, presence_penalty=2.0)) == "ABAAAAAAA"
    assert letters(biased(zero)) == "AAAAAAAAA"


def test_a_repetition_penalty_counts_the_prompt_too(zero: LLM):
    bias = {A: 3.0, B: 2.5}
    assert biased(zero, [5], bias, repetition_penalty=1.5)[0] == A
    assert biased(zero, [A], bias, repetition_penalty=1.5)[0] == B


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0}, {"temperature": 1e-6}, {"temperature": 1e-4}, {"top_k": 1},
        {"top_p": 1e-9}, {"min_p": 1.0},
    ],
)  # fmt: skip
def test_every_way_to_be_greedy_is_greedy(zero: LLM, values: dict[str, float]):
    assert letters(biased(zero, **{"temperature": 2.0, "seed": 1, **values})) == "AAAAAAAAA"


def test_a_sequence_draws_anew_at_every_position(zero: LLM):
    """100 draws from ten equal ids, under 20 seeds: even counts, and no period of up to 20."""
    ten = range(60, 70)  # no stop id among them
    params = [
        SamplingParams(max_tokens=100, seed=seed, logit_bias=dict.fromkeys(ten, 100.0))
        for seed in range(20)
    ]
    rows = np.array([a.token_ids for a in zero.generate([[5]] * 20, params)])
    for sample in (rows.ravel(), *rows[:3]):
        counts = np.bincount(sample - 60, minlength=10)
        expected = sample.size / 10
        assert ((counts - expected) ** 2 / expected).sum() < 33.7  # chi-square, 9 degrees, p > 1e-4
    for period in range(1, 21):
        assert not (rows[:, period:] == rows[:, :-period]).all(axis=1).any()


@pytest.mark.parametrize("stop", [1, 106, 50])
def test_each_of_the_models_stop_ids_stops(zero: LLM, stop: int):
    params = SamplingParams(max_tokens=8, temperature=0.0, logit_bias={stop: 100.0})
    (answer,) = zero.generate([[5]], params)
    assert (answer.token_ids, answer.finish_reason) == ((stop,), "stop")
    (answer,) = zero.generate([[5]], replace(params, ignore_eos=True))
    assert (answer.token_ids, answer.finish_reason) == ((stop,) * 8, "length")


@pytest.mark.parametrize("prompt", [1, 40])
def test_min_tokens_holds_every_stop_id_back(zero: LLM, prompt: int):
    bias = {106: 100.0, 1: 99.0, 50: 98.0, 77: 97.0, A: 5.0}
    params = SamplingParams(
        max_tokens=10, min_tokens=5, temperature=0.0, logit_bias=bias, stop_token_ids=(77,)
    )
    (answer,) = zero.generate([[7] * prompt], params)
    assert (answer.token_ids, answer.finish_reason) == ((A,) * 5 + (106,), "stop")


def test_only_allowed_ids_come(zero: LLM):
    params = SamplingParams(
        max_tokens=60, seed=1, allowed_token_ids=(9, 31, 32, 511), ignore_eos=True
    )
    (answer,) = zero.generate([[5]], params)
    assert set(answer.token_ids) == {9, 31, 32, 511}


def test_allowed_ids_that_are_all_held_back_are_refused(llm: LLM):
    """Nothing would be left to choose."""
    params = SamplingParams(allowed_token_ids=(1, 106), min_tokens=1)
    with pytest.raises(InvalidRequest, match="min_tokens"):
        llm.generate([[5]], params)
    assert llm.generate([[5]], replace(params, ignore_eos=True))[0].token_ids


# A request that goes wrong.


def outcomes(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Outcome]:
    keys = [f"r{index}" for index in range(len(prompts))]
    for key, prompt in zip(keys, prompts, strict=True):
        (request,) = prepare(key, prompt, params, llm.engine.info, ())
        llm.engine.submit(request)
    found = gather(run_until_idle(llm.engine))
    return [found[f"{key}-0"] for key in keys]


BAD = 333


def poison(tree: Any) -> Any:
    """Token BAD's per-layer input is NaN: whoever has it in the prompt has NaN in every layer from then on."""
    return {**tree, "ple_table": tree["ple_table"].at[BAD].set(np.nan)}


@pytest.mark.parametrize("place", ["decoding beside", "in the same pages later"])
def test_a_request_that_is_not_finite_fails_alone(llm: LLM, place: str):
    rng = np.random.default_rng(3)
    good = [rng.integers(3, 300, n).tolist() for n in (3, 9, 21, 30)]
    params = replace(GREEDY, max_tokens=8, logit_bias={BAD: -100.0})
    expected = [tuple(one.tokens) for one in outcomes(llm, good, params)]
    bad = [[7, BAD, 8], [BAD] * 31]
    with parameters(llm, poison):
        if place == "decoding beside":
            found = outcomes(llm, [bad[0], *good, bad[1]], params)
            failed, found = [found[0], found[-1]], found[1:-1]
        else:
            failed = outcomes(llm, bad * 8, params)
            found = outcomes(llm, good, params)
    assert {(one.finish, one.error_code) for one in failed} == {("error", "non_finite_logits")}
    assert [tuple(one.tokens) for one in found] == expected


def test_a_failed_call_does_not_disturb_the_next(llm: LLM):
    params = replace(GREEDY, max_tokens=8)
    expected = llm.generate([[5, 6]], params)
    with parameters(llm, poison), pytest.raises(OnechipError, match="not finite"):
        llm.generate([[4] * 20, [7, BAD], [8]], params)
    llm.engine.check_idle()
    assert llm.generate([[5, 6]], params) == expected


# The surface.


def test_more_prompts_than_the_queue_holds_are_worked_off(llm: LLM):
    before, llm.engine.max_waiting = llm.engine.max_waiting, 3
    try:
        answers = llm.generate([[5 + i] for i in range(50)], replace(GREEDY, max_tokens=2))
    finally:
        llm.engine.max_waiting = before
    assert [len(answer.token_ids) for answer in answers] == [2] * 50


def test_a_bad_request_among_good_ones_leaves_nothing_behind(llm: LLM):
    with pytest.raises(InvalidRequest, match="512"):
        llm.generate([[5], [512]], GREEDY)


def test_scoring_a_single_token_is_the_first_row_of_more(llm: LLM):
    whole = llm.score([9, 10, 11])
    assert whole.shape == (3, VOCAB)
    np.testing.assert_allclose(llm.score([9]), whole[:1], atol=1e-4)


def test_text_without_a_tokenizer_is_refused(llm: LLM):
    with pytest.raises(ConfigError, match="token ids"):
        llm.generate(["hello"])


def test_an_unknown_keyword_is_named(folder: str):
    with pytest.raises(ConfigError, match="unknown keyword max_seq;"):
        LLM(folder, random_weights=True, max_seq=3)


def test_params_must_match_prompts(llm: LLM):
    with pytest.raises(ConfigError, match="2 prompts but 1"):
        llm.generate([[5], [6]], [GREEDY])
