"""Every request ends once with the right tokens, whatever is submitted, aborted or preempted, and nothing leaks."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.fake_runner import FakeRunner, Outcome, expected, fake_engine, gather, request

from onechip.engine.loop import Engine, run_until_idle
from onechip.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from onechip.request import Event, Request


def finish(engine: Engine, *requests: Request) -> dict[str, Outcome]:
    """Submit all, run to the end, check that nothing is left."""
    for one in requests:
        engine.submit(one)
    outcomes = gather(run(engine))
    engine.check_idle()
    assert outcomes.keys() == {one.id for one in requests}
    return outcomes


def run(engine: Engine) -> list[Event]:
    """Step to the end: in bounded steps, because alone a sequence needs one a token, and preemption multiplies that."""
    events: list[Event] = []
    limit = 10 + 60 * len(engine.sequences) * (len(engine.sequences) + 1)
    while engine.has_work:
        events += engine.step()
        limit -= 1
        assert limit > 0, "no progress"
    return events


def check(one: Request, outcome: Outcome) -> None:
    """The outcome of a request that nobody aborted."""
    tokens, reason = expected(one)
    assert (tuple(outcome.tokens), outcome.finish) == (tokens, reason), one
    assert outcome.stopped_by == (tokens[-1] if reason == "stop" else None)
    if one.sampling.logprobs is not None:
        assert [entry.token_id for entry in outcome.logprobs] == outcome.tokens
    if one.sampling.prompt_logprobs is None:
        assert outcome.prompt is None
    else:
        assert outcome.prompt is not None and outcome.prompt[0] is None
        rows = [entry.token_id for entry in outcome.prompt[1:] if entry is not None]
        assert rows == list(one.prompt_ids[1:])


SIZES = st.integers(1, 24)


@st.composite
def requests(draw: st.DrawFn, key: str, *, scored: bool = True) -> Request:
    prompt = draw(st.lists(st.integers(0, 500), min_size=1, max_size=24))
    max_tokens = draw(SIZES)
    stops = draw(st.sets(st.integers(prompt[-1], prompt[-1] + 12), max_size=3))
    return request(
        key,
        prompt,
        max_tokens,
        sorted(stops),
        min_tokens=draw(st.integers(0, min(4, max_tokens))),
        logprobs=draw(st.sampled_from([None, None, None, 0])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])) if scored else None,
    )


ENGINES = st.fixed_dictionaries(
    {
        "max_seqs": st.integers(1, 6),
        "chunk": st.sampled_from([1, 2, 5, 8, 16]),
        "page_size": st.sampled_from([1, 2, 4, 8]),
        "full_pages": st.integers(6, 40),
        "sliding_pages": st.integers(6, 40),
        "window": st.sampled_from([None, 1, 3, 8, 9]),
        "platform": st.sampled_from(["cpu", "tpu"]),
        "steps": st.sampled_from([1, 2, 3, 8]),
    }
)


class Life(RuleBasedStateMachine):
    """Requests come, are aborted and run in any order on pools too small for them."""

    @initialize(shape=ENGINES)
    def start(self, shape: dict[str, object]) -> None:
        self.engine = fake_engine(**shape, max_waiting=6)  # type: ignore[arg-type]
        self.sent: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.outcomes: dict[str, Outcome] = {}

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        one = data.draw(requests(f"r{len(self.sent)}"))
        waiting = len(self.engine.scheduler.waiting)
        before = dict(self.engine.sequences)
        try:
            self.engine.submit(one)
        except Overloaded:
            assert waiting >= 6 and self.engine.sequences == before
        except InvalidRequest:
            pages = self.engine.scheduler.pages
            length = len(one.prompt_ids) + (one.sampling.max_tokens or 0)
            assert not pages.could_ever_fit(length, self.engine.scheduler.chunk)
            assert self.engine.sequences == before
        else:
            self.sent[one.id] = one

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([*self.sent, "nobody"]))
        if key in self.engine.sequences:
            self.aborted.add(key)
        self.engine.abort(key)
        assert key not in self.engine.sequences

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert event.request_id in self.sent
            self.outcomes.setdefault(event.request_id, Outcome()).push(event)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        scheduler.pages.check_integrity()
        slots = [s.slot for s in scheduler.running]
        every = [slot for slot in [*slots, *scheduler.free_slots] if slot is not None]
        assert sorted(every) == list(range(len(slots) + len(scheduler.free_slots)))
        assert all(s.slot is None for s in scheduler.waiting)
        assert set(scheduler.pages.held) <= {s.id for s in scheduler.running}
        ended = {key for key, outcome in self.outcomes.items() if outcome.finish}
        reported = ended | {event.request_id for event in self.engine.ended if event.finish}
        assert self.sent.keys() == reported | self.engine.sequences.keys()
        assert not reported & self.engine.sequences.keys()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.take(run(self.engine))
        self.engine.check_idle()
        for key, one in self.sent.items():
            outcome = self.outcomes[key]
            if key in self.aborted:
                assert outcome.finish == "abort"
                tokens, _ = expected(one)
                assert tuple(outcome.tokens) == tokens[: len(outcome.tokens)]
            else:
                check(one, outcome)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@given(shape=ENGINES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_oldest_running_sequence_never_waits_for_a_newer_one(
    shape: dict[str, object], data: st.DataObject
):
    """Every second step moves it on: one step may do nothing but commit what it waits for."""
    engine = fake_engine(**shape)  # type: ignore[arg-type]
    for index in range(data.draw(st.integers(2, 10))):
        one = data.draw(requests(f"r{index}", scored=False))
        length = len(one.prompt_ids) + (one.sampling.max_tokens or 0)
        if engine.scheduler.pages.could_ever_fit(length, engine.scheduler.chunk):
            engine.submit(one)
    for _ in range(3000):
        oldest = next(iter(engine.sequences.values()), None)
        before = oldest and (oldest.computed, len(oldest.tokens))
        engine.step()
        engine.step()
        if oldest is not None and oldest.finish is None:
            assert (oldest.computed, len(oldest.tokens)) > before
        if not engine.has_work:
            break
    engine.check_idle()


@pytest.mark.parametrize("window", [None, 8])
def test_preempted_sequences_keep_their_text(window: int | None):
    engine = fake_engine(full_pages=14, sliding_pages=40, window=window, max_seqs=4)
    many = [request(f"r{i}", range(50 * i, 50 * i + 9), 30, logprobs=0) for i in range(4)]
    outcomes = finish(engine, *many)
    assert engine.stats().preemptions > 0
    for one in many:
        check(one, outcomes[one.id])


def test_a_preempted_prompt_reports_each_log_probability_once():
    engine = fake_engine(full_pages=10, max_seqs=3, chunk=4)
    old = request("old", 9, 30)
    scored = request("scored", range(300, 320), 12, prompt_logprobs=0)
    outcomes = finish(engine, old, scored)
    assert engine.stats().preemptions > 0
    check(scored, outcomes["scored"])


@pytest.mark.parametrize("steps", range(14))
@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_an_abort_at_any_moment_ends_the_request_and_no_other(steps: int, victim: str):
    """Waiting, in the middle of its prompt, decoding, with a step in flight, or preempted."""
    engine = fake_engine(max_seqs=2, chunk=4, full_pages=9, sliding_pages=12, page_size=2)
    three = [request(name, range(90 * i, 90 * i + 7), 9) for i, name in enumerate("abc", 1)]
    for one in three:
        engine.submit(one)
    events = [event for _ in range(steps) for event in engine.step()]
    alive = victim in engine.sequences
    engine.abort(victim)
    assert victim not in engine.scheduler.pages.held
    engine.abort(victim)
    outcomes = gather(events + run(engine))
    engine.check_idle()
    for one in three:
        if one.id == victim and alive:
            assert outcomes[victim].finish == "abort"
        else:
            check(one, outcomes[one.id])


def test_an_id_may_be_used_again_while_its_surplus_step_is_in_flight():
    engine = fake_engine()
    first, again = request("same", [7], 9), request("same", [400, 401], 5)
    engine.submit(first)
    events = [event for _ in range(4) for event in engine.step()]
    assert engine.flying
    engine.abort("same")
    events += engine.step()
    engine.submit(again)
    second = gather(run(engine))
    assert gather(events)["same"].finish == "abort"
    check(again, second["same"])


def test_the_surplus_token_after_a_stop_id_is_dropped():
    engine = fake_engine()
    one = request("r", [10], 50, stop_ids=[13])
    outcome = finish(engine, one)["r"]
    assert outcome.tokens == [11, 12, 13]
    assert (outcome.finish, outcome.stopped_by) == ("stop", 13)
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    assert len(runner.buckets) == 4, "one step ran ahead of the stop, no more"
    assert engine.stats().generated_tokens == 3


def test_the_last_token_allowed_costs_no_surplus_step():
    engine = fake_engine()
    finish(engine, request("r", [10], 5))
    assert engine.stats().steps == 5


def test_a_launch_takes_several_steps_only_while_nobody_needs_the_host():
    engine = fake_engine(max_seqs=2, steps=4)
    runner = engine.runner
    assert isinstance(runner, FakeRunner)

    def steps_of(*requests: Request) -> set[int]:
        seen: set[int] = set()
        for one in requests:
            engine.submit(one)
        while engine.has_work:
            engine.step()
            seen |= {pending.plan.steps for pending in runner.flying}
        engine.check_idle()
        return seen

    assert steps_of(request("plain", 3, 9)) == {1, 4}, "a prompt's step makes one token"
    assert steps_of(request("stops", 3, 9, stop_ids=[900])) == {1, 4}
    assert steps_of(request("text", 3, 9, stop=("x",))) == {1}
    assert steps_of(request("scores", 3, 9, logprobs=0)) == {1}
    assert steps_of(request("many", 3, 9, stop_ids=range(900, 917))) == {1}
    assert steps_of(request("a", 3, 9, stop_ids=[900]), request("b", 3, 9, stop_ids=[901])) == {1}
    assert steps_of(request("c", 3, 9, stop_ids=[900]), request("d", 3, 9)) == {1, 4}


def test_a_launch_takes_one_step_while_somebody_waits():
    engine = fake_engine(max_seqs=1, steps=4)
    engine.submit(request("first", 3, 30))
    for _ in range(3):
        engine.step()
    engine.submit(request("second", 3, 1))
    engine.step()
    assert engine.flying[-1].plan.steps == 1


def test_a_row_that_stops_within_a_launch_makes_nothing_more():
    engine = fake_engine(steps=8)
    outcome = finish(engine, request("r", [10], 20, stop_ids=[14]))["r"]
    assert (outcome.tokens, outcome.finish, outcome.stopped_by) == ([11, 12, 13, 14], "stop", 14)


def test_a_launch_is_no_longer_than_its_last_token_allows():
    engine = fake_engine(steps=8)
    outcome = finish(engine, request("r", [10], 4))["r"]
    assert outcome.tokens == [11, 12, 13, 14]
    assert engine.steps == 2


def test_one_step_is_launched_before_the_last_one_is_read():
    engine = fake_engine()
    engine.submit(request("r", [10], 5))
    assert engine.step() == [] and len(engine.flying) == 1
    first = engine.step()
    assert [event.token_ids for event in first] == [(11,)] and len(engine.flying) == 1


def test_a_stop_id_that_comes_as_the_last_token_is_a_stop():
    outcome = finish(fake_engine(), request("r", [10], 3, stop_ids=[13]))["r"]
    assert (outcome.tokens, outcome.finish) == ([11, 12, 13], "stop")


def test_logits_that_are_not_finite_end_their_request_and_no_other():
    engine = fake_engine()
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    runner.broken = {"bad"}
    good = [request(f"good-{i}", [i], 6) for i in range(4)]
    outcomes = finish(engine, good[0], request("bad", [300], 6), *good[1:])
    assert (outcomes["bad"].finish, outcomes["bad"].tokens) == ("error", [])
    assert outcomes["bad"].error_code == "non_finite_logits"
    for one in good:
        check(one, outcomes[one.id])


def test_a_full_queue_refuses_and_keeps_nothing():
    engine = fake_engine(max_waiting=2)
    for key in "ab":
        engine.submit(request(key, 3, 2))
    with pytest.raises(Overloaded, match="the limit is 2"):
        engine.submit(request("c", 3, 2))
    outcomes = gather(run(engine))
    assert outcomes.keys() == {"a", "b"}
    engine.check_idle()


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (request("r", [], 2), InvalidRequest),
        (request("r", [10_000], 2), InvalidRequest),
        (request("r", [-1], 2), InvalidRequest),
        (request("r", 3, 2, [10_000]), InvalidRequest),
        (request("r", 60, 1), ContextLengthExceeded),
        (request("r", 30, 31), ContextLengthExceeded),
    ],
)
def test_a_bad_request_is_refused_on_arrival(bad: Request, error: type[Exception]):
    engine = fake_engine(max_model_len=60)
    with pytest.raises(error):
        engine.submit(bad)
    engine.check_idle()


def test_a_request_that_no_empty_pool_could_hold_is_refused_with_the_numbers():
    engine = fake_engine(full_pages=5, page_size=4)
    with pytest.raises(InvalidRequest, match="for 21 tokens, the pool holds 20"):
        engine.submit(request("r", 11, 10))
    check(one := request("r", 10, 10), finish(engine, one)["r"])


def test_an_id_in_use_is_refused():
    engine = fake_engine()
    engine.submit(request("r", 3, 2))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.submit(request("r", 3, 2))
    run(engine)
    engine.check_idle()


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_company_and_chunking_do_not_change_a_request(data: st.DataObject):
    one = data.draw(requests("me"))
    others = [data.draw(requests(f"other-{i}")) for i in range(data.draw(st.integers(1, 8)))]
    shape = data.draw(ENGINES)
    engine = fake_engine(**shape)  # type: ignore[arg-type]
    length = len(one.prompt_ids) + (one.sampling.max_tokens or 0)
    assume(engine.scheduler.pages.could_ever_fit(length, engine.scheduler.chunk))
    fitting = [o for o in others if _fits(engine, o)]
    check(one, finish(engine, one, *fitting)["me"])


def _fits(engine: Engine, one: Request) -> bool:
    length = len(one.prompt_ids) + (one.sampling.max_tokens or 0)
    return engine.scheduler.pages.could_ever_fit(length, engine.scheduler.chunk)


def test_counters_count_each_prompt_and_token_once_whatever_was_preempted():
    engine = fake_engine(full_pages=14, max_seqs=4)
    many = [request(f"r{i}", range(50 * i, 50 * i + 9), 30) for i in range(4)]
    finish(engine, *many)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert (stats.prompt_tokens, stats.generated_tokens) == (4 * 9, 4 * 30)
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.pages_free == stats.pages_total


def test_run_until_idle_gives_up_after_its_limit():
    engine = fake_engine()
    engine.submit(request("r", 3, 200))
    with pytest.raises(TimeoutError):
        run_until_idle(engine, limit_s=0.0)


def test_the_first_event_tells_how_long_the_request_waited_even_after_a_preemption():
    engine = fake_engine(max_seqs=1)
    engine.submit(request("a", 3, 4))
    engine.submit(request("b", 3, 2))
    queued = {
        key: [e.queued_s for e in run if e.request_id == key]
        for run in [run_until_idle(engine)]
        for key in "ab"
    }
    assert all(times[0] is not None and not any(times[1:]) for times in queued.values())
    assert queued["b"][0] > queued["a"][0] >= 0


def test_steps_are_counted_by_their_tokens():
    engine = fake_engine(chunk=8)
    engine.submit(request("a", 9, 3))
    run_until_idle(engine)
    stats = engine.stats()
    assert sum(stats.step_tokens) == stats.steps
    assert stats.packed_tokens == 9 + 2
    assert stats.step_tokens[:2] == (3, 1)
