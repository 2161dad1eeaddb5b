"""What records say, for a reader who was not there: Markdown, one HTML page and plots.

Owns the order of a report and its sentences. Numbers are those of the records, or of `compare`; none is typed in.

The first record is the one the others are held against. What is missing, failed or did not fit has a section of its
own; the client's cost and every note that a measurement left stand with its figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onechip.ladder import compare, plots, tables
from onechip.ladder.compare import Comparison
from onechip.ladder.document import (
    Block,
    Bullets,
    Heading,
    Picture,
    Table,
    Text,
    as_html,
    as_markdown,
)
from onechip.ladder.record import Cell, Record, RecordError
from onechip.ladder.tables import Row, label, number

TITLE = "Ladder report"

DEFINITIONS = tuple(
    """\
TTFT: from sending to the first chunk with text. TPOT: (finish chunk - first text) / (tokens - 1). ITL: gaps between \
chunks with text. Tokens are the server's own usage.
tok/s of a load: completion tokens over first send to last finish chunk; the median of the repeats. Spread: \
(max - min) / min. Six prompts: geometric mean over prompts of the median end-to-end tok/s.
Ranges hold 95% of 2,000 bootstrap resamples, paired by question for evals. Level: the range includes no difference.\
""".split("\n")
)


@dataclass(frozen=True)
class Report:
    """`pictures` by name; `comparisons` of every other record with the first, by name."""

    blocks: tuple[Block, ...]
    pictures: dict[str, plots.Drawn]
    comparisons: dict[str, Comparison]


def names_of(records: Sequence[Record]) -> list[str]:
    """A short name a record, all different: its arm, else its engine and version, else its model."""
    names: list[str] = []
    for record in records:
        software = record.software
        engine = " ".join(part for part in (software.engine, software.version) if part)
        name = record.run.arm or engine or record.model.id
        names.append(name if name not in names else f"{name} ({record.run.id[:6]})")
    return names


def make(records: Sequence[Record], *, draw: bool = True) -> Report:
    """The report of one or more records. Raises NoPlots."""
    named = dict(zip(names_of(records), records, strict=True))
    comparisons, refused = _compared(named)
    pictures = _pictures(named, comparisons) if draw else {}
    blocks: list[Block] = [Heading(TITLE, 1), *_headlines(named, comparisons, refused)]
    blocks += [Heading("What was measured"), Table(tuple(_servers(named)))]
    blocks += _speeds(named, pictures)
    blocks += _comparison_blocks(comparisons, pictures)
    blocks += _capabilities(named)
    blocks += [Heading("What is missing"), Bullets(tuple(missing(named)) or ("nothing",))]
    blocks += [Heading("Notes"), Bullets(tuple(_notes(named)) or ("none",))]
    blocks += [Heading("How to read this"), Bullets(DEFINITIONS)]
    return Report(tuple(blocks), {n: d for n, (_, d) in pictures.items()}, comparisons)


def write(report: Report, directory: Path) -> list[Path]:
    """report.md, report.html and the pictures. Raises RecordError."""
    files = {
        "report.md": as_markdown(report.blocks).encode(),
        "report.html": as_html(
            TITLE, report.blocks, {n: d.svg for n, d in report.pictures.items()}
        ).encode(),
    }
    for name, drawn in report.pictures.items():
        files |= {f"{name}.png": drawn.png, f"{name}.svg": drawn.svg}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (directory / name).write_bytes(data)
    except OSError as error:
        raise RecordError(
            f"cannot write {directory}: {error.strerror}; name another --out"
        ) from None
    return [directory / name for name in files]


def _compared(named: Mapping[str, Record]) -> tuple[dict[str, Comparison], list[str]]:
    """Every further record against the first, and which could not be."""
    (first, base), *others = named.items()
    found: dict[str, Comparison] = {}
    refused: list[str] = []
    for name, record in others:
        try:
            found[name] = compare.compare(record, base)
        except RecordError as error:
            refused.append(f"{name} and {first}: {error.message}")
    return found, refused


def _headlines(
    named: Mapping[str, Record], comparisons: Mapping[str, Comparison], refused: Sequence[str]
) -> list[Block]:
    first = next(iter(named))
    lines = [
        f"{name} against {first}: {line}" for name, c in comparisons.items() for line in headline(c)
    ]
    if not comparisons:
        lines = [f"{name}: {line}" for name, record in named.items() for line in _alone(record)]
    return [Bullets((*lines, *refused) or ("nothing was measured",))]


def headline(found: Comparison) -> list[str]:
    """One sentence a cell or eval, with the ratio or difference and its range."""
    lines = [
        f"{label(c.workload)}: {c.ratio.value:.3f} times the tok/s "
        f"[{c.ratio.low:.3f}, {c.ratio.high:.3f}], {compare.verdict(c.ratio, 1.0)}"
        for c in found.cells
    ]
    lines += [
        f"{e.task} (n = {e.n}): {e.difference.value:+.4f} "
        f"[{e.difference.low:+.4f}, {e.difference.high:+.4f}], {compare.verdict(e.difference, 0.0)}"
        for e in found.evals
    ]
    if found.texts:
        lines.append(f"{found.texts['equal']} of {found.texts['prompts']} greedy answers are equal")
    return lines


def _alone(record: Record) -> list[str]:
    lines = [
        f"{label(c.workload)}: {number(speed)} tok/s"
        for c in record.cells
        if (speed := c.figures.get("output_tok_per_s", c.figures.get("e2e_tok_per_s"))) is not None
    ]
    return lines + [
        f"{e.task}: {e.figures['accuracy']:.4f} of {e.figures['n']:.0f}"
        for e in record.evals
        if "accuracy" in e.figures
    ]


def _servers(named: Mapping[str, Record]) -> list[Row]:
    head = [
        "record",
        "engine",
        "model",
        "weights",
        "hardware",
        "date",
        "status",
        "start s",
        "memory GiB",
    ]
    rows = [head]
    for name, r in named.items():
        hardware = r.hardware.accelerator or f"{r.hardware.host_cpu} x{r.hardware.host_cores}"
        startup = r.startup.first_answer_s if r.startup else None
        memory = r.memory and (r.memory.device_in_use_gib or r.memory.host_rss_gib)
        engine = f"{r.software.engine or '?'} {r.software.version or ''}".strip()
        row = [name, engine, r.model.id, r.model.weights or "-", hardware]
        rows.append([*row, r.run.date, r.run.status, number(startup), number(memory, 2)])
    return rows


def _speeds(
    named: Mapping[str, Record], pictures: Mapping[str, tuple[str, plots.Drawn]]
) -> list[Block]:
    blocks: list[Block] = []
    for name, record in named.items():
        if record.cells:
            blocks += [Heading(f"Speed: {name}"), Table(tuple(tables.cell_table(record.cells)))]
            blocks.append(Bullets(tuple(tables.remarks(record.cells))))
    shown = [n for n in pictures if not n.startswith("compared")]
    return blocks + [Picture(name, pictures[name][0]) for name in shown]


def _comparison_blocks(
    comparisons: Mapping[str, Comparison], pictures: Mapping[str, tuple[str, plots.Drawn]]
) -> list[Block]:
    blocks: list[Block] = []
    for name, found in comparisons.items():
        blocks.append(Heading(f"Compared: {name} (ours) with the first record (theirs)"))
        if found.cells:
            blocks.append(Table(tuple(compare.rows_of_cells(found))))
        if found.evals:
            blocks.append(Table(tuple(compare.rows_of_evals(found))))
        if found.skipped:
            blocks += [Text("Not compared:"), Bullets(found.skipped)]
    return blocks + [Picture(n, pictures[n][0]) for n in pictures if n.startswith("compared")]


def _capabilities(named: Mapping[str, Record]) -> list[Block]:
    blocks: list[Block] = []
    for name, record in named.items():
        if record.evals:
            blocks += [Heading(f"Evals: {name}"), Table(tuple(tables.eval_table(record.evals)))]
        if record.probes:
            blocks += [Heading(f"Probes: {name}"), Table(tuple(tables.probe_table(record.probes)))]
            blocks.append(Bullets(tuple(tables.probe_remarks(record.probes)) or ("all passed",)))
    return blocks


def missing(named: Mapping[str, Record]) -> list[str]:
    """Everything that was asked for and is not there, with the reason."""
    said: list[str] = []
    for name, record in named.items():
        if record.run.status != "done":
            said.append(f"{name}: the run did not end well (status {record.run.status})")
        said += [
            f"{name}: {label(c.workload)} is {c.status}: {c.reason or 'no reason was recorded'}"
            for c in record.cells
            if c.status != "ok"
        ]
        said += [
            f"{name}: {e.task} is {e.status}: {e.reason or 'no reason was recorded'}"
            for e in record.evals
            if e.status != "ok"
        ]
    works = {cell.workload for record in named.values() for cell in record.cells}
    said += [
        f"{name}: {label(work)} was not measured"
        for work in sorted(works, key=label)
        for name, record in named.items()
        if record.cell(work) is None
    ]
    return said


def _notes(named: Mapping[str, Record]) -> list[str]:
    return [f"{name}: {issue}" for name, record in named.items() for issue in record.issues]


def _pictures(
    named: Mapping[str, Record], comparisons: Mapping[str, Comparison]
) -> dict[str, tuple[str, plots.Drawn]]:
    """Captions and pictures by name: loads of two points and more, and comparisons."""
    plots.available()
    found: dict[str, tuple[str, plots.Drawn]] = {}
    for shape, cells in _by_shape(named).items():
        tag = f"{shape[0]}-{shape[1]}"
        words = f"{shape[0]} tokens in, {shape[1]} out"
        title = f"Throughput, {words}"
        found[f"throughput-{tag}"] = title, plots.throughput(cells, title)
        for metric in ("ttft", "tpot"):
            title = f"{metric.upper()} p50 and p99, {words}"
            found[f"{metric}-{tag}"] = title, plots.latency(cells, metric, title)
    for number_, (name, comparison) in enumerate(comparisons.items(), 1):
        speeds = {label(c.workload): c.ratio for c in comparison.cells}
        if speeds:
            title = f"{name}: tok/s as a multiple of the first record's"
            found[f"compared-speed-{number_}"] = title, plots.ranges(speeds, 1.0, title, "ratio")
        scores = {e.task: e.difference for e in comparison.evals}
        if scores:
            title = f"{name}: accuracy minus the first record's"
            found[f"compared-evals-{number_}"] = (
                title,
                plots.ranges(scores, 0.0, title, "difference of accuracy, paired"),
            )
    return found


def _by_shape(named: Mapping[str, Record]) -> dict[tuple[int, int], dict[str, list[Cell]]]:
    """Closed cells with figures by shape and record, by concurrency; shapes where a line can be drawn."""
    shapes: dict[tuple[int, int], dict[str, list[Cell]]] = {}
    for name, record in named.items():
        for cell in record.cells:
            work = cell.workload
            if work.kind == "closed" and work.input_len and cell.figures:
                shape = work.input_len, work.output_len
                shapes.setdefault(shape, {}).setdefault(name, []).append(cell)
    for lines in shapes.values():
        for cells in lines.values():
            cells.sort(key=lambda cell: cell.workload.concurrency or 0)
    return {s: lines for s, lines in shapes.items() if max(map(len, lines.values())) > 1}
