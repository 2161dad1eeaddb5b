"""The device's sampler against a plain numpy one: the same kept set, the same odds, and no row that sees another."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onechip.engine import batch as flag
from onechip.engine.batch import BatchLayout
from onechip.engine.buckets import Bucket
from onechip.engine.grammar import words_of
from onechip.engine.runner import _pack_sampling, row_flags
from onechip.engine.sampler import in_tiles, log_probabilities, sample
from onechip.engine.state import SlotState, admit, count_tokens, empty_state, slot_rows
from onechip.kernels.bits import mask_bytes, unpack_bits
from onechip.request import Request, SamplingParams

SIZES = [
    300,
    512,
    262_144,
    20_001,
]  # below one page of blocks, a multiple of 128, Gemma's, and no multiple
SLOTS = 32


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 64, "seed": 1, **values})


def packed(
    rows: Sequence[SamplingParams], length: int | Sequence[int] = 10, prompt: int = 10
) -> dict[str, Any]:
    """Per-row fields as the runner packs them: row r in slot r, its next token at position `length`."""
    _, fields = BatchLayout(Bucket(len(rows) + 1, len(rows)), 1, 1).pack()
    lengths = [length] * len(rows) if isinstance(length, int) else length
    for index, one in enumerate(rows):
        fields["slot"][index] = index
        fields["kv_len"][index] = lengths[index]
        fields["prompt_len"][index] = prompt
        fields["flags"][index] = row_flags(one)
        _pack_sampling(fields, index, prompt, one)
    return {
        name: np.array(value) for name, value in fields.items() if value.shape[:1] == (len(rows),)
    }


def state_of(rows: Sequence[SamplingParams], vocab: int, stop_ids: Sequence[int] = ()) -> SlotState:
    """Row r's parameters in slot r; as in the runner, plain rows need no slot."""
    state = blank(vocab)
    for slot, one in enumerate(rows):
        if row_flags(one) & ~(flag.SAMPLE | flag.DRAW | flag.LOGPROBS):
            request = Request("r", (0,), one, tuple(stop_ids))
            state = _admit(state, jnp.int32(slot), slot_rows(request, vocab))
    return state


@cache
def blank(vocab: int) -> SlotState:
    return empty_state(SLOTS, vocab)


def counted(
    state: SlotState, slot: int, prompt: Sequence[int] = (), made: Sequence[int] = ()
) -> SlotState:
    """The state after these tokens went through steps of that slot."""
    tokens, slots = np.zeros(64, np.int32), np.full(64, SLOTS, np.int32)
    tokens[: len(prompt) + len(made)] = [*prompt, *made]
    slots[: len(prompt) + len(made)] = slot
    counts = _count(state, slots, tokens, np.arange(64) < len(prompt))
    return replace(state, counts=counts)


_sample, _admit, _count = jax.jit(sample), jax.jit(admit), jax.jit(count_tokens)


def draw(
    logits: np.ndarray, rows: Sequence[SamplingParams], state: SlotState | None = None, **where: Any
) -> np.ndarray:
    """The tokens of these rows. Batches are 1 or 32 wide: others are filled up with copies, to compile less."""
    state = state_of(rows, logits.shape[1]) if state is None else state
    fields, width = packed(rows, **where), 1 if len(rows) == 1 else SLOTS
    take = np.minimum(np.arange(width), len(rows) - 1)
    fields = {name: values[take] for name, values in fields.items()}
    return np.asarray(_sample(logits[take], fields, state))[: len(rows)]


# The reference: float64, one row, written from the documentation of SamplingParams.


def kept(logits: np.ndarray, one: SamplingParams) -> dict[int, float]:
    """The tokens that may be drawn, with their probabilities; equal logits are taken by id."""
    scaled = logits.astype(np.float64) / one.temperature
    chance = np.exp(scaled - scaled.max())
    order = np.lexsort((np.arange(len(chance)), -chance))
    if one.top_k > 0:
        order = order[: one.top_k]
    share = chance[order] / chance[order].sum()
    order = order[np.concatenate([[0.0], np.cumsum(share)[:-1]]) < one.top_p]
    order = order[chance[order] >= one.min_p * chance.max()]
    total = chance[order].sum()
    return {int(token): chance[token] / total for token in order}


def many(logits: np.ndarray, one: SamplingParams, count: int) -> np.ndarray:
    """`count` draws of one row's distribution, each under a seed of its own, 32 rows a call."""
    rounds = -(-count // SLOTS)
    vocab = len(logits)
    state = state_of([one] * SLOTS, vocab)
    block = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (SLOTS, vocab))
    found: list[np.ndarray] = []
    for index in range(rounds):
        rows = packed([replace(one, seed=index * SLOTS + i) for i in range(SLOTS)])
        found.append(np.asarray(_sample(block, rows, state)))
    return np.concatenate(found)[:count]


