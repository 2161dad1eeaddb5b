"""The engine's loop: it keeps one step running on the device while it plans the next and reads the last.

    step():  plan n+1  ->  launch n+1  ->  wait for n  ->  commit n  ->  constrain n+1

1. `submit` checks a request and queues it, under a grammar once that is compiled; `abort` marks one. Neither touches
   the device.
2. `scheduler.plan` picks rows and pages as if step n had already run (its tokens stay on the device).
3. `runner.dispatch` launches the plan and returns at once.
4. The oldest launched step is collected and committed: tokens appended, stops found, pages freed, events made.
5. The rows of n+1 that are under a grammar now have their tokens: their masks are made while its forward pass runs,
   and their sampling is launched behind it (`runner.constrain`). Steps without such rows know nothing of it.

The cost of being a step ahead: a stop id is seen when the next step is already running, whose surplus token for that
row is dropped here. A finished row's pages are free at once although that step still writes to them: steps run in
launch order, and a new owner writes before it reads. Every submitted request ends in exactly one event with `finish`.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from onechip.engine.buckets import Limits
from onechip.engine.grammar import Dead, RowMask
from onechip.engine.grammar_compiler import GrammarCompiler
from onechip.engine.pace import Pace
from onechip.engine.profile import Profile, phase
from onechip.engine.runner import Pending, Runner
from onechip.engine.scheduler import Scheduler
from onechip.engine.sequence import Plan, RowResult, Sequence
from onechip.engine.validate import check_request
from onechip.errors import InvalidRequest, NumericalError, OnechipError, Overloaded
from onechip.request import STEP_TOKEN_EDGES, EngineInfo, EngineStats, Event, Request

_NOTHING_S = 0.002  # what waits needs a program that is still being compiled: leave the machine to the compiler


class Engine:
    """One model on one device, driven by calling `step` while `has_work`."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        info: EngineInfo,
        *,
        max_waiting: int,
        grammars: GrammarCompiler | None = None,
        pace: Pace | None = None,
        compiles: Callable[[], int] = lambda: 0,
    ):
        self.runner = runner
        self.scheduler = scheduler
        self.info = info
        self.max_waiting = max_waiting
        self.grammars = grammars
        self.sequences: dict[str, Sequence] = {}
        self.flying: deque[Pending] = deque()
        self.ended: list[Event] = []
        self.steps = self.prompt_tokens = self.generated_tokens = self.packed_tokens = 0
        self.step_tokens = [0] * (len(STEP_TOKEN_EDGES) + 1)
        self.pace = pace or Pace(1)
        self._collected_at: float | None = None
        self._compiles = compiles
        self.profile: Profile | None = None
        self.limits: Callable[[], Limits | None] = lambda: None

    @property
    def has_work(self) -> bool:
        return bool(self.sequences or self.flying or self.ended)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot or for their grammar."""
        return len(self.scheduler.waiting) + len(self.grammars or ())

    def close(self) -> None:
        """The engine will not be driven any more: a trace that has not ended is written as far as it got."""
        if self.profile is not None:
            self.profile.stop()

    def idle(self) -> None:
        """There has been nothing to do for a while: the moment for what a request would else wait for."""
        if self.grammars is not None:
            self.grammars.warm()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest, ContextLengthExceeded or Overloaded; then nothing is kept."""
        check_request(request, self.info)
        if request.id in self.sequences:
            raise InvalidRequest(f"request id {request.id!r} is in use", param="id")
        if self.waiting >= self.max_waiting:
            raise Overloaded(
                f"{self.waiting} requests wait already, the limit is {self.max_waiting}; retry later"
            )
        sequence = Sequence(request, list(request.prompt_ids))
        pages = self.scheduler.pages
        if not pages.could_ever_fit(sequence.max_length, self.scheduler.chunk):
            raise InvalidRequest(
                f"prompt and max_tokens need K/V pages for {sequence.max_length} tokens, the pool "
                f"holds {self.info.kv_tokens}; ask for fewer tokens or start with more --kv-tokens",
                param="max_tokens",
            )
        self.sequences[request.id] = sequence
        if request.grammar is None:
            self.scheduler.add(sequence)
        else:
            assert self.grammars is not None, "an engine that takes grammars can compile them"
            self.grammars.start(sequence)

    def abort(self, request_id: str) -> None:
        """End a request at the next step; its pages are free at once. Unknown and ended ids are ignored."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, Event(request_id, finish="abort"))

    def step(self) -> list[Event]:
        """Launch one step ahead, commit the oldest; returns its events. Blocks for the device, never for work."""
        self._queue_compiled()
        limits = self.limits()
        if limits is not None:
            self.scheduler.limit(limits)
        self.scheduler.most_steps = self.pace.steps
        with phase("plan"):
            plan = self.scheduler.plan()
        if plan is not None:
            self._launch(plan)
        elif self.sequences and not self.flying and not self.ended:
            time.sleep(_NOTHING_S)
        if self.flying and (plan is None or len(self.flying) > 1):
            results = self._collect()
            with phase("commit"):
                self._commit(results)
        if self.flying:
            with phase("constrain"):
                self._constrain(self.flying.pop())
        events, self.ended = self.ended, []
        return events

    def _launch(self, plan: Plan) -> None:
        if self.profile is not None:
            self.profile.before_launch()
        with phase("dispatch"):
            self.flying.append(self.runner.dispatch(plan))
        self._count(plan)
        if self.profile is not None:
            self.profile.launched()

    def _collect(self) -> list[RowResult]:
        """Results of the oldest launch. One that followed another at once tells how long its steps took."""
        pending = self.flying.popleft()
        with phase("collect"):
            results = self.runner.collect(pending)
        if self.profile is not None:
            self.profile.collected()
        now, before = time.monotonic(), self._collected_at
        if before is not None and pending.plan.singles == len(pending.plan.rows):
            self.pace.took(pending.plan.steps, now - before)
        self._collected_at = now if self.flying else None
        return results

    def stats(self) -> EngineStats:
        pages = self.scheduler.pages
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=self.waiting,
            kv_usage=pages.usage,
            pages_total=pages.total,
            pages_free=pages.free,
            preemptions=self.scheduler.preemptions,
            compiles_since_ready=self._compiles(),
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            packed_tokens=self.packed_tokens,
            step_tokens=tuple(self.step_tokens),
        )

    def check_idle(self) -> None:
        """With no work, every page and slot is free: called by tests after each scenario."""
        assert not self.has_work and not self.scheduler.running and not self.scheduler.waiting
        self.scheduler.pages.check_integrity()
        assert self.scheduler.pages.free == self.scheduler.pages.total

    def _count(self, plan: Plan) -> None:
        self.steps += 1
        self.packed_tokens += plan.tokens
        self.step_tokens[bisect_left(STEP_TOKEN_EDGES, plan.tokens)] += 1
        for sequence in plan.admitted:
            if sequence.queued_s is None:
                sequence.queued_s = time.monotonic() - sequence.submitted_at

    def _commit(self, results: list[RowResult]) -> None:
        for result in results:
            if result.row.sequence.finish is None:  # else the surplus step of a row that has ended
                self._commit_row(result.row.sequence, result)

    def _commit_row(self, sequence: Sequence, result: RowResult) -> None:
        if result.prompt_logprobs:  # a preempted prompt is computed again: take what is new
            known = len(sequence.prompt_logprobs) - 1 - result.row.start
            sequence.prompt_logprobs += result.prompt_logprobs[known:]
        if not result.row.sample:
            return
        sequence.in_flight -= result.row.made
        if result.tokens[-1] < 0:
            self._fail(sequence, NumericalError("the model's logits are not finite"))
            return
        first = len(sequence.tokens) == sequence.prompt_len
        sequence.tokens += result.tokens
        self.generated_tokens += len(result.tokens)
        self._emit(sequence, result, first)

    def _emit(self, sequence: Sequence, result: RowResult, first: bool) -> None:
        last = result.tokens[-1]
        stopped = last in sequence.request.stop_ids
        done = stopped or len(sequence.tokens) >= sequence.max_length
        if first:
            self.prompt_tokens += sequence.prompt_len
        if sequence.grammar is not None and not done:
            sequence.grammar.advance(last)
        prompt = tuple(sequence.prompt_logprobs) if first else ()
        event = Event(
            sequence.id,
            token_ids=result.tokens,
            logprobs=() if result.logprob is None else (result.logprob,),
            prompt_logprobs=prompt or None,
            stopped_by=last if stopped else None,
            queued_s=sequence.queued_s if first else None,
        )
        if not done:
            self.ended.append(event)
            return
        self._end(sequence, replace(event, finish="stop" if stopped else "length"))

    def _queue_compiled(self) -> None:
        if not self.grammars:
            return
        nothing_else = not (self.flying or self.scheduler.running or self.scheduler.waiting)
        for sequence, outcome in self.grammars.ready(wait=nothing_else):
            if isinstance(outcome, InvalidRequest):
                self._fail(sequence, outcome)
            else:
                sequence.grammar = outcome
                self.scheduler.add(sequence)

    def _constrain(self, pending: Pending) -> None:
        """Mask the rows under a grammar of the step just launched; those with nothing left to say end instead."""
        rows = {
            index: row.sequence.grammar
            for index, row in enumerate(pending.plan.rows)
            if row.sample and row.sequence.grammar and row.sequence.finish is None
        }
        masks: dict[int, RowMask] = {}
        if rows:
            assert self.grammars is not None
            for index, found in self.grammars.masks(rows).items():
                if isinstance(found, Dead):
                    self._end_dead(pending.plan.rows[index].sequence, found)
                else:
                    masks[index] = found
        self.flying.append(self.runner.constrain(pending, masks) if masks else pending)

    def _end_dead(self, sequence: Sequence, dead: Dead) -> None:
        if dead.error is None:
            self._end(sequence, Event(sequence.id, finish="stop"))
        else:
            param = sequence.request.grammar and sequence.request.grammar.param
            self._fail(sequence, InvalidRequest(dead.error, param=param))

    def _fail(self, sequence: Sequence, error: OnechipError) -> None:
        failed = Event(
            sequence.id,
            finish="error",
            error=error.message,
            error_code=error.code,
            error_param=error.param,
        )
        self._end(sequence, failed)

    def _end(self, sequence: Sequence, event: Event) -> None:
        assert sequence.finish is None and event.finish is not None
        sequence.finish = event.finish
        self.scheduler.remove(sequence)
        if self.grammars:
            self.grammars.drop(sequence)
        del self.sequences[sequence.id]
        self.ended.append(event)


def run_until_idle(engine: Engine, *, limit_s: float = 600.0) -> list[Event]:
    """Step until nothing is left (tests and warm-up). Raises TimeoutError after `limit_s`."""
    events: list[Event] = []
    deadline = time.monotonic() + limit_s
    while engine.has_work:
        events += engine.step()
        if time.monotonic() > deadline:
            raise TimeoutError(f"the engine is still busy after {limit_s} s")
    return events
