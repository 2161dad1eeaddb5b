"""Attention over pages: packed ragged queries against K/V that lies in pages of one pool.

The public op is `attend`; `write` puts new K/V into its pages first. Both take a `KV`, where in it the layer's pages
begin, and the step's `Ragged` rows (`kernels.rows`), and know neither the model nor requests. A row is one sequence:
`q_len` packed tokens, the last of which sits at position kv_len - 1; rows of one token come first. Only pages that a
row can see are read: `plan` lists the work once a step, as (row, block of keys) items and tiles of queries whose number
is known only on the device, so short rows cost nothing beside long ones and a sliding layer never reads behind its
window.

    1. `choose` resolves `implementation` for a chip once, when the engine starts; a name is obeyed or refused.
    2. `plan` lists a step's work, `blocks_for` that implementation's sizes.
    3. In each layer `write`, then `attend`: one-token rows go by items (decode), the others by tiles (prefill).

Implementations: "plain" is plain JAX, the oracle and the CPU's path; "pallas_tpu" and "pallas_triton" are kernels for
TPUs and for GPUs since Ampere. Their modules say why they are not somebody else's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from onechip.errors import ConfigError
from onechip.kernels import attention_plain, attention_tpu, attention_triton, write_tpu
from onechip.kernels.rows import KV, Blocks, Ragged, Work, plan, storage_dtype

__all__ = [
    "IMPLEMENTATIONS", "KV", "Blocks", "Ragged", "Work", "attend", "attention_bytes", "blocks_for",
    "choose", "plan", "storage_dtype", "write",
]  # fmt: skip

Implementation = Literal["plain", "pallas_tpu", "pallas_triton"]
# In the order that "auto" tries them.
IMPLEMENTATIONS: tuple[Implementation, ...] = ("pallas_tpu", "pallas_triton", "plain")


def choose(
    name: str,
    platform: str,
    *,
    page_size: int,
    head_dims: Sequence[int],
    kv_dtype: str,
    capability: float | None = None,
) -> Implementation:
    """The implementation for a platform ("cpu", "gpu" or "cuda", "tpu"). "auto" takes the first that can.

    Raises ConfigError when a name does not exist, or cannot run there.
    """
    refusals: dict[Implementation, str | None] = {
        each: _refusal(each, platform, page_size, head_dims, kv_dtype, capability)
        for each in IMPLEMENTATIONS
    }
    if name == "auto":
        return next(each for each, refusal in refusals.items() if refusal is None)
    chosen = _named(name)
    if refusals[chosen] is not None:
        raise ConfigError(f"attention implementation {name!r} {refusals[chosen]}; use auto")
    return chosen


def blocks_for(
    implementation: str, heads: int, kv: KV, window: int | None, *, exact: bool = False
) -> Blocks:
    """The sizes `plan` needs for one layer kind."""
    kv_heads, _, page_size, head_dim = kv.k.shape
    if exact or _resolved(implementation) == "plain":
        return Blocks()
    if _resolved(implementation) == "pallas_tpu":
        size = kv.k.dtype.itemsize
        return attention_tpu.blocks_for(heads, kv_heads, head_dim, size, page_size, window)
    return attention_triton.blocks_for(heads, kv_heads)


def write(
    kv: KV,
    k: Array,
    v: Array,
    page: Array,
    slot: Array,
    *,
    offset: Array | int = 0,
    implementation: str = "plain",
) -> KV:
    """Put k and v [T, K, H] into (offset + page, slot) [T] of the pool. In place when the pool is donated.

    A sequence's tokens lie side by side, in consecutive slots. What is meant for page 0 may go nowhere.
    """
    if _resolved(implementation) == "pallas_tpu":
        return write_tpu.write(kv, k, v, page, slot, offset)
    page = page + offset
    return replace(kv, k=_scatter(kv, kv.k, k, page, slot), v=_scatter(kv, kv.v, v, page, slot))


def attend(
    q: Array,
    kv: KV,
    work: Work,
    *,
    scale: float,
    offset: Array | int = 0,
    implementation: str = "auto",
    interpret: bool = False,
) -> Array:
    """Softmax(scale q k^T) v over each row's visible keys: q [T, N, H] -> float32 [T, N, H].

    A query at position p sees keys 0..p, or the last `work.window` of them. `offset` is added to every page: where a
    layer's pages begin in a pool of several layers. `interpret` runs a kernel's program on any machine. Raises
    ConfigError for an implementation that does not exist or cannot do what is asked.
    """
    chosen = _resolved(implementation)
    if chosen != "pallas_tpu":  # a TPU's kernels add it themselves: one launch less a layer
        work = work.moved(offset)
    if work.items is None:
        if chosen != "plain" and implementation != "auto":
            raise ConfigError(f"{implementation!r} has no exact rounding; use plain")
        return attention_plain.prefill(q, kv, work, scale)
    decode, prefill = _phases(chosen, offset, interpret)
    count = work.rows.q_len.shape[0]
    alone = decode(q[:count], kv, work, scale)
    if work.tiles is None:
        return alone
    # Both phases run; each has a trip count of its own, zero where the step has no such rows.
    tiled = prefill(q, kv, work, scale)
    token = jnp.arange(q.shape[0])[:, None, None]
    mine = (token >= work.rows.singles) & (token < work.rows.q_len.sum())
    tiled = jnp.where(mine, tiled, 0)
    return tiled.at[:count].set(jnp.where(token[:count] < work.rows.singles, alone, tiled[:count]))


def attention_bytes(
    rows: Iterable[tuple[int, int]],
    *,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    window: int | None,
    page_size: int = 1,
) -> int:
    """Bytes of K and V that one layer cannot do without: what rows of (query tokens, keys) see, each key once.

    With a page size, whole pages: what decode reads. A prefill tile reads what its own queries see.
    """
    keys = 0
    for queries, length in rows:
        low = 0 if window is None else max(0, length - queries - window + 1)
        if queries:
            keys += (-(-length // page_size) - low // page_size) * page_size
    return keys * 2 * kv_heads * head_dim * itemsize


_Phase = Callable[[Array, KV, Work, float], Array]


def _phases(chosen: Implementation, offset: Array | int, interpret: bool) -> tuple[_Phase, _Phase]:
    if chosen == "plain":
        return attention_plain.decode, attention_plain.prefill
    if chosen == "pallas_triton":
        gpu, told = attention_triton, {"interpret": interpret}
        return partial(gpu.decode, **told), partial(gpu.prefill, **told)
    tpu, told = attention_tpu, {"interpret": interpret, "offset": offset}
    return partial(tpu.decode, **told), partial(tpu.prefill, **told)


def _named(name: str) -> Implementation:
    for each in IMPLEMENTATIONS:
        if each == name:
            return each
    raise ConfigError(
        f"attention implementation {name!r} does not exist; use auto or "
        f"{', '.join(IMPLEMENTATIONS)}"
    )


def _resolved(name: str) -> Implementation:
    """For callers that did not `choose`: "auto" is plain JAX, which runs everywhere."""
    return "plain" if name == "auto" else _named(name)


def _refusal(
    name: Implementation,
    platform: str,
    page_size: int,
    head_dims: Sequence[int],
    kv_dtype: str,
    capability: float | None,
) -> str | None:
    """Why an implementation cannot run there; None if it can."""
    if name == "plain":
        return None
    wanted = ("tpu",) if name == "pallas_tpu" else ("gpu", "cuda")
    if platform not in wanted:
        return f"needs a {wanted[0].upper()}, the device is a {platform}"
    if name == "pallas_tpu":
        return attention_tpu.refusal(page_size, head_dims, kv_dtype)
    return attention_triton.refusal(page_size, head_dims, kv_dtype, capability)


def _scatter(kv: KV, pool: Array, new: Array, page: Array, slot: Array) -> Array:
    new = new.astype(kv.dtype)
    if pool.dtype != new.dtype:
        new = lax.bitcast_convert_type(new, pool.dtype)
    return pool.at[:, page, slot].set(new.transpose(1, 0, 2), mode="promise_in_bounds")