def check_odds(tokens: np.ndarray, odds: Mapping[int, float]) -> None:
    """No token outside the kept set, and counts that agree with it (chi-square of the well-filled cells)."""
    assert set(tokens.tolist()) <= odds.keys()
    cells = {token: share * len(tokens) for token, share in odds.items()}
    large = {token: expected for token, expected in cells.items() if expected >= 8}
    seen = {token: int((tokens == token).sum()) for token in large}
    statistic = sum((seen[t] - e) ** 2 / e for t, e in large.items())
    rest = len(tokens) - sum(large.values())
    if rest >= 8:
        statistic += (len(tokens) - sum(seen.values()) - rest) ** 2 / rest
    cells_used = len(large) + (rest >= 8)
    # Five deviations of the chi-square's own: a fixed seed never fails by chance, a wrong filter fails by far.
    assert statistic < cells_used + 5 * np.sqrt(2 * cells_used) + 10


def peaked(vocab: int, seed: int = 0, spread: float = 4.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)


FILTERS = [
    {"top_k": 5},
    {"top_k": 64},
    {"top_k": 65},
    {"top_k": 200},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 100, "top_p": 0.9, "min_p": 0.01},
    {"top_k": 64, "top_p": 0.95, "temperature": 0.7},
    {"top_p": 0.9, "temperature": 1.7},
    {},
]


@pytest.mark.parametrize("vocab", [300, 20_001])
@pytest.mark.parametrize("values", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(vocab: int, values: dict[str, Any]):
    one = params(**values)
    logits = peaked(vocab)
    check_odds(many(logits, one, 1024), kept(logits, one))


@pytest.mark.parametrize("values", [{"top_k": 64, "top_p": 0.95}, {"top_p": 0.6}, {}], ids=str)
def test_draws_follow_the_filtered_distribution_over_gemmas_vocabulary(values: dict[str, Any]):
    one = params(**values)
    logits = peaked(262_144)
    check_odds(many(logits, one, 256), kept(logits, one))


@pytest.mark.parametrize("vocab", [300, 20_001])
@pytest.mark.parametrize(
    "values",
    [{"top_k": 3}, {"top_k": 70}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_p": 0.999}],
    ids=str,
)
def test_exactly_the_kept_tokens_can_be_drawn(vocab: int, values: dict[str, Any]):
    """A nearly flat distribution, so that every kept token turns up and the first left out would too."""
    logits = np.full(vocab, -40.0, np.float32)
    support = np.random.default_rng(1).permutation(vocab)[:100]
    logits[support] = np.linspace(0, -2, 100)
    one = params(**values)
    odds = kept(logits, one)
    assert set(many(logits, one, 60 * len(odds)).tolist()) == set(odds)


@pytest.mark.parametrize("vocab", SIZES)
def test_greedy_takes_the_best_and_the_lowest_id_of_equals(vocab: int):
    logits = peaked(vocab)
    logits[[17, 250, vocab - 1]] = 60.0
    for one in (params(temperature=0.0), params(temperature=1e-4), params(top_k=1)):
        assert draw(logits[None], [one]).tolist() == [17]


@pytest.mark.parametrize("vocab", SIZES)
def test_the_last_id_can_be_drawn(vocab: int):
    logits = np.zeros((1, vocab), np.float32)
    logits[0, vocab - 1] = 80.0
    assert draw(logits, [params()]).tolist() == [vocab - 1]
    assert draw(logits, [params(top_k=100, top_p=0.5)]).tolist() == [vocab - 1]


@pytest.mark.parametrize("vocab", SIZES)
def test_a_flat_distribution_reaches_the_whole_vocabulary(vocab: int):
    tokens = many(np.zeros(vocab, np.float32), params(), 128)
    assert tokens.min() < vocab / 8 and tokens.max() > vocab * 7 / 8
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert len(set(tokens.tolist())) > 90


@pytest.mark.parametrize("temperature", [1.01e-4, 1e-3, 0.5, 2.0])
@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e5])
def test_no_temperature_makes_a_token_that_was_not_likely(temperature: float, scale: float):
    logits = (np.random.default_rng(0).normal(0, 1, 512) * scale).astype(np.float32)
    tokens = many(logits, params(temperature=temperature), 96)
    assert ((tokens >= 0) & (tokens < 512)).all()
    likely = [
        t for t, share in kept(logits, params(temperature=temperature)).items() if share > 1e-7
    ]
    assert set(tokens.tolist()) <= set(likely)


