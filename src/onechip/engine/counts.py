"""How often this process traced and compiled, by jax's own account.

What compiles on the engine's compiler threads was planned; anything else after the engine is ready is a fault that
`/metrics` shows.
"""

import threading
from collections import Counter
from functools import cache
from typing import Any

import jax

from onechip.engine.programs import COMPILER_THREADS

_COMPILE = "/jax/core/compile/backend_compile_duration"
_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_HIT = "/jax/compilation_cache/cache_hits"
_PLANNED = "planned"


def compiles() -> int:
    """Programs compiled so far, or fetched from the persistent cache."""
    return _events()[_COMPILE]


def unplanned_compiles() -> int:
    """Those of them that no compiler thread asked for."""
    return _events()[_COMPILE] - _events()[_PLANNED]


def cache_hits() -> int:
    """How many came from the persistent cache."""
    return _events()[_HIT]


def traces() -> int:
    return _events()[_TRACE]


@cache
def _events() -> Counter[str]:
    """Counts of jax's monitoring events, registered once a process."""
    seen: Counter[str] = Counter()
    lock = threading.Lock()

    def listen(event: str, *_seconds: float, **_: Any) -> None:
        with lock:
            seen[event] += 1
            if event == _COMPILE and threading.current_thread().name.startswith(COMPILER_THREADS):
                seen[_PLANNED] += 1

    jax.monitoring.register_event_listener(listen)
    jax.monitoring.register_event_duration_secs_listener(listen)
    return seen
