"""A device without a model, for the scheduler and the loop: the next token is the last one plus one.

It remembers what every (pool, page, slot of the page) was last written with, and asserts, for every row of every plan,
what a device could only get silently wrong: that each key a query can see lies where the row's table says, put there by
the same sequence at the same position; that no page is written twice in a step; that slots, table widths and buckets
are respected. Steps take effect in launch order, as on a device; their results are held back until collected.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tests.grammar_walk import CLOSER, ENDINGS, EOS, vocabulary

from onechip.cache.pages import PageTable, PoolShape, peak_pages
from onechip.config import LayerKind
from onechip.engine.buckets import Bucket, BucketTable, bucket_table
from onechip.engine.grammar import RowMask
from onechip.engine.grammar_compiler import GrammarCompiler
from onechip.engine.loop import Engine
from onechip.engine.pace import Pace
from onechip.engine.runner import Pending
from onechip.engine.scheduler import Scheduler
from onechip.engine.sequence import Plan, PlanRow, RowResult, Sequence
from onechip.request import (
    EngineInfo,
    Event,
    Grammar,
    Request,
    SamplingParams,
    TokenLogprobs,
)

VOCAB = 10_000
Cell = tuple[LayerKind, int, int]  # pool, page, slot in the page


def next_token(request: Request, last: int, generated: int) -> int:
    """The token after `last`, with stop ids banned until min_tokens are generated, as the sampler does."""
    token = (last + 1) % VOCAB
    while generated < request.sampling.min_tokens and token in request.stop_ids:
        token = (token + 1) % VOCAB
    return token


def masked_token(request: Request, mask: RowMask, place: int) -> int:
    """Random among the allowed, a stop id rather than not, as `tests.grammar_walk` draws."""
    allowed = np.flatnonzero(np.unpackbits(mask.words.view(np.uint8), bitorder="little")).tolist()
    draw = random.Random(f"{request.sampling.seed} {place}")
    close = ENDINGS | {CLOSER} | set(request.stop_ids)
    ends = [token for token in allowed if token in close]
    return draw.choice(ends if ends and draw.random() < 0.4 else allowed)


def expected(request: Request) -> tuple[tuple[int, ...], str]:
    """(tokens, finish) of a request that nobody aborts."""
    assert request.sampling.max_tokens is not None
    tokens: list[int] = []
    last = request.prompt_ids[-1]
    while len(tokens) < request.sampling.max_tokens:
        last = next_token(request, last, len(tokens))
        tokens.append(last)
        if last in request.stop_ids:
            return tuple(tokens), "stop"
    return tuple(tokens), "length"


@dataclass
class FakeRunner:
    """`broken`: ids of requests whose logits are not finite. `columns`: widths of the rows' page tables."""

    pages: PageTable
    table: BucketTable
    max_seqs: int
    columns: Mapping[LayerKind, int]
    broken: set[str] = field(default_factory=set)
    memory: dict[Cell, tuple[Sequence, int, int]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    owner: dict[int, Sequence] = field(default_factory=dict)
    buckets: list[Bucket] = field(default_factory=list)
    flying: list[Pending] = field(default_factory=list)
    made: dict[Sequence, list[int]] = field(default_factory=dict)
    over: set[Sequence] = field(
        default_factory=set
    )  # ended: a surplus step of theirs may read anything

    def dispatch(self, plan: Plan) -> Pending:
        self._check_shape(plan)
        for sequence in plan.admitted:
            assert sequence.slot is not None
            self.owner[sequence.slot] = sequence
        made: list[list[int]] = [[] for _ in plan.rows]
        running = list(range(len(plan.rows)))
        for step in range(plan.steps):
            running = [i for i in running if step < plan.rows[i].steps]
            self._step([_advanced(plan.rows[i], step) for i in running], [made[i] for i in running])
            self.over |= {plan.rows[i].sequence for i in running if _ended(plan.rows[i], made[i])}
            running = [i for i in running if not _ended(plan.rows[i], made[i])]
        pending = Pending(plan, made)
        self.flying.append(pending)
        return pending

    def _step(self, rows: list[PlanRow], made: list[list[int]]) -> None:
        tokens = [self._tokens(row) for row in rows]
        self._write(rows, tokens)
        for row, ids, out in zip(rows, tokens, made, strict=True):
            if row.sequence not in self.over:
                self._check_visible(row)
            if row.sample:
                out.append(self._sample(row, ids[-1]))

    def constrain(self, pending: Pending, masks: Mapping[int, RowMask]) -> Pending:
        """Rows under a grammar take an allowed token that their seed and position choose."""
        assert pending is self.flying[-1], "only the newest step is constrained"
        made_by_row = [list(made) for made in pending.out]
        for index, mask in masks.items():
            row = pending.plan.rows[index]
            sequence, slot = row.sequence, row.sequence.slot
            assert row.sample and sequence.finish is None and slot is not None
            assert row.known or row.start == len(sequence.tokens) - 1, "its tokens are committed"
            place = row.start + row.count - sequence.prompt_len
            token = self.last[slot] = masked_token(sequence.request, mask, place)
            made_by_row[index] = [token]
            self.made.setdefault(sequence, [])[place:] = [token]
        self.flying[-1] = Pending(pending.plan, made_by_row)
        return self.flying[-1]

    def collect(self, pending: Pending) -> list[RowResult]:
        assert self.flying.pop(0) is pending, "steps are collected in launch order"
        return [
            _result(row, made) for row, made in zip(pending.plan.rows, pending.out, strict=True)
        ]

    def _check_shape(self, plan: Plan) -> None:
        assert plan.rows
        assert len({row.sequence.slot for row in plan.rows}) == len(plan.rows)
        counts = [row.count for row in plan.rows]
        assert min(counts) >= 1
        assert plan.steps == 1 or plan.singles == len(counts), "several steps are for decode rows"
        assert all(count == 1 for count in counts[: plan.singles]), "single rows come first"
        assert plan.tokens <= self.table.token_budget
        assert sum(count for count in counts if count > 1) <= self.table.chunk
        assert not plan.score or len(plan.rows) == 1
        singles_only = plan.singles == len(plan.rows)
        bucket = self.table.pick(plan.tokens, len(plan.rows), singles_only, plan.score)
        self.buckets.append(bucket)

    def _tokens(self, row: PlanRow) -> list[int]:
        sequence, slot = row.sequence, row.sequence.slot
        assert slot is not None and 0 <= slot < self.max_seqs
        assert self.owner[slot] is sequence, "a row runs in a slot it was admitted to"
        assert sequence.finish is None
        known = row.known
        if known:
            assert len(known) == row.count
            return list(known)
        assert row.count == 1, "only a decode row's token may be unknown to the host"
        return [self.last[slot]]

    def _write(self, rows: list[PlanRow], tokens: Iterable[list[int]]) -> None:
        written: set[Cell] = set()
        for row, ids in zip(rows, tokens, strict=True):
            for position, token in enumerate(ids, row.start):
                for kind in self.pages.pools:
                    cell = self._cell(row.sequence, kind, position)
                    assert cell not in written, "two tokens of a step write the same place"
                    written.add(cell)
                    self.memory[cell] = (row.sequence, position, token)

    def _cell(self, sequence: Sequence, kind: LayerKind, position: int) -> Cell:
        held = self.pages.held[sequence.id][kind]
        assert len(held.pages) <= self.columns[kind], "a row's table is wider than the program's"
        column = position // self.pages.page_size - held.first
        assert 0 <= column < len(held.pages), f"{kind} position {position} has no page"
        assert held.pages[column] != 0, "page 0 belongs to padding"
        return kind, held.pages[column], position % self.pages.page_size

    def _check_visible(self, row: PlanRow) -> None:
        stop = row.start + row.count
        for kind, shape in self.pages.shapes.items():
            low = 0 if shape.window is None else max(0, row.start - shape.window + 1)
            for position in range(low, stop):
                token = self._true_token(row.sequence, position)
                cell = self._cell(row.sequence, kind, position)
                assert self.memory.get(cell) == (row.sequence, position, token), (kind, position)

    def _true_token(self, sequence: Sequence, position: int) -> int:
        prompt = sequence.request.prompt_ids
        if position < len(prompt):
            return prompt[position]
        made = self.made.setdefault(sequence, [])
        last = made[-1] if made else prompt[-1]
        while len(made) <= position - len(prompt):
            last = next_token(sequence.request, last, len(made))
            made.append(last)
        return made[position - len(prompt)]

    def _sample(self, row: PlanRow, last: int) -> int:
        request, slot = row.sequence.request, row.sequence.slot
        assert slot is not None
        generated = row.start + row.count - len(request.prompt_ids)
        self.last[slot] = next_token(request, last, generated)
        return -1 if request.id in self.broken else self.last[slot]


def _advanced(row: PlanRow, step: int) -> PlanRow:
    """The row at a later step of its launch: its token is the one just made."""
    return row if step == 0 else replace(row, start=row.start + step)


def _ended(row: PlanRow, made: list[int]) -> bool:
    return bool(made) and (made[-1] < 0 or made[-1] in row.sequence.request.stop_ids)


def _result(row: PlanRow, tokens: list[int]) -> RowResult:
    sampling = row.sequence.request.sampling
    logprob = None
    if tokens and sampling.logprobs is not None:
        logprob = TokenLogprobs(tokens[0], -0.5)
    scored: tuple[TokenLogprobs, ...] = ()
    if row.score and sampling.prompt_logprobs is not None:
        stop = row.start + row.count + 1
        targets = row.sequence.request.prompt_ids[row.start + 1 : stop]
        scored = tuple(TokenLogprobs(t, -float(t)) for t in targets)
    return RowResult(row, tuple(tokens), logprob, scored)


class FixedPace(Pace):
    """As many steps a launch as may be, whatever the clock says."""

    @property
    def steps(self) -> int:
        return self.most


def fake_engine(
    *,
    max_seqs: int = 4,
    chunk: int = 8,
    page_size: int = 4,
    full_pages: int = 64,
    sliding_pages: int = 64,
    window: int | None = 8,
    max_waiting: int = 1024,
    max_model_len: int = 256,
    platform: str = "cpu",
    steps: int = 1,
) -> Engine:
    """An engine on a FakeRunner; pages are counted without page 0."""
    shapes: dict[LayerKind, PoolShape] = {"full": PoolShape(full_pages + 1, None)}
    if window is not None:
        shapes["sliding"] = PoolShape(sliding_pages + 1, window)
    pages = PageTable(page_size, shapes)
    table = bucket_table(max_seqs, chunk, platform)
    columns: dict[LayerKind, int] = {
        kind: peak_pages(max_model_len, max(table.chunk, steps), shape.window, page_size)
        for kind, shape in shapes.items()
    }
    runner = FakeRunner(pages, table, max_seqs, columns)
    scheduler = Scheduler(pages, max_seqs, table.limits())
    kv_tokens = full_pages * page_size
    info = EngineInfo(VOCAB, max_model_len, max_seqs, kv_tokens, "fake", "float32", 0.0, 0.0, 0.0)
    pace = FixedPace(steps)
    grammars = GrammarCompiler(vocabulary, VOCAB, EOS)
    return Engine(runner, scheduler, info, max_waiting=max_waiting, grammars=grammars, pace=pace)


def request(
    key: str,
    prompt: int | Iterable[int],
    max_tokens: int,
    stop_ids: Iterable[int] = (),
    grammar: Grammar | None = None,
    **sampling: Any,
) -> Request:
    """A request of prompt ids, or of a prompt of so many ids that ends in 100 + its length."""
    if isinstance(prompt, int):
        prompt = range(101, 101 + prompt)
    values = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "seed": 0, **sampling})
    return Request(key, tuple(prompt), values, tuple(stop_ids), grammar)


@dataclass
class Outcome:
    """What the events of one request came to."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: tuple[TokenLogprobs | None, ...] | None = None
    finish: str | None = None
    stopped_by: int | None = None
    error_code: str | None = None
    error: str | None = None
    error_param: str | None = None

    def push(self, event: Event) -> None:
        assert self.finish is None, f"{event.request_id}: an event after the last one"
        assert not event.prompt_logprobs or not self.tokens, "prompt logprobs come with the first"
        self.tokens += event.token_ids
        self.logprobs += event.logprobs
        self.prompt = self.prompt or event.prompt_logprobs
        self.finish, self.stopped_by = event.finish, event.stopped_by
        self.error_code = event.error_code
        self.error, self.error_param = event.error, event.error_param


def gather(events: Iterable[Event]) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for event in events:
        outcomes.setdefault(event.request_id, Outcome()).push(event)
    return outcomes
