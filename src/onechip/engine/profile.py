"""A jax.profiler trace of a stated number of launches, begun with the first one after the engine is ready.

The loop's phases (plan, dispatch, collect, commit) are annotations in it, the model's layer kinds are scopes in the
device's rows. Read it with `tensorboard --logdir DIR` (plugin xprof) or at ui.perfetto.dev. Owns when to begin and end.
"""

import logging
from contextlib import AbstractContextManager
from pathlib import Path

import jax

log = logging.getLogger("onechip.engine")


def phase(name: str) -> AbstractContextManager[object]:
    """Name a phase of the loop in a trace; about a microsecond when none is taken."""
    return jax.profiler.TraceAnnotation(f"onechip.{name}")


class Profile:
    """Counts launches by `launched` and writes the trace to `folder` after `steps` of them."""

    def __init__(self, folder: Path, steps: int):
        self.folder = folder
        self.left = steps
        self._running = False

    def before_launch(self) -> None:
        if self.left and not self._running:
            jax.profiler.start_trace(str(self.folder))
            self._running = True

    def launched(self) -> None:
        if self._running:
            self.left -= 1

    def collected(self) -> None:
        """After a launch's results are in: the last one's are part of the trace."""
        if self._running and not self.left:
            self.stop()

    def stop(self) -> None:
        """End the trace now, with what it has (the engine stops, or all launches are in)."""
        if self._running:
            jax.profiler.stop_trace()
            self._running, self.left = False, 0
            log.info("profile written to %s", self.folder)
