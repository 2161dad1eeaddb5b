"""Pages are held once or free, come all or none, and no sequence ever holds more than its planned peak."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from onechip.cache.pages import PageTable, PoolShape, peak_pages

WINDOWS = st.sampled_from([1, 2, 3, 4, 7, 8, 9, 16])
PAGE_SIZES = st.sampled_from([1, 2, 4, 8])


def table(page_size: int, window: int | None, full: int = 12, sliding: int = 8) -> PageTable:
    shapes = {"full": PoolShape(full + 1, None)}
    if window is not None:
        shapes["sliding"] = PoolShape(sliding + 1, window)
    return PageTable(page_size, shapes)  # type: ignore[arg-type]


class Books(RuleBasedStateMachine):
    """Sequences grow chunk by chunk, lose what their window left behind, and go."""

    @initialize(page_size=PAGE_SIZES, window=WINDOWS)
    def start(self, page_size: int, window: int) -> None:
        self.window = window
        self.pages = table(page_size, window)
        self.length: dict[str, int] = {}

    @rule(key=st.sampled_from("abc"), chunk=st.integers(1, 20))
    def grow(self, key: str, chunk: int) -> None:
        start = self.length.get(key, 0)
        held = {kind: list(rows.pages) for kind, rows in self.pages.held.get(key, {}).items()}
        free = {kind: len(pool.free) for kind, pool in self.pages.pools.items()}
        if self.pages.grow(key, start, start + chunk):
            self.length[key] = start + chunk
            self.sees(key, start)
            return
        # Refused: full pages as before, of the sliding ones only those that nobody can see are gone.
        self.length.setdefault(key, 0)
        kept = self.pages.held[key]
        assert kept["full"].pages == held.get("full", [])
        dropped = len(held.get("sliding", [])) - len(kept["sliding"].pages)
        assert kept["sliding"].pages == held.get("sliding", [])[dropped:]
        stop = -(-(start + chunk) // self.pages.page_size)
        short = {
            kind: stop - rows.first - len(rows.pages) > free[kind] + (kind == "sliding") * dropped
            for kind, rows in kept.items()
        }
        assert any(short.values()), "refused although both pools had enough"

    @rule(key=st.sampled_from("abc"))
    def trim(self, key: str) -> None:
        if key in self.length:
            self.pages.trim(key, self.length[key])

    @rule(key=st.sampled_from("abc"))
    def release(self, key: str) -> None:
        self.pages.release(key)
        self.length.pop(key, None)
        assert key not in self.pages.held

    def sees(self, key: str, start: int) -> None:
        """Every key visible to a query from `start` on has a page, and none is older than the window needs."""
        size, stop = self.pages.page_size, self.length[key]
        low = max(0, start - self.window + 1)
        held = self.pages.held[key]
        assert held["full"].first == 0 and len(held["full"].pages) == -(-stop // size)
        assert held["sliding"].first == low // size
        assert held["sliding"].first + len(held["sliding"].pages) == -(-stop // size)

    @invariant()
    def integrity(self) -> None:
        if not hasattr(self, "pages"):
            return
        self.pages.check_integrity()
        held = sum(len(r.pages) for rows in self.pages.held.values() for r in rows.values())
        assert self.pages.free + held == self.pages.total
        assert 0 <= self.pages.usage <= 1

    def teardown(self) -> None:
        if not hasattr(self, "pages"):
            return
        for key in "abc":
            self.pages.release(key)
        assert self.pages.free == self.pages.total
        assert self.pages.usage == 0


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@given(
    page_size=PAGE_SIZES,
    window=WINDOWS,
    chunk=st.integers(1, 12),
    parts=st.lists(st.integers(1, 12), min_size=1, max_size=30),
)
@settings(deadline=None)
def test_no_chunking_exceeds_the_peak(page_size: int, window: int, chunk: int, parts: list[int]):
    pages = table(page_size, window, full=400, sliding=400)
    parts = [min(part, chunk) for part in parts]
    total, start = sum(parts), 0
    for part in parts:
        assert pages.grow("a", start, start + part)
        start += part
        for kind, rows in pages.held["a"].items():
            own = window if kind == "sliding" else None
            assert len(rows.pages) <= peak_pages(total, chunk, own, page_size)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize("window", [1, 3, 8, 9])
@pytest.mark.parametrize("chunk", [1, 5, 8])
def test_some_chunking_reaches_the_peak(page_size: int, window: int, chunk: int):
    """A looser bound would cost each sequence a page, and every program a table column."""
    most = 0
    for first in range(
        1, page_size + 1
    ):  # the first parts decide where in a page the later chunks begin
        pages, start = table(page_size, window, full=400, sliding=400), 0
        for part in [1] * first + [chunk] * (2 * (window + page_size)):
            assert pages.grow("a", start, start + part)
            start += part
            most = max(most, len(pages.held["a"]["sliding"].pages))
    assert most == peak_pages(start, chunk, window, page_size)


@given(page_size=PAGE_SIZES, window=WINDOWS, chunk=st.integers(1, 12), tokens=st.integers(1, 60))
def test_what_fits_an_empty_table_can_be_grown_to_its_end(
    page_size: int, window: int, chunk: int, tokens: int
):
    pages = table(page_size, window)
    assert pages.fits(tokens, chunk) == pages.could_ever_fit(tokens, chunk)
    if pages.fits(tokens, chunk):
        for start in range(0, tokens, chunk):
            assert pages.grow("a", start, min(tokens, start + chunk))


def test_pages_behind_the_window_can_be_had_by_another_sequence():
    pages = table(4, 8, full=64, sliding=5)
    assert pages.grow("a", 0, 20)
    assert not pages.grow("b", 0, 4)
    pages.trim("a", 20)
    assert pages.held["a"]["sliding"].first == 3
    assert pages.grow("b", 0, 12)
    pages.check_integrity()


def test_reserved_tokens_are_not_given_away():
    pages = table(4, None, full=10)
    assert pages.fits(20, 8, reserved=20)
    assert not pages.fits(20, 8, reserved=21)


def test_usage_is_that_of_the_fuller_pool():
    pages = table(4, 8, full=10, sliding=4)
    assert pages.grow("a", 0, 8)
    assert pages.usage == 0.5


def test_integrity_notices_a_page_held_twice_and_one_lost():
    pages = table(4, None)
    assert pages.grow("a", 0, 8)
    page = pages.held["a"]["full"].pages[0]
    pages.held["a"]["full"].pages.append(page)
    with pytest.raises(AssertionError):
        pages.check_integrity()
    del pages.held["a"]["full"].pages[-2:]
    with pytest.raises(AssertionError):
        pages.check_integrity()