def test_temperature_two_gives_the_better_of_two_its_share():
    logits = np.full(512, -100.0, np.float32)
    logits[[7, 8]] = 50.0, 49.0
    tokens = many(logits, params(temperature=2.0), 1024)
    assert set(tokens.tolist()) == {7, 8}
    assert 0.58 < (tokens == 7).mean() < 0.66  # e^0.5 / (1 + e^0.5) = 0.622


def random_params(rng: np.random.Generator) -> SamplingParams:
    return params(
        temperature=float(rng.choice([0.0, 0.7, 1.0, 1.8])),
        top_k=int(rng.choice([0, 1, 10, 64, 90])),
        top_p=float(rng.choice([0.4, 0.95, 1.0])),
        min_p=float(rng.choice([0.0, 0.0, 0.1])),
        presence_penalty=float(rng.choice([0.0, 0.0, 1.0])),
        logit_bias={3: 2.0} if rng.random() < 0.3 else {},
        allowed_token_ids=tuple(range(0, 250, 3)) if rng.random() < 0.2 else None,
        min_tokens=int(rng.choice([0, 3])),
        seed=int(rng.integers(2**63)),
    )


@pytest.mark.parametrize("vocab", [300, 20_001])
def test_a_row_draws_the_same_alone_and_anywhere_among_others(vocab: int):
    rng = np.random.default_rng(5)
    rows = [random_params(rng) for _ in range(SLOTS)]
    logits = rng.normal(0, 3, (SLOTS, vocab)).astype(np.float32)
    lengths = rng.integers(10, 500, SLOTS).tolist()
    together = draw(logits, rows, state_of(rows, vocab, (3, 6)), length=lengths)
    assert len(set(together.tolist())) > 20
    order = rng.permutation(SLOTS)
    shuffled = [rows[i] for i in order]
    moved = draw(
        logits[order],
        shuffled,
        state_of(shuffled, vocab, (3, 6)),
        length=[lengths[i] for i in order],
    )
    assert moved.tolist() == together[order].tolist()
    for i in range(0, SLOTS, 5):
        state = state_of([rows[i]], vocab, (3, 6))
        assert draw(logits[i : i + 1], [rows[i]], state, length=[lengths[i]])[0] == together[i]


def test_draws_depend_on_all_of_seed_and_position_and_on_nothing_else():
    logits = np.zeros((8, 20_001), np.float32)
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, 2**40]
    rows = [params(seed=seed) for seed in seeds]
    first = draw(logits, rows)
    assert len(set(first.tolist())) == len(seeds)
    assert draw(logits, rows).tolist() == first.tolist()
    later = [draw(logits, rows, length=length).tolist() for length in range(11, 40)]
    assert len({tuple(row) for row in later}) == len(later)
    for period in range(1, 15):
        assert all(later[i] != later[i + period] for i in range(len(later) - period))


BROKEN = [np.nan, np.inf, "all -inf", "all nan"]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("vocab", [300, 20_001])
def test_a_row_that_is_not_finite_is_reported_and_its_neighbours_are_untouched(
    vocab: int, broken: Any
):
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, (6, vocab)).astype(np.float32)
    rows = [params(temperature=t, seed=i) for i, t in enumerate([0, 1, 0, 1, 1.5, 1])]
    good = draw(logits, rows)
    hurt = logits.copy()
    for row in (2, 3):
        if isinstance(broken, str):
            hurt[row] = np.nan if broken == "all nan" else -np.inf
        else:
            hurt[row, 123] = broken
    found = draw(hurt, rows)
    assert found[[2, 3]].tolist() == [-1, -1]
    assert np.delete(found, [2, 3]).tolist() == np.delete(good, [2, 3]).tolist()


