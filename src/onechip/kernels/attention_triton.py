"""Attention over pages for GPUs since Ampere, in Pallas' Triton dialect: one program of threads a row, or a tile.

    decode    a row's pages are split among programs, so that few long rows fill the chip too; each keeps a running
              softmax in registers and writes its part, and one fused XLA kernel joins the parts.
    prefill   a program takes a tile of queries of one K/V head and walks the pages that they can see.

Both read pages where they lie, one page a step, and only those that a row can see. Triton's shapes are powers of two
and its matmuls at least 16 wide, so query heads are padded to that; padding is masked, not stored.

The public functions are jitted so that layers of one kind are traced and lowered once.

Why not a kernel that exists (read in jax 0.10.2): `pallas.ops.gpu.paged_attention` has no window and no prefill, and
splits the table's whole width, so a row of 100 keys beside one of 16,000 waits for as many programs; cuDNN's attention
in jax takes head dims up to 256 for pages, Gemma's full layers have 512. The plain path is no choice on a GPU: each
round of its loops is some twenty launches, and their number is read back from the device.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from onechip.kernels.rows import KV, MASKED, Blocks, Work, precision

_PROGRAMS = 264  # wanted at least: two for each of an H200's 132 processors
_SPLITS = 16  # at most, for one row
_ROWS = 16  # least rows of a Triton matmul
_TILE_ROWS = 64  # query rows of a prefill tile, heads included

_State = tuple[Array, Array, Array]  # largest score [n], sum of exponentials [n], output [n, H]


def refusal(
    page_size: int, head_dims: Sequence[int], kv_dtype: str, capability: float | None
) -> str | None:
    """Why these kernels cannot run; None if they can."""
    if capability is not None and capability < 8.0:
        return f"needs compute capability 8.0, the device has {capability}"
    if page_size < _ROWS:
        return f"needs pages of at least {_ROWS} tokens, page_size is {page_size}"
    odd = [dim for dim in head_dims if dim < _ROWS or dim & (dim - 1)]
    if odd:
        return f"needs head dims that are powers of two, the model has {odd[0]}"
    if kv_dtype not in ("bfloat16", "float16", "float32"):
        return f"reads bfloat16, float16 or float32 pages, not {kv_dtype}"
    return None


def blocks_for(heads: int, kv_heads: int) -> Blocks:
    """Tiles of as many queries as fill `_TILE_ROWS` with the heads of one K/V head. Pages are the blocks of keys."""
    return Blocks(tile_queries=max(1, _TILE_ROWS // _power(heads // kv_heads)))


@partial(jax.jit, static_argnames=("scale", "interpret"))
def decode(q: Array, kv: KV, work: Work, scale: float, *, interpret: bool = False) -> Array:
    """One query a row: q [R, N, H] -> float32 [R, N, H]; zeros for rows without one."""
    rows, heads, head_dim = q.shape
    kv_heads = kv.k.shape[0]
    group = heads // kv_heads
    padded = max(_ROWS, _power(group))
    splits = max(1, min(_SPLITS, -(-_PROGRAMS // (rows * kv_heads))))
    alone = work.rows.q_len > 0
    if work.tiles is not None:
        alone &= jnp.arange(rows) < work.rows.singles
    whole = pl.BlockSpec(memory_space=pl.ANY)
    kernel = partial(
        _decode_kernel, group=group, padded=padded, splits=splits, scale=scale, window=work.window
    )
    parts = (splits, rows, heads)
    most, weight, out = pl.pallas_call(
        kernel,
        grid=(rows, kv_heads, splits),
        in_specs=[whole] * 6,
        out_specs=[whole] * 3,
        out_shape=[
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(
        q.astype(kv.k.dtype), kv.k, kv.v, jnp.where(alone, work.rows.kv_len, 0),
        work.rows.first_page, work.rows.table,
    )  # fmt: skip
    return _joined(most, weight, out)


def _decode_kernel(
    q_ref: Any,  # [R, N, H]
    k_ref: Any,  # [K, P, Z, H]
    v_ref: Any,
    length_ref: Any,  # [R]: keys, 0 for rows without a query
    first_page_ref: Any,  # [R]
    table_ref: Any,  # [R, M]
    most_ref: Any,  # [splits, R, N] float32
    weight_ref: Any,
    out_ref: Any,  # [splits, R, N, H] float32
    *,
    group: int,
    padded: int,
    splits: int,
    scale: float,
    window: int | None,
) -> None:
    row, kv_head, split = (pl.program_id(axis) for axis in range(3))
    page_size, head_dim = k_ref.shape[2:]
    high = length_ref[row]
    low = 0 if window is None else jnp.maximum(high - window, 0)
    first = low // page_size
    each = pl.cdiv(pl.cdiv(high, page_size) - first, splits)
    begin = first + split * each
    stop = jnp.minimum(begin + each, pl.cdiv(high, page_size))
    lane = jnp.arange(padded)
    mine = lane < group
    head = kv_head * group + lane  # past the group's: masked
    wide = jnp.arange(head_dim)
    everywhere = jnp.broadcast_to(mine[:, None], (padded, head_dim))
    q = plt.load(q_ref.at[row, head[:, None], wide[None, :]], mask=everywhere, other=0)

    def one(page: Array, state: _State) -> _State:
        physical = table_ref[row, page - first_page_ref[row]]
        at = page * page_size + jnp.arange(page_size)
        seen = (at >= low) & (at < high)
        return _add(state, q, k_ref, v_ref, (kv_head, physical), seen[None, :], seen, scale)

    most, weight, out = lax.fori_loop(begin, stop, one, _nothing(padded, head_dim))
    plt.store(most_ref.at[split, row, head], most, mask=mine)
    plt.store(weight_ref.at[split, row, head], weight, mask=mine)
    target = out_ref.at[split, row, head[:, None], wide[None, :]]
    plt.store(target, out, mask=everywhere)


def _joined(most: Array, weight: Array, out: Array) -> Array:
    """Parts of a softmax [splits, R, N] and [splits, R, N, H] -> [R, N, H]."""
    highest = most.max(0)
    share = jnp.exp(most - highest)
    total = (share * weight).sum(0)
    return (out * share[..., None]).sum(0) / jnp.where(total == 0, 1, total)[..., None]


@partial(jax.jit, static_argnames=("scale", "interpret"))
def prefill(q: Array, kv: KV, work: Work, scale: float, *, interpret: bool = False) -> Array:
    """Rows of several tokens: q [T, N, H] -> float32 [T, N, H]; tokens of no tile undefined."""
    _, heads, _ = q.shape
    kv_heads = kv.k.shape[0]
    assert work.tiles is not None
    tiles, rows = work.tiles, work.rows
    end = (rows.q_start + rows.q_len)[tiles.row]
    real = jnp.arange(tiles.row.shape[0]) < tiles.count
    size = jnp.where(real, jnp.clip(end - tiles.begin, 0, tiles.queries), 0)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    kernel = partial(
        _prefill_kernel,
        group=heads // kv_heads,
        queries=tiles.queries,
        scale=scale,
        window=work.window,
    )
    return pl.pallas_call(
        kernel,
        grid=(tiles.row.shape[0], kv_heads),
        in_specs=[whole] * 9,
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="prefill_attention",
    )(
        q.astype(kv.k.dtype), kv.k, kv.v, tiles.row, tiles.begin, tiles.position, size,
        rows.first_page, rows.table,
    )  # fmt: skip


def _prefill_kernel(
    q_ref: Any,  # [T, N, H]
    k_ref: Any,  # [K, P, Z, H]
    v_ref: Any,
    row_ref: Any,  # [C]
    begin_ref: Any,  # [C]
    position_ref: Any,  # [C]
    size_ref: Any,  # [C]: tokens of each tile, 0 for those that are not real
    first_page_ref: Any,  # [R]
    table_ref: Any,  # [R, M]
    out_ref: Any,  # [T, N, H] float32
    *,
    group: int,
    queries: int,
    scale: float,
    window: int | None,
) -> None:
    tile, kv_head = pl.program_id(0), pl.program_id(1)
    page_size, head_dim = k_ref.shape[2:]
    padded = _power(group)
    row, size, begin = row_ref[tile], size_ref[tile], position_ref[tile]
    lane = jnp.arange(max(_ROWS, queries * padded))
    query, member = lane // padded, lane % padded
    mine = (query < size) & (member < group)
    token, head = begin_ref[tile] + query, kv_head * group + member  # past the tile's: masked
    place = (token[:, None], head[:, None], jnp.arange(head_dim)[None, :])
    everywhere = jnp.broadcast_to(mine[:, None], (lane.shape[0], head_dim))
    q = plt.load(q_ref.at[place], mask=everywhere, other=0)
    position, high = begin + query, begin + size
    low = 0 if window is None else jnp.maximum(begin - window + 1, 0)

    def one(page: Array, state: _State) -> _State:
        physical = table_ref[row, page - first_page_ref[row]]
        at = page * page_size + jnp.arange(page_size)
        seen = (at[None, :] <= position[:, None]) & (at < high)[None, :]
        if window is not None:
            seen &= at[None, :] > position[:, None] - window
        kept = (at >= low) & (at < high)
        return _add(state, q, k_ref, v_ref, (kv_head, physical), seen, kept, scale)

    stop = jnp.where(size > 0, pl.cdiv(high, page_size), low // page_size)
    state = lax.fori_loop(low // page_size, stop, one, _nothing(lane.shape[0], head_dim))
    _, weight, out = state
    result = out / jnp.where(weight == 0, 1, weight)[:, None]
    plt.store(out_ref.at[place], result, mask=everywhere)


def _nothing(rows: int, head_dim: int) -> _State:
    return jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((rows, head_dim))


def _add(
    state: _State,
    q: Array,
    k_ref: Any,
    v_ref: Any,
    page: tuple[Any, Any],
    seen: Array,
    kept: Array,
    scale: float,
) -> _State:
    """Add one page of keys to a running softmax: q [n, H], seen [n or 1, Z], kept [Z]: values that may be touched.

    A probability of 0 would not keep out a NaN that an earlier owner of the page left in a value.
    """
    most, weight, out = state
    keys = k_ref[page]
    score = jnp.where(seen, _dot(q, keys.T) * scale, MASKED)
    new = jnp.maximum(most, score.max(1))
    share = jnp.where(seen, jnp.exp(score - new[:, None]), 0)
    values = jnp.where(kept[:, None], v_ref[page], 0)
    fade = jnp.exp(most - new)
    mixed = _dot(share.astype(values.dtype), values)
    return new, weight * fade + share.sum(1), out * fade[:, None] + mixed


def _dot(left: Array, right: Array) -> Array:
    return lax.dot(
        left, right, precision=precision(right.dtype), preferred_element_type=jnp.float32
    )


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
