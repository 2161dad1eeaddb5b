"""How reports look in a terminal: one kind of table, and lines that no file cuts at 80 columns. Knows no report."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def console(given: Console | None, least: int) -> Console:
    """`given`, or stdout; at least so many columns wide where it is no terminal."""
    found = given or Console()
    return found if found.is_terminal else Console(width=max(found.width, least), file=found.file)


def table(title: str, columns: Sequence[str]) -> Table:
    """An empty table. Columns are right-aligned, but for those whose name begins with "<"."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        made.add_column(column.lstrip("<"), justify="left" if column.startswith("<") else "right")
    return made
