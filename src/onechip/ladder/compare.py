"""Two records of the same work, and whether the difference is one.

Owns what may be compared, and which statistic says it. Ours is the first record, theirs the second.

- Speed: our figure over theirs, cell by cell, for cells of equal workload that were ok in both. The range resamples the
  repeats of each side (`stats`). 1 in the range: level.
- Evals: the mean of our right minus their right over the questions that both answered, by the paired bootstrap, with
  the questions that flipped. 0 in the range: level. A failed request counts as not right, as in the totals.
- Texts of `bench one`: how many of the six answers are equal.

Records that share no work are refused, with the field that differs. Work that only one of them has is named.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onechip.ladder import figures, stats
from onechip.ladder.one import text_equality
from onechip.ladder.record import Cell, Eval, Item, Record, RecordError, Workload
from onechip.ladder.stats import RESAMPLES, Estimate
from onechip.ladder.tables import label


@dataclass(frozen=True)
class CellComparison:
    """Of one workload: tok/s ours over theirs (more is better), and medians of latencies ours over theirs."""

    workload: Workload
    ours: float
    theirs: float
    ratio: Estimate
    latencies: dict[str, Estimate]

    @property
    def level(self) -> bool:
        return self.ratio.level(1.0)


@dataclass(frozen=True)
class EvalComparison:
    """Of one eval: accuracies over the `n` questions in both, their difference, and the ids that flipped."""

    task: str
    n: int
    ours: float
    theirs: float
    difference: Estimate
    won: tuple[str, ...]
    lost: tuple[str, ...]

    @property
    def level(self) -> bool:
        return self.difference.level(0.0)


@dataclass(frozen=True)
class Comparison:
    """`skipped` says what was not compared and why."""

    cells: tuple[CellComparison, ...]
    evals: tuple[EvalComparison, ...]
    texts: dict[str, int] | None
    skipped: tuple[str, ...]


def compare(
    ours: Record, theirs: Record, *, seed: int = 0, resamples: int = RESAMPLES
) -> Comparison:
    """Everything that both measured. Raises RecordError when that is nothing."""
    skipped: list[str] = []
    cells: list[CellComparison] = []
    for cell in ours.cells:
        other = theirs.cell(cell.workload)
        if other is None:
            skipped.append(f"{label(cell.workload)}: in the first record only")
        elif reason := _unfit(cell, other):
            skipped.append(f"{label(cell.workload)}: {reason}")
        else:
            cells.append(compare_cells(cell, other, seed, resamples))
    skipped += [
        f"{label(cell.workload)}: in the second record only"
        for cell in theirs.cells
        if ours.cell(cell.workload) is None
    ]
    evals = _evals(ours, theirs, seed, resamples, skipped)
    if not cells and not evals:
        raise RecordError(f"the two records cannot be compared: {_why(ours, theirs, skipped)}")
    return Comparison(tuple(cells), tuple(evals), _texts(ours, theirs), tuple(skipped))


def compare_cells(ours: Cell, theirs: Cell, seed: int, resamples: int) -> CellComparison:
    """Two good cells of one workload."""
    if ours.workload.kind == "one" and ours.workload.concurrency == 1:
        a, b = ours.figures["e2e_tok_per_s"], theirs.figures["e2e_tok_per_s"]
        ratio = _score_ratio(ours, theirs, seed, resamples)
    else:
        mine, other = figures.rates(ours.repeats), figures.rates(theirs.repeats)
        a, b = stats.median(mine), stats.median(other)
        ratio = stats.ratio_of_medians(mine, other, seed=seed, resamples=resamples)
    latencies: dict[str, Estimate] = {}
    for metric in ("ttft", "tpot", "e2e"):
        mine, _ = figures.latencies_ms(ours.repeats, metric)
        other, _ = figures.latencies_ms(theirs.repeats, metric)
        if mine and other and min(mine) > 0 and min(other) > 0:
            latencies[metric] = stats.ratio_of_medians(mine, other, seed=seed, resamples=resamples)
    return CellComparison(ours.workload, a, b, ratio, latencies)


def _score_ratio(ours: Cell, theirs: Cell, seed: int, resamples: int) -> Estimate:
    """Ratio of the scores of `bench one`; each resample draws whole passes."""
    rng = np.random.default_rng(seed)
    above = _scores(ours, rng, resamples)
    below = _scores(theirs, rng, resamples)
    low, high = np.percentile(above / below, (2.5, 97.5))
    value = ours.figures["e2e_tok_per_s"] / theirs.figures["e2e_tok_per_s"]
    return Estimate(value, float(low), float(high))


def _scores(cell: Cell, rng: np.random.Generator, resamples: int) -> stats.Array:
    """[resamples] geometric means over prompts of medians over drawn passes."""
    speeds = np.asarray(
        [[figures.e2e_tok_per_s(r) for r in repeat.requests] for repeat in cell.repeats]
    )  # [passes, prompts]
    drawn = rng.integers(0, len(speeds), (resamples, len(speeds)))
    return np.exp(np.log(np.median(speeds[drawn], axis=1)).mean(axis=1))


def _unfit(ours: Cell, theirs: Cell) -> str | None:
    for name, cell in (("first", ours), ("second", theirs)):
        if cell.status != "ok":
            return f"{cell.status} in the {name} record"
    return None


def _evals(
    ours: Record, theirs: Record, seed: int, resamples: int, skipped: list[str]
) -> list[EvalComparison]:
    found: list[EvalComparison] = []
    others = {each.task: each for each in theirs.evals}
    for each in ours.evals:
        other = others.pop(each.task, None)
        if other is None:
            skipped.append(f"{each.task}: in the first record only")
        elif differing := _differing(each, other):
            skipped.append(f"{each.task}: {differing}")
        else:
            mine, their = ours.items_of(each.task), theirs.items_of(each.task)
            common = [key for key in mine if key in their]
            if common:
                found.append(compare_items(each.task, mine, their, common, seed, resamples))
            if len(common) < max(len(mine), len(their)):
                skipped.append(
                    f"{each.task}: {len(mine)} and {len(their)} answers, {len(common)} in both"
                )
    skipped += [f"{task}: in the second record only" for task in others]
    return found


def _differing(ours: Eval, theirs: Eval) -> str | None:
    """The first setting that differs."""
    for name in sorted({*ours.settings, *theirs.settings}):
        a, b = ours.settings.get(name), theirs.settings.get(name)
        if a != b:
            return f"{name} is {a!r} in the first record and {b!r} in the second"
    return None


def compare_items(
    task: str,
    ours: dict[str, Item],
    theirs: dict[str, Item],
    common: Sequence[str],
    seed: int,
    resamples: int,
) -> EvalComparison:
    """The same questions, answered twice."""
    a = [float(ours[key].right) for key in common]
    b = [float(theirs[key].right) for key in common]
    return EvalComparison(
        task=task,
        n=len(common),
        ours=sum(a) / len(a),
        theirs=sum(b) / len(b),
        difference=stats.paired_difference(a, b, seed=seed, resamples=resamples),
        won=tuple(key for key in common if ours[key].right and not theirs[key].right),
        lost=tuple(key for key in common if theirs[key].right and not ours[key].right),
    )


def _texts(ours: Record, theirs: Record) -> dict[str, int] | None:
    for cell in ours.cells:
        other = theirs.cell(cell.workload)
        if cell.texts and other is not None and other.texts:
            return text_equality(cell, other)
    return None


def _why(ours: Record, theirs: Record, skipped: Sequence[str]) -> str:
    """The fields of the workloads that no two cells share, else what was skipped."""
    if ours.cells and theirs.cells:
        for name in ("kind", "endpoint", "input_len", "output_len", "concurrency", "rate"):
            a = {getattr(cell.workload, name) for cell in ours.cells}
            b = {getattr(cell.workload, name) for cell in theirs.cells}
            if not a & b:
                return f"{name} is {_set(a)} in the first record and {_set(b)} in the second"
    return "; ".join(skipped) or "one of them is empty"


def _set(values: set[object]) -> str:
    return ", ".join(sorted(str(v) for v in values))


def verdict(estimate: Estimate, neutral: float) -> str:
    """level, ahead or behind, for a figure of which more is better."""
    if estimate.level(neutral):
        return "level"
    return "ahead" if estimate.value > neutral else "behind"


def rows_of_cells(found: Comparison) -> list[list[str]]:
    """A table of speeds."""
    head = ["load", "ours tok/s", "theirs", "ratio", "95% range", "", "TTFT ratio", "TPOT ratio"]
    return [head] + [
        [
            label(c.workload),
            f"{c.ours:,.1f}",
            f"{c.theirs:,.1f}",
            f"{c.ratio.value:.3f}",
            f"{c.ratio.low:.3f} to {c.ratio.high:.3f}",
            verdict(c.ratio, 1.0),
            *(_latency(c, metric) for metric in ("ttft", "tpot")),
        ]
        for c in found.cells
    ]


def _latency(cell: CellComparison, metric: str) -> str:
    found = cell.latencies.get(metric)
    if found is None:
        return "-"
    return f"{found.value:.3f}" + (" level" if found.level(1.0) else "")


def rows_of_evals(found: Comparison) -> list[list[str]]:
    """A table of accuracies."""
    head = ["eval", "n", "ours", "theirs", "difference", "95% range", "", "won", "lost"]
    return [head] + [
        [
            e.task,
            f"{e.n}",
            f"{e.ours:.4f}",
            f"{e.theirs:.4f}",
            f"{e.difference.value:+.4f}",
            f"{e.difference.low:+.4f} to {e.difference.high:+.4f}",
            verdict(e.difference, 0.0),
            f"{len(e.won)}",
            f"{len(e.lost)}",
        ]
        for e in found.evals
    ]
