"""Records as rows of text: what the command prints, and the tables of a report.

Owns which figures are shown, in which unit and with how many digits. Computes nothing that is not a ratio's display.
"""

from collections.abc import Sequence

from onechip.ladder.record import Cell, Eval, Probe, Record, Workload

Row = list[str]

EXTRA = {"goodput_req_per_s": "goodput/s", "cost_per_m_output_tokens": "$/M tokens"}


def label(work: Workload) -> str:
    """A cell's name for people: 512/128 x16, 512/128 @4/s, six prompts, four at once."""
    if work.kind == "one":
        return "six prompts" if work.concurrency == 1 else f"{work.concurrency} at once"
    shape = f"{work.input_len}/{work.output_len}"
    if work.rate is not None:
        return f"{shape} @{work.rate:g}/s"
    return f"{shape} x{work.concurrency}"


def number(value: float | None, digits: int = 1) -> str:
    """With thousands separated; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def cell_table(cells: Sequence[Cell]) -> list[Row]:
    """A header and one row a cell."""
    head = ["load", "status", "tok/s", "min", "max", "spread", "per stream"]
    head += ["TTFT p50", "p99", "TPOT p50", "p99", "ITL p99", "client"]
    more = [name for name in EXTRA if any(name in cell.figures for cell in cells)]
    rows = [[*head, *(EXTRA[name] for name in more)]]
    return rows + [
        _cell_row(cell) + [number(cell.figures.get(name), 3) for name in more] for cell in cells
    ]


def _cell_row(cell: Cell) -> Row:
    figures, pct = cell.figures, cell.percentiles
    speed = figures.get("output_tok_per_s", figures.get("e2e_tok_per_s"))
    spread = figures.get("spread") if len(cell.repeats) > 1 else None
    return [
        label(cell.workload),
        cell.status,
        number(speed),
        number(figures.get("output_tok_per_s_min")),
        number(figures.get("output_tok_per_s_max")),
        "-" if spread is None else f"{spread:.1%}",
        number(figures.get("per_stream_tok_per_s", figures.get("decode_tok_per_s"))),
        number(pct.get("ttft", {}).get("p50")),
        number(pct.get("ttft", {}).get("p99")),
        number(pct.get("tpot", {}).get("p50"), 2),
        number(pct.get("tpot", {}).get("p99"), 2),
        number(pct.get("itl", {}).get("p99"), 2),
        "-" if cell.client is None else f"{cell.client.cpu_share:.0%}",
    ]


def remarks(cells: Sequence[Cell]) -> list[str]:
    """What stands under the table: reasons, notes, the client's own cost."""
    said: dict[str, list[str]] = {}
    for cell in cells:
        for note in (*([cell.reason] if cell.reason else []), *cell.notes):
            said.setdefault(note, []).append(label(cell.workload))
    lines = [f"{note} [{_some(where, len(cells))}]" for note, where in said.items()]
    costs = [cell.client for cell in cells if cell.client]
    if costs:
        busiest = max(costs, key=lambda cost: cost.cpu_share)
        latest = max(cost.lag_ms_max for cost in costs)
        lines.append(
            f"client: at most {busiest.cpu_share:.0%} of a core ({busiest.chunks_per_s:,.0f} chunks/s); "
            f"its event loop late by {busiest.lag_ms_p50:.1f} ms (median), {latest:.1f} ms (worst)"
        )
    return lines


def _some(where: Sequence[str], everything: int) -> str:
    if len(where) == everything > 1:
        return "every cell"
    return ", ".join(where[:4]) + (f" and {len(where) - 4} more" if len(where) > 4 else "")


def eval_table(evals: Sequence[Eval]) -> list[Row]:
    """A header and one row an eval."""
    rows = [["eval", "status", "right", "of", "accuracy", "errors", "truncated", "wall s"]]
    for each in evals:
        found = each.figures
        counts = [number(found.get(name), 0) for name in ("right", "n")]
        more = [number(found.get(name), 0) for name in ("errors", "truncated", "wall_s")]
        rows.append([each.task, each.status, *counts, number(found.get("accuracy"), 4), *more])
    return rows


def probe_table(probes: Sequence[Probe]) -> list[Row]:
    """A header and one row a probe; what was seen stands below it in a list (`probe_remarks`)."""
    return [["probe", "verdict", "s"]] + [
        [f"{p.domain}: {p.name}", p.verdict, number(p.latency_s, 2)] for p in probes
    ]


def probe_remarks(probes: Sequence[Probe]) -> list[str]:
    """Why a probe did not pass."""
    return [f"{p.domain}: {p.name}: {p.detail}" for p in probes if p.verdict != "pass"]


def one_lines(cell: Cell) -> list[str]:
    """The headline of `bench one`."""
    figures = cell.figures
    return [
        f"end to end   {number(figures.get('e2e_tok_per_s'))} tok/s (geometric mean over prompts)",
        f"decode       {number(figures.get('decode_tok_per_s'))} tok/s",
        f"first token  {number(figures.get('ttft_ms'))} ms",
        f"identical    {figures.get('repeats_identical', 0):.0f}/{figures.get('prompts', 0):.0f}",
    ]


def aligned(rows: Sequence[Row]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = (
        "  ".join(
            text.ljust(width) if at == 0 else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows: Sequence[Row]) -> str:
    """The same as a Markdown table."""
    head, *body = [[text.replace("|", "\\|") for text in row] for row in rows]
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *body))


def printed(record: Record) -> str:
    """A whole record for a terminal."""
    singles = [c for c in record.cells if c.workload.kind == "one" and c.workload.concurrency == 1]
    parts = ["\n".join(one_lines(cell)) for cell in singles]
    if record.cells:
        parts.append(aligned(cell_table(record.cells)))
        parts.append("\n".join(remarks(record.cells)))
    if record.evals:
        parts.append(aligned(eval_table(record.evals)))
        parts += [f"{e.task}: {e.reason}" for e in record.evals if e.reason]
    if record.probes:
        parts.append(aligned(probe_table(record.probes)))
        parts.append("\n".join(probe_remarks(record.probes)))
    return "\n\n".join(part for part in parts if part)
