"""How start-up shows itself: log levels of a process, and progress bars where a person looks at a terminal.

It owns what is printed, not what is done: `engine.build` tells a Reporter, and this draws it. Without a terminal there
are no bars and rich is not imported; the log lines of `engine.build` say the same afterwards. No jax here: the server
process uses it too.
"""

import json
import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


@dataclass
class Reporter:
    """Where start-up tells what it does. The defaults are silent.

    `loading` hears bytes done and bytes in all; `compiling` programs done, programs in all, and what the one that is
    compiled now is for.
    """

    loading: Callable[[int, int], None] | None = None
    compiling: Callable[[int, int, str], None] | None = None


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and what a record has in `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr(log_format: str = "text") -> None:
    """Our own news from INFO on, everybody else's (jax tells of backends it did not find) from WARNING on."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(name)s: %(message)s")
    handler.setFormatter(JsonLines() if log_format == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("onechip").setLevel(logging.INFO)


@contextmanager
def shown() -> Generator[Reporter]:
    """A Reporter that draws bars on stderr while the block runs, or a silent one where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield Reporter()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        console.show_cursor(
            True
        )  # rich hides it, and a process ended by a signal could not bring it back
        weights = bars.add_task("weights", visible=False, count="")
        programs = bars.add_task("programs", visible=False, count="")

        def loading(done: int, total: int) -> None:
            count = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB"
            bars.update(weights, completed=done, total=total, count=count, visible=True)

        def compiling(done: int, total: int, what: str) -> None:
            count = f"{done} of {total}: {what}" if what else f"{done} of {total}"
            bars.update(programs, completed=done, total=total, count=count, visible=True)

        yield Reporter(loading, compiling)