# Bias, penalties and bans.


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_greedy_after_bias_and_penalties_is_the_references(data: st.DataObject):
    vocab = 300
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    logits = rng.normal(0, 2, vocab).astype(np.float32)
    ids = st.integers(0, vocab - 1)
    prompt, made = data.draw(st.lists(ids, max_size=20)), data.draw(st.lists(ids, max_size=20))
    common = np.argsort(-logits)[:3].tolist()  # so that penalties matter
    prompt += data.draw(st.lists(st.sampled_from(common), max_size=4))
    made += data.draw(st.lists(st.sampled_from(common), max_size=4))
    one = params(
        temperature=0.0,
        logit_bias=data.draw(st.dictionaries(ids, st.floats(-5, 5, width=32), max_size=4)),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.9, -0.7])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.3, -0.2])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.6, 0.7])),
        allowed_token_ids=data.draw(st.none() | st.lists(ids, min_size=1).map(tuple)),
    )
    expected = logits.astype(np.float64)
    for token, value in one.logit_bias.items():
        expected[token] += value
    for token in {*prompt, *made}:
        up = expected[token] > 0
        expected[token] *= 1 / one.repetition_penalty if up else one.repetition_penalty
    for token in set(made):
        expected[token] -= one.presence_penalty + one.frequency_penalty * made.count(token)
    if one.allowed_token_ids is not None:
        banned = np.setdiff1d(np.arange(vocab), one.allowed_token_ids)
        expected[banned] = -np.inf
    best = np.flatnonzero(expected >= expected.max() - 1e-4)
    state = counted(state_of([one], vocab), 0, prompt, made)
    assert draw(logits[None], [one], state)[0] in best


A, B = 200, 100


def run_greedy(one: SamplingParams, prompt: Sequence[int], state: SlotState, steps: int = 9) -> str:
    """Generate from logits that are always zero; the tokens' counts kept as the step keeps them."""
    made: list[int] = []
    for _ in range(steps):
        now = counted(state, 0, prompt, made)
        made.append(int(draw(np.zeros((1, 300), np.float32), [one], now)[0]))
    return "".join({A: "A", B: "B"}.get(token, "?") for token in made)


@pytest.mark.parametrize(
    ("values", "prompt", "expected"),
    [
        ({}, [5], "AAAAAAAAA"),
        ({"presence_penalty": 2.0}, [5], "ABAAAAAAA"),
        ({"frequency_penalty": 0.3}, [5], "AAAABABAB"),
        ({"presence_penalty": 2.0}, [A] * 9, "ABAAAAAAA"),
        ({"frequency_penalty": 0.3}, [A] * 9, "AAAABABAB"),
    ],
)
def test_presence_and_frequency_count_what_was_generated(
    values: dict[str, float], prompt: list[int], expected: str
):
    one = params(temperature=0.0, logit_bias={A: 50.0, B: 49.0}, **values)
    assert run_greedy(one, prompt, state_of([one], 300)) == expected


def test_a_new_sequence_in_a_slot_starts_without_counts_bias_or_masks():
    old = params(
        temperature=0.0, logit_bias={A: 90.0}, presence_penalty=2.0, allowed_token_ids=(A,)
    )
    state = counted(state_of([old], 300, (B,)), 0, [B] * 5, [A] * 5)
    new = params(temperature=0.0, logit_bias={B: 1.0}, repetition_penalty=1.5)
    rows = slot_rows(Request("new", (5,), new), 300)
    state = _admit(state, jnp.int32(0), rows)
    assert draw(np.zeros((1, 300), np.float32), [new], state).tolist() == [B]
    # A plain request is not even written to the slot: whatever the old one left must not be read.
    plain = params(temperature=0.0)
    dirty = counted(state_of([old], 300, (B,)), 0, [B] * 5, [A] * 5)
    logits = np.zeros((1, 300), np.float32)
    logits[0, B] = 1.0
    assert draw(logits, [plain], dirty).tolist() == [B]


def test_rows_of_one_step_have_biases_counts_and_masks_of_their_own():
    one = params(temperature=0.0, logit_bias={A: 5.0}, presence_penalty=2.0)
    two = params(temperature=0.0, logit_bias={A: 5.0})
    three = params(temperature=0.0, allowed_token_ids=(44,))
    state = counted(state_of([one, two, three], 300), 0, [], [A])
    state = replace(state, counts=state.counts.at[1].set(state.counts[0]))
    logits = np.zeros((3, 300), np.float32)
    logits[:, B] = 4.0
    assert draw(logits, [one, two, three], state).tolist() == [B, A, 44]


@pytest.mark.parametrize(("length", "stops"), [(10, False), (12, False), (13, True), (400, True)])
def test_stop_ids_are_banned_until_min_tokens_are_generated(length: int, stops: bool):
    one = params(temperature=0.0, min_tokens=3)
    logits = np.zeros((1, 300), np.float32)
    logits[0, [6, 7, 299]], logits[0, 8] = [3.0, 2.5, 2.2], 2.0
    state = state_of([one], 300, (6, 7, 299))
    assert draw(logits, [one], state, length=length).tolist() == [6 if stops else 8]


def test_a_penalty_never_brings_a_banned_token_back():
    one = params(
        temperature=0.0, allowed_token_ids=(5, 6), logit_bias={9: 100.0}, repetition_penalty=0.1
    )
    state = counted(state_of([one], 300), 0, [9], [9])
    assert draw(np.zeros((1, 300), np.float32), [one], state)[0] in (5, 6)


