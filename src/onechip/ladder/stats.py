"""What a list of numbers says, and how sure one may be of a difference.

Owns medians, percentiles, spread, geometric means and the bootstrap. Knows nothing of servers. What is random takes
a seed and repeats exactly.

The bootstrap draws the data again with replacement, 2,000 times, and takes the middle 95% of what the statistic came
to (the percentile range). For paired data (the same question to two servers) whole pairs are drawn, so that what makes
a question hard cancels. On the median of a handful of repeats the range is honest about what was seen and blind to what
was not: with five repeats it covers the truth less often than 95%.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
PERCENTILES = (50, 90, 95, 99)

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% range."""

    value: float
    low: float
    high: float

    def level(self, neutral: float) -> bool:
        """Whether the range includes the value that means no difference: 0 for a difference, 1 for a ratio."""
        return self.low <= neutral <= self.high


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def percentiles(values: Sequence[float], counts: Sequence[int] | None = None) -> dict[str, float]:
    """p50 to p99, linear between neighbours (numpy's default, as in vLLM's bench); `counts` repeats each value."""
    if not len(values):
        return {}
    all_values = np.asarray(values, np.float64)
    if counts is not None:
        all_values = np.repeat(all_values, counts)
    found = np.percentile(all_values, PERCENTILES)
    return {f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}


def spread(values: Sequence[float]) -> float:
    """(max - min) / min; 0.05 is five percent."""
    low = min(values)
    return (max(values) - low) / low if low > 0 else float("inf")


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values; 0 when one is 0."""
    array = np.asarray(values, np.float64)
    return float(np.exp(np.mean(np.log(array)))) if (array > 0).all() else 0.0


def paired_difference(
    ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """Mean of ours - theirs over pairs, with the paired bootstrap's range."""
    differences = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    means = _resampled(differences, np.random.default_rng(seed), resamples, np.mean)
    return Estimate(float(differences.mean()), *_middle(means))


def ratio_of_medians(
    ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """median(ours) / median(theirs) of two independent sets of repeats."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    rng = np.random.default_rng(seed)
    above = _resampled(a, rng, resamples, np.median)
    below = _resampled(b, rng, resamples, np.median)
    return Estimate(float(np.median(a) / np.median(b)), *_middle(above / below))


def _resampled(
    values: Array, rng: np.random.Generator, resamples: int, statistic: Callable[..., Array]
) -> Array:
    """`statistic` of each resample, [resamples]; a block at a time, so that 10,000 questions need no gigabyte."""
    block = max(1, 2_000_000 // len(values))
    parts = [
        statistic(
            values[rng.integers(0, len(values), (min(block, resamples - at), len(values)))], axis=1
        )
        for at in range(0, resamples, block)
    ]
    return np.concatenate(parts)


def _middle(values: Array) -> tuple[float, float]:
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)
