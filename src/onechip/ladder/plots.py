"""The pictures of a report, as PNG and SVG. The only module that imports matplotlib, which the extra `report` brings.

Owns axes, colours and legends. Draws without pyplot, so that nothing global is touched and no display is needed.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onechip.errors import StartupError
from onechip.ladder.record import Cell
from onechip.ladder.stats import Estimate


class NoPlots(StartupError):
    """matplotlib is not installed."""


@dataclass(frozen=True)
class Drawn:
    png: bytes
    svg: bytes


def available() -> None:
    """Raises NoPlots."""
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise NoPlots(
            "plots need matplotlib: pip install 'onechip[report]', or add --no-plots"
        ) from None


def throughput(cells: Mapping[str, Sequence[Cell]], title: str) -> Drawn:
    """Output tok/s against concurrency, one line a record; the bars span slowest to fastest repeat."""
    figure, axes = _axes(title, "requests at once", "output tokens per second")
    ticks: set[int] = set()
    for name, some in cells.items():
        good = [c for c in some if c.status == "ok" and c.workload.concurrency]
        x = [c.workload.concurrency or 1 for c in good]
        y = [c.figures["output_tok_per_s"] for c in good]
        low = [v - c.figures["output_tok_per_s_min"] for v, c in zip(y, good, strict=True)]
        high = [c.figures["output_tok_per_s_max"] - v for v, c in zip(y, good, strict=True)]
        axes.errorbar(x, y, yerr=[low, high], marker="o", capsize=3, label=name)
        ticks |= set(x)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [str(t) for t in sorted(ticks)])
    axes.set_ylim(bottom=0)
    axes.legend()
    return _drawn(figure)


def latency(cells: Mapping[str, Sequence[Cell]], metric: str, title: str) -> Drawn:
    """p50 (line) and p99 (dashes) of a metric against concurrency, one colour a record."""
    figure, axes = _axes(title, "requests at once", f"{metric.upper()}, ms")
    ticks: set[int] = set()
    for name, some in cells.items():
        good = [c for c in some if c.workload.concurrency and metric in c.percentiles]
        x = [c.workload.concurrency or 1 for c in good]
        (line,) = axes.plot(
            x, [c.percentiles[metric]["p50"] for c in good], "o-", label=f"{name} p50"
        )
        p99 = [c.percentiles[metric]["p99"] for c in good]
        axes.plot(x, p99, "^--", color=line.get_color(), label=f"{name} p99")
        ticks |= set(x)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xticks(sorted(ticks), [str(t) for t in sorted(ticks)])
    axes.legend()
    return _drawn(figure)


def ranges(found: Mapping[str, Estimate], neutral: float, title: str, unit: str) -> Drawn:
    """A point and its 95% range a line; the rule stands where there is no difference."""
    figure, axes = _axes(title, unit, "", height=1.2 + 0.35 * len(found))
    for at, estimate in enumerate(list(found.values())[::-1]):
        colour = "tab:gray" if estimate.level(neutral) else "tab:blue"
        axes.plot([estimate.low, estimate.high], [at, at], color=colour, linewidth=2)
        axes.plot([estimate.value], [at], "o", color=colour)
    axes.axvline(neutral, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(found)), list(found)[::-1])
    axes.set_ylim(-0.6, len(found) - 0.4)
    return _drawn(figure)


def _axes(title: str, x: str, y: str, height: float = 4.5) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def _drawn(figure: Any) -> Drawn:
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return Drawn(png.getvalue(), svg.getvalue())