# Log probabilities.


@pytest.mark.parametrize("vocab", SIZES)
def test_log_probabilities_are_exact_and_sorted(vocab: int):
    logits = peaked(vocab)[None].repeat(2, 0)
    logits[1] += 7
    logits[1, :3] = 20.0  # equals: by id
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True))
    expected -= wide.max(-1, keepdims=True)
    token = np.array([5, vocab - 1])
    chosen, top_ids, top = jax.jit(log_probabilities)(logits, token, jnp.bool_(True))
    np.testing.assert_allclose(chosen, expected[[0, 1], token], atol=2e-5)
    for row in range(2):
        order = np.lexsort((np.arange(vocab), -logits[row]))[:20]
        assert np.asarray(top_ids[row]).tolist() == order.tolist()
        np.testing.assert_allclose(top[row], expected[row, order], atol=2e-5)


def test_log_probabilities_of_a_failed_row_do_not_hurt_the_next():
    logits = np.zeros((2, 300), np.float32)
    logits[0] = np.nan
    chosen, _, top = jax.jit(log_probabilities)(
        jnp.asarray(logits), jnp.array([-1, 4]), jnp.bool_(True)
    )
    np.testing.assert_allclose(chosen[1], -np.log(300), rtol=1e-5)
    assert np.isfinite(top[1]).all()


def test_a_greedy_step_pays_for_no_sampling():
    """Everything beyond the argmax sits in a branch that a greedy batch does not take."""
    rows = packed([params(temperature=0.0)] * 4)
    traced = jax.make_jaxpr(sample)(np.zeros((4, 20_001), np.float32), rows, state_of([], 20_001))
    outside = {equation.primitive.name for equation in traced.jaxpr.eqns}
    assert not outside & {"sort", "top_k", "cumsum", "exp", "scatter", "scatter-add", "gather"}
    assert not np.any(rows["flags"] & ~flag.SAMPLE)


# Grammar masks.


@pytest.mark.parametrize("vocab", [300, 1024, 4096])
def test_bits_are_spread_alike_everywhere(vocab: int) -> None:
    """A TPU's way needs whole tiles of bytes, and falls back to the other without."""
    bits = np.random.default_rng(1).integers(0, 256, (3, mask_bytes(vocab)), np.uint8)
    wanted = np.unpackbits(bits, axis=1, bitorder="little")[:, :vocab] == 1
    for platform in ("cpu", "tpu"):
        assert (np.asarray(unpack_bits(jnp.asarray(bits), vocab, platform)) == wanted).all()


@pytest.mark.parametrize("count", [8, 16, 20])
def test_rows_in_tiles_are_the_same_rows(count: int) -> None:
    """A TPU samples eight rows at a time, through a loop; other counts all at once."""
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(count, 300)).astype(np.float32)
    rows = [SamplingParams(temperature=float(i % 3), seed=i, top_k=i) for i in range(count)]
    fields, state = packed(rows), jax.tree.map(jnp.asarray, state_of(rows, 300))
    fields = {name: values[:count] for name, values in fields.items()}

    def chosen(logits: jax.Array, rows: Any) -> jax.Array:
        return sample(logits, rows, state)

    found = jax.jit(lambda *a: in_tiles(chosen, "tpu", *a))(logits, fields)
    assert np.asarray(found).tolist() == np.asarray(_sample(logits, fields, state)).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_chooses_as_the_same_allowed_ids_do(temperature: float) -> None:
    draws = np.random.default_rng(5)
    logits = draws.normal(size=(SLOTS, 300)).astype(np.float32)
    sets = [draws.choice(300, 1 + row * 9, replace=False) for row in range(SLOTS)]
    rows = [
        SamplingParams(
            temperature=temperature, seed=row, top_p=0.9, allowed_token_ids=tuple(map(int, ids))
        )
        for row, ids in enumerate(sets)
    ]
    wanted = draw(logits, rows)
    free = [replace(one, allowed_token_ids=None) for one in rows]
    fields = packed(free)
    fields["flags"] = fields["flags"] | np.where(np.arange(SLOTS) % 2, flag.GRAMMAR, 0)
    masks = np.stack([words_of(map(int, ids), 300).view(np.uint8) for ids in sets])
    found = np.asarray(_sample(logits, fields, state_of(free, 300), masks))
    assert found[1::2].tolist() == wanted[1::2].tolist()
    assert found[::2].tolist() == draw(logits, free)[::2].tolist(), "unflagged rows are free"
