"""New K/V into its pages on a TPU, in Pallas, in place.

A page's rows are packed in pairs in a TPU's tiles, so no copy can write one alone. The kernel reads the aligned groups
of sixteen rows that change, puts the new rows in and writes the groups back, all of a batch in flight together. XLA's
own scatter is in place too, but handles one row after the other: 64 rows of E2B are 1,920 rows a step.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from onechip.kernels.rows import KV

SUBLANES = 16  # rows of a bf16 tile: what is read and written back
_WRITES = 32  # groups of rows in flight


@partial(jax.jit, static_argnames="interpret")
def write(
    kv: KV,
    k: Array,
    v: Array,
    page: Array,
    slot: Array,
    offset: Array | int = 0,
    *,
    interpret: bool = False,
) -> KV:
    """Put k and v [T, K, H] into (offset + page, slot) [T] of the pool, which must be donated; what is meant for page 0
    goes nowhere.
    """
    kv_heads, pages, page_size, head_dim = kv.k.shape
    together = max(n for n in (1, 2, 4) if kv_heads % n == 0)
    rows = k.shape[0] + 2 * SUBLANES
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    mine = pl.BlockSpec((together, rows, head_dim), partial(nth, 3))
    aligned = (kv_heads, pages * page_size // SUBLANES, SUBLANES, head_dim)
    buffer = pltpu.VMEM((_WRITES, together, SUBLANES, head_dim), kv.k.dtype)
    group, begin, first, size, count = _groups(page, slot, page_size)
    group += offset * (page_size // SUBLANES)
    pools = pl.pallas_call(
        _write_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(kv_heads // together,),
            in_specs=[mine, mine, hbm, hbm],
            out_specs=[hbm, hbm],
            scratch_shapes=[buffer, buffer, pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=[jax.ShapeDtypeStruct(aligned, kv.k.dtype)] * 2,
        input_output_aliases={7: 0, 8: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="write_pages",
    )(
        group, begin, first, size, count, _spread(k), _spread(v),
        stay(kv.k.reshape(aligned), interpret), stay(kv.v.reshape(aligned), interpret),
    )  # fmt: skip
    return replace(kv, k=pools[0].reshape(kv.k.shape), v=pools[1].reshape(kv.v.shape))


def _spread(new: Array) -> Array:
    """[T, K, H] -> float32 [K, T + 32, H], so that a group's rows can be read from any offset."""
    edge = (SUBLANES, SUBLANES)
    return jnp.pad(new.astype(jnp.float32).swapaxes(0, 1), ((0, 0), edge, (0, 0)))


def _groups(page: Array, slot: Array, page_size: int) -> tuple[Array, Array, Array, Array, Array]:
    """The aligned groups of rows that tokens [T] go to, in order, and how many [1] there are.

    Of each [T]: its index in the pool, its first token, that token's row in the group, and its tokens.
    """
    tokens = page.shape[0]
    group = page * (page_size // SUBLANES) + slot // SUBLANES
    real = page > 0
    starts = real & (group != jnp.pad(group, (1, 0), constant_values=-1)[:-1])
    number = jnp.where(real, jnp.cumsum(starts) - 1, tokens)
    index = jnp.arange(tokens, dtype=jnp.int32)
    begin = jnp.searchsorted(number, index, method="compare_all").astype(jnp.int32)
    end = jnp.searchsorted(number, index, side="right", method="compare_all").astype(jnp.int32)
    at = jnp.minimum(begin, tokens - 1)
    return group[at], begin, slot[at] % SUBLANES, end - begin, starts.sum()[None]


def _write_kernel(
    group_ref: Any,  # [T] int32, like the next four in SMEM
    begin_ref: Any,  # [T]
    first_ref: Any,  # [T]
    size_ref: Any,  # [T]
    count_ref: Any,  # [1]
    k_ref: Any,  # [heads, T + 32, H] float32
    v_ref: Any,
    _k_before: Any,  # the pools, the same memory as the outputs
    _v_before: Any,
    k_hbm: Any,  # [K, groups, 16, H]
    v_hbm: Any,
    k_buffer: Any,  # [_WRITES, heads, 16, H]
    v_buffer: Any,
    arrived: Any,  # semaphores: 0 reads, 1 writes
) -> None:
    heads = k_ref.shape[0]
    mine = pl.ds(pl.program_id(0) * heads, heads)
    every = ((k_ref, k_hbm.at[mine], k_buffer), (v_ref, v_hbm.at[mine], v_buffer))

    def read(batch: Any, act: Any, index: Any, _: Any) -> None:
        for _new, pool, buffer in every:
            old = pool.at[:, group_ref[batch + index]]
            act(pltpu.make_async_copy(old, buffer.at[index], arrived.at[0]))

    def put_back(batch: Any, act: Any, index: Any, _: Any) -> None:
        for _new, pool, buffer in every:
            old = pool.at[:, group_ref[batch + index]]
            act(pltpu.make_async_copy(buffer.at[index], old, arrived.at[1]))

    def change(batch: Any, index: Any, _: Any) -> None:
        first, size = first_ref[batch + index], size_ref[batch + index]
        start = begin_ref[batch + index] - first + SUBLANES
        shift = lax.rem(start, 8)
        aligned = pl.ds(pl.multiple_of(start - shift, 8), SUBLANES + 8)
        for new_ref, _pool, buffer in every:
            for head in range(heads):
                # Loads begin at a tile's first row: load one tile more, and turn the rows into place.
                rows = pltpu.roll(
                    new_ref[head, aligned], lax.rem(SUBLANES + 8 - shift, SUBLANES + 8), 0
                )
                old = buffer[index, head]
                row = lax.broadcasted_iota(jnp.int32, old.shape, 0)
                changed = (row >= first) & (row < first + size)
                new = jnp.where(changed, rows[:SUBLANES], old.astype(jnp.float32))
                buffer[index, head] = new.astype(old.dtype)

    def one(index: Any, _: Any) -> None:
        batch = index * _WRITES
        count = lax.min(count_ref[0] - batch, _WRITES)
        phases = (
            partial(read, batch, issue),
            partial(read, batch, wait),
            partial(change, batch),
            partial(put_back, batch, issue),
            partial(put_back, batch, wait),
        )
        for phase in phases:
            lax.fori_loop(0, count, phase, None)

    lax.fori_loop(0, pl.cdiv(count_ref[0], _WRITES), one, None)


def stay(pool: Array, interpret: bool) -> Array:
    """The pool, which XLA may not move into VMEM for a kernel that reads a few of its pages: it did for 23 MB ones."""
    return pool if interpret else pltpu.with_memory_space_constraint(pool, pltpu.HBM)


def nth(axes: int, index: Any, *_: Any) -> tuple[Any, ...]:
    """The index map of blocks that split the first of `axes`."""
    return (index, *[0] * (axes - 1))


def issue(copy: Any) -> None:
    copy.start()


def wait(copy: Any) -> None:
    copy.wait()
