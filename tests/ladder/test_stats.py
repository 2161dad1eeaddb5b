"""Statistics truth: known differences are covered as often as promised, and everything seeded repeats exactly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onechip.ladder import stats


def paired(seed: int, questions: int = 200) -> tuple[np.ndarray, np.ndarray, float]:
    """Right or wrong of two servers on the same questions: hardness is shared; the true difference is known."""
    rng = np.random.default_rng(seed)
    hard = rng.uniform(0.55, 0.95, questions)
    ours, theirs = hard + 0.04, hard
    draw, other = rng.uniform(size=(2, questions))
    same = rng.uniform(size=questions) < 0.7  # most answers agree: the same draw decides both
    return (draw < ours) * 1.0, (np.where(same, draw, other) < theirs) * 1.0, 0.04


def test_the_range_covers_the_true_difference_93_to_97_times_in_100():
    covered = 0
    for seed in range(500):
        ours, theirs, true = paired(seed)
        found = stats.paired_difference(ours, theirs, seed=seed)
        covered += found.low <= true <= found.high
    assert 0.93 <= covered / 500 <= 0.97, covered / 500


def test_the_range_of_a_ratio_covers_it():
    covered = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        ours, theirs = rng.normal(130, 5, 60), rng.normal(100, 5, 60)
        found = stats.ratio_of_medians(ours, theirs, seed=seed, resamples=500)
        covered += found.low <= 1.3 <= found.high
    assert 0.92 <= covered / 300 <= 0.98, covered / 300


def test_a_seed_repeats_exactly_and_another_does_not():
    ours, theirs, _ = paired(1)
    first = stats.paired_difference(ours, theirs, seed=3)
    assert stats.paired_difference(ours, theirs, seed=3) == first
    assert stats.paired_difference(ours, theirs, seed=4) != first


def test_pairs_cancel_what_makes_questions_hard():
    rng = np.random.default_rng(0)
    hard = rng.normal(0, 10, 400)
    found = stats.paired_difference(hard + 1 + rng.normal(0, 0.1, 400), hard)
    assert 0.9 < found.low < found.high < 1.1


def test_level_is_a_range_that_includes_no_difference():
    assert stats.Estimate(0.1, -0.1, 0.3).level(0)
    assert not stats.Estimate(1.2, 1.1, 1.3).level(1)


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 9)), min_size=1, max_size=30))
def test_counts_are_repetitions(pairs: list[tuple[float, int]]):
    values, counts = [v for v, _ in pairs], [c for _, c in pairs]
    spelled = [v for v, c in pairs for _ in range(c)]
    assert stats.percentiles(values, counts) == stats.percentiles(spelled)


def test_small_things():
    assert stats.spread([100, 149]) == pytest.approx(0.49)
    assert stats.geometric_mean([2, 8]) == pytest.approx(4)
    assert stats.geometric_mean([0, 8]) == 0
    assert stats.percentiles([]) == {}
