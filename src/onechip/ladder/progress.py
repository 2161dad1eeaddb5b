"""The bar on stderr of everything long. Without a terminal nothing is drawn and rich is not imported.

Owns what is drawn, not what is done: a measurement gets a `Progress` and tells it.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bars


class Progress(Protocol):
    """Where a measurement tells how far it is."""

    def start(self, what: str, total: int) -> None:
        """A new stretch of `total` steps begins; it takes the last one's place."""
        ...

    def step(self, note: str = "") -> None:
        """One step is done; `note` stands beside the bar."""
        ...


class Silent:
    """A Progress that draws nothing."""

    def start(self, what: str, total: int) -> None: ...

    def step(self, note: str = "") -> None: ...


@contextmanager
def shown() -> Generator[Progress]:
    """A bar with count, time spent and time left while the block runs, or a silent one without a terminal."""
    if not sys.stderr.isatty():
        yield Silent()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    # Ten refreshes a second would cost more of a core than the measurement itself.
    with Bars(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bars:
        yield _Bar(bars)


class _Bar:
    def __init__(self, bars: "Bars"):
        self.bars = bars
        self.task = bars.add_task("", visible=False, note="")

    def start(self, what: str, total: int) -> None:
        self.bars.reset(self.task, total=total, description=what, visible=True, note="")

    def step(self, note: str = "") -> None:
        self.bars.update(self.task, advance=1, note=note)
