"""How many pages each pool gets. Planned from numbers, not probed: what the device has, less the weights, less what
the compiled programs say they need, less a margin.

The sliding pool holds every sequence's window and one chunk; what is left goes to the full pool. Refuses with the
numbers, before anything is loaded, when the weights or one sequence do not fit.
"""

import os
from dataclasses import dataclass
from typing import Any

from onechip.cache.pages import PoolShape, peak_pages
from onechip.config import EngineConfig, LayerKind, ModelConfig
from onechip.engine.buckets import BucketTable
from onechip.engine.programs import Needs
from onechip.engine.state import state_bytes
from onechip.errors import ConfigError, DoesNotFit

MARGIN = 0.02  # of the memory: fragments, and the runtime's own buffers
_CODE = 32 << 20  # a program's code, at most what was seen for 60 unrolled layers


@dataclass(frozen=True)
class MemoryPlan:
    """Pages of each pool (page 0 included), the tokens the full pool holds, and where every byte goes."""

    shapes: dict[LayerKind, PoolShape]
    kv_tokens: int
    kv_bytes: int
    weight_bytes: int
    state_bytes: int
    needs: Needs
    memory: int

    @property
    def spare(self) -> int:
        """Bytes that nothing is planned for, the margin among them; negative when it does not fit."""
        planned = self.weight_bytes + self.kv_bytes + self.state_bytes + self.needs.total
        return self.memory - planned


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
    page: int,
    chunk: int,
    steps: int = 1,
    weight_bytes: int,
    kv_bytes_per_value: int,
    needs: Needs,
    memory: int,
) -> MemoryPlan:
    """Sizes of both pools. Raises DoesNotFit or ConfigError."""
    state = state_bytes(engine.max_seqs, config.vocab_size)
    room = int(memory * (1 - MARGIN)) - needs.total - state - weight_bytes
    if room <= 0:
        raise DoesNotFit(
            f"the weights take {weight_bytes / 1e9:.2f} GB, the device has {memory / 1e9:.2f} GB and "
            f"{(memory - weight_bytes - room) / 1e9:.2f} GB of that are kept for programs and activations; "
            "choose a smaller model or a narrower --dtype"
        )
    if page < 1 or page & (page - 1):
        raise ConfigError(f"page_size is {page}; it must be a power of two")
    values = {
        kind: _values_a_token(config, kind) * kv_bytes_per_value for kind in ("full", "sliding")
    }
    sliding = _sliding_pages(config, engine.max_seqs, max_model_len, chunk, steps, page)
    most = engine.max_seqs * -(-max_model_len // page)
    # Each pool's page 0 is nobody's, and takes memory all the same.
    left = room - (sliding + 1) * page * values["sliding"] - page * values["full"]
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
    return MemoryPlan(shapes, full * page, taken, weight_bytes, state, needs, memory)


def estimated_needs(config: ModelConfig, table: BucketTable) -> Needs:
    """What programs are taken to need until they are compiled: no less than every chip's compiler was seen to ask."""
    rows, tokens = (max(getattr(b, name) for b in table.buckets) for name in ("rows", "tokens"))
    logits = 4 * rows * config.vocab_size * 4  # float32, the sampler's copies among them
    widest = max(2 * layer.ffn_dim + config.heads * layer.head_dim for layer in config.layers)
    moe = config.moe
    experts = 0 if moe is None else moe.top_k * (3 * moe.ffn_dim + 2 * config.hidden_size)
    hidden = tokens * (widest + experts + len(config.layers) * config.ple_dim) * 4 * 2
    return Needs(logits + hidden + (64 << 20), _CODE * (len(table.buckets) + 1))


def _sliding_pages(
    config: ModelConfig, seqs: int, length: int, chunk: int, steps: int, page: int
) -> int:
    """Pages for the window of every sequence at once and for one chunk: a step has no more prompt tokens than that."""
    if config.window is None:
        return 0
    each = peak_pages(length, steps, config.window, page)
    whole = peak_pages(length, chunk, config.window, page)
    return min(seqs * whole, seqs * each + -(-chunk // page) + seqs)


def _shortage(room: int, left: int, tokens: int, values: dict[str, int], seqs: int) -> str:
    return (
        f"K/V pages for {tokens} tokens do not fit: {room / 1e9:.2f} GB are left beside the weights, "
        f"{max(0, room - left) / 1e9:.2f} GB of it go to the windows of {seqs} sequences and a token takes "
        f"{values['full']} B; lower --kv-tokens, --max-seqs or --max-model-len"
    )


def _values_a_token(config: ModelConfig, kind: str) -> int:
    """K and V values one token has in the pool of `kind`, over the layers that own any."""
    return sum(2 * layer.kv_heads * layer.head_dim for layer in config.owners if layer.kind == kind)
