"""How many pages each pool gets. Planned from numbers, not probed: what the device has, less the weights, less room.

The sliding pool holds every sequence's window; what is left goes to the full pool. Refuses with the numbers, before
anything is loaded, when the weights or one sequence do not fit.
"""

import os
from dataclasses import dataclass
from typing import Any

from onechip.cache.pages import PoolShape, peak_pages
from onechip.config import EngineConfig, LayerKind, ModelConfig
from onechip.engine.buckets import CPU_PAGE
from onechip.errors import ConfigError, DoesNotFit

_MARGIN = 0.08  # of the memory: programs, activations, the runtime's own
_ACTIVATIONS = (
    256 << 20
)  # a step's temporaries: logits of 64 rows over 262,144 ids and their copies


@dataclass(frozen=True)
class MemoryPlan:
    """Pages of each pool (page 0 included), the tokens the full pool holds, and the bytes they take."""

    shapes: dict[LayerKind, PoolShape]
    kv_tokens: int
    kv_bytes: int
    weight_bytes: int
    memory: int


def device_memory(device: Any) -> int:
    """Bytes usable on the device; on a CPU what the machine has free now."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _reclaimable()


def _reclaimable() -> int:
    """Page cache Linux would give back; 0 where /proc does not say."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
    except OSError:
        return 0
    kilobytes = {
        name: int(fields.get(name, "0").split()[0]) for name in ("MemAvailable", "MemFree")
    }
    return max(0, kilobytes["MemAvailable"] - kilobytes["MemFree"]) * 1024


def plan_memory(
    config: ModelConfig,
    engine: EngineConfig,
    *,
    max_model_len: int,
    chunk: int,
    weight_bytes: int,
    kv_bytes_per_value: int,
    memory: int,
) -> MemoryPlan:
    """Sizes of both pools. Raises DoesNotFit or ConfigError."""
    room = int(memory * (1 - _MARGIN)) - _ACTIVATIONS - weight_bytes
    if room <= 0:
        raise DoesNotFit(
            f"the weights take {weight_bytes / 1e9:.2f} GB, the device has {memory / 1e9:.2f} GB and "
            f"{(memory - weight_bytes - room) / 1e9:.2f} GB of that are kept for programs and activations; "
            "choose a smaller model or a narrower --dtype"
        )
    page = CPU_PAGE if engine.page_size is None else engine.page_size
    if page < 1 or page & (page - 1):
        raise ConfigError(f"page_size is {page}; it must be a power of two")
    values = {
        kind: _values_a_token(config, kind) * kv_bytes_per_value for kind in ("full", "sliding")
    }
    window_pages = peak_pages(max_model_len, chunk, config.window, page) if config.window else 0
    sliding = engine.max_seqs * window_pages + 1
    most = engine.max_seqs * -(-max_model_len // page)
    left = room - sliding * page * values["sliding"]
    if engine.kv_tokens is not None:
        full = -(-engine.kv_tokens // page)
    else:
        full = min(most, left // max(1, page * values["full"]))
    if full * page * values["full"] > left or full < 1:
        raise DoesNotFit(_shortage(room, left, max(full, 1) * page, values, engine.max_seqs))
    shapes: dict[LayerKind, PoolShape] = {"full": PoolShape(full + 1, None)}
    if config.window is not None:
        shapes["sliding"] = PoolShape(sliding + 1, config.window)
    taken = (full + 1) * page * values["full"] + (sliding + 1) * page * values["sliding"]
    return MemoryPlan(shapes, full * page, taken, weight_bytes, memory)


def _shortage(room: int, left: int, tokens: int, values: dict[str, int], seqs: int) -> str:
    return (
        f"K/V pages for {tokens} tokens do not fit: {room / 1e9:.2f} GB are left beside the weights, "
        f"{max(0, room - left) / 1e9:.2f} GB of it go to the windows of {seqs} sequences and a token takes "
        f"{values['full']} B; lower --kv-tokens, --max-seqs or --max-model-len"
    )


def _values_a_token(config: ModelConfig, kind: str) -> int:
    """K and V values one token has in the pool of `kind`, over the layers that own any."""
    return sum(2 * layer.kv_heads * layer.head_dim for layer in config.owners if layer.kind == kind)
