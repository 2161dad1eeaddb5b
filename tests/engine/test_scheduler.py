"""Plans: decodes first, prompts within the budget, the newest gives way, and whoever gave way comes back first."""

from typing import Any

from tests.fake_runner import fake_engine, request

from onechip.engine.loop import Engine
from onechip.engine.scheduler import Scheduler
from onechip.engine.sequence import Plan, Sequence


class Book:
    """A scheduler whose steps are committed by hand."""

    def __init__(self, **shape: Any):
        self.engine: Engine = fake_engine(**shape)
        self.scheduler: Scheduler = self.engine.scheduler

    def add(self, key: str, prompt: int, max_tokens: int = 20, **sampling: Any) -> Sequence:
        one = request(key, prompt, max_tokens, **sampling)
        sequence = Sequence(one, list(one.prompt_ids))
        self.scheduler.add(sequence)
        return sequence

    def plan(self, commit: bool = True) -> Plan:
        plan = self.scheduler.plan()
        assert plan is not None
        self.scheduler.pages.check_integrity()
        if commit:
            self.commit(plan)
        return plan

    def commit(self, plan: Plan) -> None:
        for row in plan.rows:
            if row.sample:
                row.sequence.tokens.append(7)
                row.sequence.in_flight -= 1
            if row.score:
                stop = min(row.start + row.count + 1, row.sequence.prompt_len)
                row.sequence.prompt_logprobs += [None] * (stop - row.start - 1)


def rows(plan: Plan) -> list[tuple[str, int, int, bool]]:
    return [(row.sequence.id, row.start, row.count, row.sample) for row in plan.rows]


def test_a_prompt_is_cut_into_chunks_and_only_its_end_is_sampled():
    book = Book(chunk=8)
    book.add("a", 19)
    assert rows(book.plan()) == [("a", 0, 8, False)]
    assert rows(book.plan()) == [("a", 8, 8, False)]
    assert rows(book.plan()) == [("a", 16, 3, True)]
    assert rows(book.plan()) == [("a", 19, 1, True)]


def test_decodes_come_first_and_prompts_share_what_is_left_of_the_budget():
    book = Book(chunk=8)
    book.add("a", 3)
    book.plan()
    book.add("b", 5)
    book.add("c", 9)
    assert rows(book.plan()) == [("a", 3, 1, True), ("b", 0, 5, True), ("c", 0, 2, False)]
    assert rows(book.plan()) == [("a", 4, 1, True), ("b", 5, 1, True), ("c", 2, 6, False)]


def test_a_prompt_of_one_token_joins_the_single_rows():
    book = Book(chunk=8)
    book.add("long", 5)
    book.add("short", 1)
    plan = book.plan()
    assert rows(plan) == [("short", 0, 1, True), ("long", 0, 5, True)]
    assert (plan.singles, plan.tokens, plan.admitted) == (
        1,
        6,
        tuple(r.sequence for r in plan.rows[::-1]),
    )


def test_no_more_run_than_there_are_slots():
    book = Book(max_seqs=2)
    for key in "abc":
        book.add(key, 2, 3)
    plans = [book.plan() for _ in range(2)]
    assert [s.id for s in plans[0].admitted] == ["a", "b"]
    assert plans[1].admitted == ()
    book.scheduler.remove(plans[0].rows[0].sequence)
    assert [s.id for s in book.plan().admitted] == ["c"]


def test_nothing_is_planned_for_a_sequence_whose_last_token_is_in_flight():
    book = Book()
    book.add("a", 3, 1)
    book.plan(commit=False)
    assert book.scheduler.plan() is None


def test_planning_goes_one_token_ahead_of_what_is_known():
    book = Book()
    sequence = book.add("a", 3)
    book.plan(commit=False)
    (row,) = book.plan(commit=False).rows
    assert (row.start, row.count, row.known) == (3, 1, [])
    assert (sequence.length, sequence.computed, sequence.in_flight) == (5, 4, 2)


