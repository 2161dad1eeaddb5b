"""Two pools of pages and who holds which page. Plain integers: what the pages hold lives on the device.

Full-attention layers keep a sequence's whole context; sliding layers keep what the window can still see, and `trim`
gives the pages behind it back while the sequence runs. Growing is atomic over both pools: all pages or none. Page 0 of
each pool is never handed out: padding writes there. Freed pages may be handed out at once, although a step in flight
still touches them: steps run on the device in the order they were launched, so the new owner's first write comes later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from onechip.config import LayerKind


@dataclass
class PagePool:
    """Pages 1..count-1 of one pool; a stack, so that hot pages are used again first."""

    count: int
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        assert self.count >= 2
        self.free = list(range(self.count - 1, 0, -1))

    @property
    def usable(self) -> int:
        return self.count - 1

    def take(self, count: int) -> list[int]:
        assert count <= len(self.free)
        return [self.free.pop() for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        self.free.extend(reversed(pages))


@dataclass
class Held:
    """Pages of one sequence in one pool, in logical order; the first is logical page `first`."""

    first: int = 0
    pages: list[int] = field(default_factory=list[int])


@dataclass(frozen=True)
class PoolShape:
    """Pages of a pool, page 0 included, and the window of its layers (None: full attention)."""

    pages: int
    window: int | None


class PageTable:
    """Both pools, and every sequence's pages by its key."""

    def __init__(self, page_size: int, shapes: Mapping[LayerKind, PoolShape]):
        self.page_size = page_size
        self.shapes = dict(shapes)
        self.pools: dict[LayerKind, PagePool] = {
            kind: PagePool(shape.pages) for kind, shape in shapes.items()
        }
        self.held: dict[str, dict[LayerKind, Held]] = {}

    def grow(self, key: str, start: int, stop: int) -> bool:
        """Hold pages for tokens [start, stop), and for the keys that queries from `start` on can see.

        False, with nothing changed but pages behind the window returned, when a pool has too few.
        """
        mine = self.held.setdefault(key, self._none())
        self.trim(key, start)
        wanted: dict[LayerKind, int] = {
            kind: self._missing(held, stop) for kind, held in mine.items()
        }
        if any(count > len(self.pools[kind].free) for kind, count in wanted.items()):
            return False
        for kind, count in wanted.items():
            mine[kind].pages += self.pools[kind].take(count)
        return True

    def trim(self, key: str, start: int) -> None:
        """Return pages that no query at position `start` or later can see."""
        for kind, held in self.held[key].items():
            window = self.shapes[kind].window
            if window is None:
                continue
            keep = max(0, start - window + 1) // self.page_size
            surplus = min(keep - held.first, len(held.pages))
            if surplus > 0:
                self.pools[kind].give(held.pages[:surplus])
                del held.pages[:surplus]
            held.first = max(held.first, keep)

    def release(self, key: str) -> None:
        """Return everything a sequence holds; a key that holds nothing is ignored."""
        for kind, held in self.held.pop(key, {}).items():
            self.pools[kind].give(held.pages)

    def fits(self, tokens: int, chunk: int, reserved: int = 0) -> bool:
        """Whether a sequence of `tokens`, prefilled `chunk` at a time, could get its pages now."""
        return all(
            self._peak(kind, tokens, chunk) + self.pages(reserved) <= len(pool.free)
            for kind, pool in self.pools.items()
        )

    def could_ever_fit(self, tokens: int, chunk: int) -> bool:
        """Whether a sequence of `tokens` fits when it runs alone."""
        return all(
            self._peak(kind, tokens, chunk) <= pool.usable for kind, pool in self.pools.items()
        )

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @property
    def total(self) -> int:
        return sum(pool.usable for pool in self.pools.values())

    @property
    def free(self) -> int:
        return sum(len(pool.free) for pool in self.pools.values())

    @property
    def usage(self) -> float:
        """Used share of the fuller pool, 0 to 1."""
        return max(1 - len(pool.free) / pool.usable for pool in self.pools.values())

    def check_integrity(self) -> None:
        """Every page is free or held exactly once, page 0 never."""
        for kind, pool in self.pools.items():
            held = [page for rows in self.held.values() for page in rows[kind].pages]
            assert sorted(held + pool.free) == list(range(1, pool.count)), kind

    def _none(self) -> dict[LayerKind, Held]:
        return {kind: Held() for kind in self.pools}

    def _missing(self, held: Held, stop: int) -> int:
        return max(0, self.pages(stop) - held.first - len(held.pages))

    def _peak(self, kind: LayerKind, tokens: int, chunk: int) -> int:
        return peak_pages(tokens, chunk, self.shapes[kind].window, self.page_size)


def peak_pages(tokens: int, chunk: int, window: int | None, page_size: int) -> int:
    """The most pages a sequence of `tokens` holds at once in a pool of that window."""
    if window is not None:
        # The window before a chunk's first query and the chunk itself, begun at the last slot of a page.
        tokens = min(tokens, window - 1 + chunk + page_size - 1)
    return -(-tokens // page_size)
