"""Who runs next: sequences and pages in, a `Plan` out. Plain integers; no arrays, no text, no clock.

1. Running sequences with one token to go decode, oldest first; each needs room for one more token.
2. What is left of the token budget goes to prefill chunks, oldest first, mixed into the same step.
3. Waiting sequences are admitted in order of arrival while slots, budget and both page pools allow.
4. When pages run out the newest running sequence is preempted: its pages return, its tokens stay, and it waits at the
   front to be computed again. The oldest can always go on, so somebody always finishes.

A launch may take several decode steps (`most_steps`), but only while nobody waits and no row needs the host after each
token (stop strings, log probabilities, a grammar, stop ids of its own). Pages for all of them are held beforehand.

A plan changes the scheduler's books as if the step had run: planning is one step ahead of the device, and a decode
row's token may still be unknown. A stop id is therefore seen a step late and the surplus token dropped at commit.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from onechip.cache.pages import PageTable
from onechip.engine.buckets import Limits
from onechip.engine.sequence import LAUNCH_STOPS, Plan, PlanRow, Sequence
from onechip.request import Request


class Scheduler:
    """Owns the waiting queue, the running list, the slots and, through `pages`, the memory."""

    def __init__(self, pages: PageTable, max_seqs: int, limits: Limits):
        self.pages = pages
        self.limit(limits)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_slots = list(range(max_seqs - 1, -1, -1))
        self.preemptions = 0
        self.most_steps = 1

    def limit(self, limits: Limits) -> None:
        """Plan within these from now on: while programs are still being compiled, not every step has one.

        `chunk`: most prefill tokens a step; `budget`: most tokens, decodes included.
        """
        self.rows, self.chunk, self.budget = limits.rows, limits.chunk, limits.budget
        self.score_chunk = limits.score

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its pages and slot are free at once (see `cache.pages`)."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self._vacate(sequence)

    def plan(self) -> Plan | None:
        """The next step, or None when nothing can run before a step in flight is committed."""
        row, admitted = self._score_row()
        if row is not None:
            return self._book([row], admitted)
        rows = self._decode_rows()
        chunks, admitted = self._chunk_rows(self.budget - len(rows))
        return self._book(rows + sorted(chunks, key=lambda row: row.count > 1), admitted)

    def _score_row(self) -> tuple[PlanRow | None, tuple[Sequence, ...]]:
        """A chunk of a prompt whose every position's log probability is wanted: rare, so it runs alone."""
        admitted: tuple[Sequence, ...] = ()
        scoring = next((s for s in self._prefilling() if s.wants_prompt_logprobs), None)
        if scoring is None and self.waiting and self.waiting[0].wants_prompt_logprobs:
            scoring = self._admit_next([])
            admitted = () if scoring is None else (scoring,)
        if scoring is None:
            return None, ()
        row = self._chunk(scoring, min(self.chunk, self.score_chunk))
        return None if row is None else replace(row, score=True), admitted

    def _book(self, rows: list[PlanRow], admitted: tuple[Sequence, ...]) -> Plan | None:
        for row in rows:
            row.sequence.computed += row.count + row.steps - 1
            row.sequence.in_flight += row.made
        return Plan(tuple(rows), admitted) if rows else None

    def _decode_rows(self) -> list[PlanRow]:
        rows: list[PlanRow] = []
        most = self._launch_steps()
        for sequence in list(self.running):
            if not sequence.decodes:
                continue
            start = sequence.computed
            steps = min(most, sequence.max_length - sequence.length)
            if steps > 1 and self.pages.grow(sequence.id, start, start + steps):
                rows.append(PlanRow(sequence, start, 1, sample=True, steps=steps))
            elif self._make_room(sequence, start + 1):
                rows.append(PlanRow(sequence, start, 1, sample=True))
        return rows

    def _launch_steps(self) -> int:
        """Decode steps the next launch may take: see the module's story."""
        if self.most_steps == 1 or self.waiting or any(self._prefilling()):
            return 1
        requests = [sequence.request for sequence in self.running if sequence.decodes]
        stops = {request.stop_ids for request in requests if request.stop_ids}
        alone = len(stops) <= 1 and not any(map(needs_host, requests))
        return self.most_steps if alone else 1

    def _make_room(self, sequence: Sequence, stop: int) -> bool:
        """Pages for tokens up to `stop`, preempting the newest until they are there; False: it was the newest."""
        while not self.pages.grow(sequence.id, sequence.computed, stop):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        sequence.computed = 0
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.pages.release(sequence.id)
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        sequence.slot = None

    def _prefilling(self) -> Iterator[Sequence]:
        return (s for s in self.running if s.remaining > 1 and not s.full)

    def _chunk_rows(self, left: int) -> tuple[list[PlanRow], tuple[Sequence, ...]]:
        rows: list[PlanRow] = []
        admitted: list[Sequence] = []
        left = min(left, self.chunk)
        for sequence in list(self._prefilling()):
            if left <= 0 or sequence.slot is None or sequence.wants_prompt_logprobs:
                continue
            if (row := self._chunk(sequence, left)) is not None:
                rows.append(row)
                left -= row.count
        while left > 0 and self.waiting and not self.waiting[0].wants_prompt_logprobs:
            sequence = self._admit_next(rows)
            if sequence is None:
                break
            admitted.append(sequence)
            row = self._chunk(sequence, left)
            assert row is not None, "admission checked the pages"
            rows.append(row)
            left -= row.count
        return rows, tuple(admitted)

    def _chunk(self, sequence: Sequence, most: int) -> PlanRow | None:
        """The next prefill chunk; None while pages are short, unless preempting newer ones helps."""
        count = min(sequence.remaining, most)
        start, stop = sequence.computed, sequence.computed + count
        while not self.pages.grow(sequence.id, start, stop):
            victim = self.running[-1]
            if victim is sequence or victim.remaining <= 1:
                return None
            self._preempt(victim)
        return PlanRow(sequence, start, count, sample=stop == sequence.length)

    def _admit_next(self, planned: list[PlanRow]) -> Sequence | None:
        """Move the first waiting sequence to running, if a slot is free and its pages are to be had.

        Prompts under way come first: their tokens beyond the chunks already planned for this step are reserved.
        """
        sequence = self.waiting[0]
        # A preempted sequence's last tokens may still be on the device: it can't be computed again without them.
        if not self.free_slots or sequence.in_flight or len(self.running) >= self.rows:
            return None
        if sequence.wants_prompt_logprobs and not self.score_chunk:
            return None
        pending = sum(s.remaining for s in self._prefilling())
        pending -= sum(row.count for row in planned if row.sequence.remaining > 1)
        room = min(sequence.length + 1, sequence.max_length)
        if not self.pages.fits(room, self.chunk, reserved=pending):
            return None
        self.waiting.popleft()
        sequence.slot = self.free_slots.pop()
        self.running.append(sequence)
        return sequence


def needs_host(request: Request) -> bool:
    """Whether the host must see each token of the request before the next is worth making."""
    sampling = request.sampling
    many = len(request.stop_ids) > LAUNCH_STOPS
    watched = bool(sampling.stop) or sampling.logprobs is not None
    return many or watched or request.grammar is not None
