"""`onechip bench sweep`: throughput and latency by load, shape by shape.

Owns the grid of cells and how one is measured:

1. The prompts of every pass are made before any is timed: one for each request, all different, all of one length.
2. One pass is thrown away (it fills caches and lets batch sizes settle), then `repeats` passes are timed.
3. Output length is fixed (`ignore_eos`), so every server does the same work; requests that ended early are counted.
4. The cell is on the disk before the next one starts. A refused or failed cell is a result, and the grid goes on.

A closed cell keeps `concurrency` requests in flight and sends `waves` times as many. An open cell sends `requests` by a
schedule and counts goodput against the targets.
"""

import secrets
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from onechip.ladder import figures, load
from onechip.ladder.bench import Bench, check_alive, choose_endpoint, status_of
from onechip.ladder.prompts import Endpoint, Sizer, ask, negotiate
from onechip.ladder.record import Cell, ClientCost, Figures, Repeat, Workload
from onechip.ladder.stream import Answer
from onechip.ladder.tables import label

SHAPES = ((512, 128), (128, 512))
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
BUSY = 0.8  # of a core: above this the client may be what was measured
LATE = 0.5  # of the median first token: above this the client's lateness is worth a word


@dataclass(frozen=True)
class SweepSettings:
    """`rates` not empty makes it an open sweep; then `requests` a pass instead of concurrency x waves."""

    shapes: tuple[tuple[int, int], ...] = SHAPES
    concurrencies: tuple[int, ...] = CONCURRENCIES
    repeats: int = 5
    waves: int = 1
    rates: tuple[float, ...] = ()
    burstiness: float = 1.0
    requests: int = 100
    targets_ms: Figures = field(default_factory=dict[str, float])
    endpoint: Endpoint | None = None
    ignore_eos: bool = True
    seed: int | None = None


def grid(settings: SweepSettings, endpoint: Endpoint) -> list[Workload]:
    """Every cell, easy ones first, so that a server that breaks leaves the most behind."""
    if settings.rates:
        return [
            Workload(
                kind="open",
                input_len=given,
                output_len=made,
                rate=rate,
                burstiness=settings.burstiness,
                requests=settings.requests,
                endpoint=endpoint,
            )
            for given, made in settings.shapes
            for rate in sorted(settings.rates)
        ]
    return [
        Workload(
            kind="closed",
            input_len=given,
            output_len=made,
            concurrency=concurrency,
            requests=concurrency * settings.waves,
            endpoint=endpoint,
        )
        for given, made in settings.shapes
        for concurrency in sorted(settings.concurrencies)
    ]


async def measure(bench: Bench, settings: SweepSettings) -> tuple[Cell, ...]:
    """Every cell of the grid, measured now or found in the record. Raises ServerGone."""
    endpoint = await choose_endpoint(bench.client, settings.endpoint, "completions")
    wanted: dict[str, object] = {"ignore_eos": True} if settings.ignore_eos else {}
    fields, notes = await negotiate(bench.client, endpoint, wanted)
    seed = secrets.randbits(32) if settings.seed is None else settings.seed
    sizer = Sizer(bench.client, endpoint, bench.server.tokenize, seed)
    cells = grid(settings, endpoint)
    left = [work for work in cells if not bench.journal.has(work)]
    bench.progress.start("bench sweep", len(left) * (settings.repeats + 1))
    for number, work in enumerate(left):
        cell = await _Measured(bench, settings, work, sizer, fields, tuple(notes)).cell()
        bench.journal.add(cell)
        if cell.status == "failed":
            await check_alive(bench, left[number + 1 :])
    record = bench.journal.record
    return tuple(cell for work in cells if (cell := record.cell(work)) is not None)


@dataclass(frozen=True)
class _Measured:
    """One cell being measured."""

    bench: Bench
    settings: SweepSettings
    work: Workload
    sizer: Sizer
    fields: dict[str, object]
    notes: tuple[str, ...]

    async def cell(self) -> Cell:
        work, count = self.work, self.work.requests or 1
        passes_wanted = self.settings.repeats + 1
        # A cell's prompts do not depend on which cells were measured before it.
        self.sizer.serial = zlib.crc32(label(work).encode()) << 24
        assert work.input_len is not None
        prompts = await self.sizer.make(work.input_len, count * passes_wanted)
        each = [prompts[at : at + count] for at in range(0, len(prompts), count)]
        warm = await self._pass(each[0], 0)
        if all_failed(warm):
            return self._closed([figures.repeat_of(warm)], load.Meter())
        passes: list[Repeat] = []
        with load.metered() as meter:
            for number, texts in enumerate(each[1:], 1):
                answers = await self._pass(texts, number)
                passes.append(figures.repeat_of(answers))
                if any(load.unreachable(a) for a in answers):
                    break
        return self._closed(passes, meter)

    async def _pass(self, texts: Sequence[str], number: int) -> list[Answer]:
        work = self.work
        if work.rate is None:
            answers = await load.closed(self._ask, texts, work.concurrency or 1)
        else:
            times = load.arrivals(len(texts), work.rate, work.burstiness or 1.0, number)
            answers = await load.scheduled(self._ask, texts, times)
        self.bench.progress.step(label(work))
        return answers

    async def _ask(self, text: str) -> Answer:
        fields = {**self.fields, "max_tokens": self.work.output_len, "temperature": 0}
        return await ask(self.bench.client, self.work.endpoint, text, **fields)

    def _closed(self, passes: list[Repeat], meter: load.Meter) -> Cell:
        status, reason, errors = status_of(passes)
        targets = self.settings.targets_ms if self.work.kind == "open" else {}
        cost = meter.cost(sum(count for p in passes for _, count in p.gaps_ms))
        return Cell(
            workload=self.work,
            status=status,
            reason=reason,
            repeats=tuple(passes),
            figures=figures.load_figures(passes, targets, self.bench.price),
            percentiles=figures.percentiles(passes),
            errors=errors,
            client=cost,
            notes=self.notes + tuple(remarks(self.work, passes, cost)),
            prompts=self.sizer.exactness,
            seed=self.sizer.seed,
            targets_ms=targets,
        )


def remarks(work: Workload, passes: Sequence[Repeat], cost: ClientCost) -> list[str]:
    """What a reader must know of a cell's own figures."""
    good = figures.good_requests(passes)
    short = sum((r.output_tokens or 0) < work.output_len for r in good)
    lengths = {r.prompt_tokens for r in good}
    said: list[str] = []
    if short:
        said.append(f"{short} of {len(good)} requests ended before {work.output_len} tokens")
    if lengths - {work.input_len}:
        seen = sorted(n for n in lengths if n is not None)
        said.append(f"prompts had {seen[0]} to {seen[-1]} tokens by the server's usage")
    if any(r.cached_tokens for r in good):
        most = max(r.cached_tokens or 0 for r in good)
        said.append(f"up to {most} prompt tokens came from the server's prefix cache")
    if cost.cpu_share > BUSY:
        said.append(f"the client took {cost.cpu_share:.0%} of a core and may be what was measured")
    firsts = sorted(r.ttft_s for r in good if r.ttft_s is not None)
    if firsts and cost.lag_ms_max > 1000 * firsts[len(firsts) // 2] * LATE:
        said.append(
            f"the client's own loop was up to {cost.lag_ms_max:.0f} ms late (a busy machine): "
            "latencies of this cell are blurred"
        )
    return said


def all_failed(answers: Sequence[Answer]) -> bool:
    return all(not answer.ok for answer in answers)