def full_house(**shape: Any) -> tuple[Book, list[Sequence]]:
    """Three sequences of 8 tokens that fill the pool of 6 pages to the last slot."""
    book = Book(full_pages=6, sliding_pages=40, page_size=4, chunk=24, max_seqs=4, **shape)
    three = [book.add(key, 6) for key in "abc"]
    assert len(book.plan().rows) == 3
    book.plan()
    assert all(s.computed == 7 and s.length == 8 for s in three)
    book.plan()
    return book, three


def test_when_pages_run_out_the_newest_gives_way_and_keeps_its_tokens():
    book, (a, b, c) = full_house()
    tokens = list(c.tokens)
    plan = book.plan()
    assert [row.sequence for row in plan.rows] == [a, b]
    assert list(book.scheduler.waiting) == [c]
    assert (c.slot, c.computed, c.tokens) == (None, 0, tokens)
    assert book.scheduler.preemptions == 1


def test_a_preempted_sequence_comes_before_those_that_came_later():
    book, (a, b, c) = full_house()
    late = book.add("late", 2)
    book.plan()
    assert list(book.scheduler.waiting) == [c, late]
    book.scheduler.remove(a)
    plan = book.plan()
    assert [s.id for s in plan.admitted] == ["c"]
    assert (b.slot, [r.count for r in plan.rows if r.sequence is c]) != (None, [])


def test_a_preempted_sequence_waits_until_its_token_in_flight_is_known():
    """It would be computed again without it."""
    book, (a, b, c) = full_house()
    c.in_flight += 1
    book.plan()
    book.scheduler.remove(a)
    book.scheduler.remove(b)
    assert book.scheduler.plan() is None
    c.in_flight -= 1
    assert [s.id for s in book.plan().admitted] == ["c"]


def test_two_that_give_way_come_back_in_their_order():
    book = Book(full_pages=6, sliding_pages=40, page_size=4, chunk=24)
    three = [book.add(key, 7) for key in "abc"]
    for _ in range(2):
        book.plan()
    a, b, c = three
    book.scheduler.pages.grow("other", 0, 0)
    while len(book.scheduler.running) > 1:
        book.plan()
    assert list(book.scheduler.waiting) == [b, c]
    assert book.scheduler.running == [a]


def test_nobody_is_admitted_into_pages_that_a_prompt_under_way_will_need():
    book = Book(full_pages=8, page_size=4, chunk=8)
    book.add("a", 20, 4)
    book.plan()
    book.add("b", 12, 4)
    plan = book.plan()
    assert [row.sequence.id for row in plan.rows] == ["a"]
    assert [s.id for s in book.scheduler.waiting] == ["b"]


def test_both_pools_are_asked_before_admission():
    book = Book(full_pages=64, sliding_pages=4, page_size=4, window=8, chunk=4)
    book.add("a", 12)
    for _ in range(3):
        book.plan()
    book.add("b", 12)
    assert [row.sequence.id for row in book.plan().rows] == ["a"]


def test_a_prompt_with_log_probabilities_runs_alone_until_its_last_prediction():
    book = Book(chunk=8)
    book.add("a", 3)
    book.plan()
    book.add("scored", 17, prompt_logprobs=0)
    plans = [book.plan() for _ in range(3)]
    assert [rows(plan) for plan in plans[:2]] == [
        [("scored", 0, 8, False)],
        [("scored", 8, 8, False)],
    ]
    assert [plan.score for plan in plans] == [True, True, False]
    # The last token predicts nothing within the prompt: it is an ordinary row.
    assert rows(plans[2]) == [("a", 3, 1, True), ("scored", 16, 1, True)]


def test_removing_a_waiting_sequence_takes_nothing_from_the_others():
    book = Book(max_seqs=1)
    book.add("a", 3)
    book.plan()
    b, c = book.add("b", 3), book.add("c", 3)
    book.scheduler.remove(b)
    book.scheduler.remove(b)
    assert list(book.scheduler.waiting) == [c]
    assert sorted(book.scheduler.free_slots) == []
