"""Attention over pages for TPUs, in Pallas: pages streamed through VMEM.

    decode    one kernel walks (row, block of keys) items, some at a time: while a group is computed, the next group's
              pages are on their way from HBM. A row's running softmax lies in VMEM. Rows of one token.
    prefill   one kernel walks the tiles of queries, and the blocks that each can see, fetching one block ahead, also
              across tiles. Queries come and outputs go by copies of their own, so a tile never touches other tokens.

Some K/V heads (`Heads`) are handled together, as many as fill a tile's eight rows with queries; a query row is zero
outside its own head's columns, so that heads share matmuls. Only pages that a row can see are read; keys that nobody
may see are masked, and values set to zero, because 0 times a NaN that an earlier owner left is NaN.

The public functions are jitted so that layers of one kind are traced and lowered once.

Why not a kernel that exists (read in jax 0.10.2): `pallas.ops.tpu.ragged_paged_attention` walks a sequence from its
first key whatever the window (E2B at 16K would read 32 times a sliding layer's bytes), computes a whole block of
queries for every one-token row, and wants K and V interleaved in one pool; `paged_attention` has no window and no
prefill; `splash_attention` has no pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from onechip.kernels.rows import KV, MASKED, Blocks, Ragged, Tiles, Work, precision
from onechip.kernels.write_tpu import SUBLANES, issue, nth, stay, wait

_ITEMS = 2  # of decode, computed side by side, so that one's matmul hides another's softmax
_ITEM_BYTES = 5 << 18  # of K and V in one item: two groups of two are 5 MiB of VMEM
_TILE_ROWS = 512  # query rows of a prefill tile, heads included

_Item = tuple[Any, Any]  # a row, and which block of its keys
_Part = tuple[
    Array, Array, Array
]  # largest score [n, 1], sum of exponentials [n, 1], output [n, H]


@dataclass(frozen=True)
class Heads:
    """How heads are grouped: `blocks` of `kv` K/V heads with `queries` query heads, `group` a K/V head."""

    blocks: int
    kv: int
    queries: int
    group: int


def heads_of(heads: int, kv_heads: int) -> Heads:
    group = heads // kv_heads
    together = max(1, min(kv_heads, 8 // group))
    while kv_heads % together:
        together -= 1
    return Heads(kv_heads // together, together, together * group, group)


def blocks_for(
    heads: int, kv_heads: int, head_dim: int, itemsize: int, page_size: int, window: int | None
) -> Blocks:
    """Sizes of items and tiles: lanes come in 128, an item's K/V fits its share of VMEM, a window fits one item."""
    split = heads_of(heads, kv_heads)
    budget = _ITEM_BYTES // (2 * split.kv * head_dim * itemsize) // 128 * 128
    wanted = 512 if window is None else -(-(window + page_size - 1) // 128) * 128
    keys = max(page_size, min(max(budget, 128), wanted, 1024))
    queries = max(1, _TILE_ROWS // split.queries)
    return Blocks(decode_keys=keys, tile_queries=queries, tile_keys=max(page_size, min(keys, 512)))


def refusal(page_size: int, head_dims: Sequence[int], kv_dtype: str) -> str | None:
    """Why these kernels cannot run; None if they can."""
    if page_size % SUBLANES:
        return f"needs pages of a multiple of {SUBLANES} tokens, page_size is {page_size}"
    odd = [dim for dim in head_dims if dim % 128]
    if odd:
        return f"needs head dims that are multiples of 128, the model has {odd[0]}"
    if kv_dtype not in ("bfloat16", "float32"):
        return f"reads bfloat16 or float32 pages, not {kv_dtype}"
    return None


# Decode.


@partial(jax.jit, static_argnames=("scale", "interpret"))
def decode(
    q: Array,
    kv: KV,
    work: Work,
    scale: float,
    *,
    offset: Array | int = 0,
    interpret: bool = False,
) -> Array:
    """One query a row: q [R, N, H] -> float32 [R, N, H]; zeros for rows without one."""
    rows, heads, head_dim = q.shape
    kv_heads, _, page_size, _ = kv.k.shape
    assert work.items is not None
    split, columns = heads_of(heads, kv_heads), work.items.pages.shape[1]
    length, last = _singles(work)
    whole = pl.BlockSpec((None, rows, split.queries, head_dim), partial(nth, 4))
    pool = pl.BlockSpec(memory_space=pltpu.HBM)
    buffer = pltpu.VMEM((2, _ITEMS, columns, split.kv, page_size, head_dim), kv.k.dtype)
    running = pltpu.VMEM((rows, split.queries, 128), jnp.float32)
    out = pl.pallas_call(
        partial(_decode_kernel, split=split, scale=scale, window=work.window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(split.blocks,),
            in_specs=[whole, pool, pool],
            out_specs=whole,
            scratch_shapes=[buffer, buffer, running, running, pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=jax.ShapeDtypeStruct((split.blocks, rows, split.queries, head_dim), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="decode_attention",
    )(
        length, work.rows.first_page, last, jnp.int32(offset)[None], work.rows.table.reshape(-1),
        _blocked(q.astype(kv.k.dtype), split), stay(kv.k, interpret), stay(kv.v, interpret),
    )  # fmt: skip
    return _unblocked(out)


def _singles(work: Work) -> tuple[Array, Array]:
    """Keys [R] of rows with one token, 0 for others, and [1] the number of rows up to the last of them."""
    rows = work.rows
    row = jnp.arange(rows.q_len.shape[0])
    alone = rows.q_len > 0
    if work.tiles is not None:
        alone &= row < rows.singles
    return jnp.where(alone, rows.kv_len, 0), jnp.where(alone, row + 1, 0).max()[None]


def _decode_kernel(
    length_ref: Any,  # [R] int32, like the next four in SMEM: keys of each row
    first_page_ref: Any,  # [R]
    last_ref: Any,  # [1]: rows to do
    offset_ref: Any,  # [1]: added to every page
    table_ref: Any,  # [R * M]
    q_ref: Any,  # [R, queries, H]
    k_hbm: Any,  # [K, P, Z, H]
    v_hbm: Any,
    out_ref: Any,  # [R, queries, H] float32: the running output, divided at the end
    k_buffer: Any,  # [2, items, J, kv, Z, H]
    v_buffer: Any,
    most_ref: Any,  # [R, queries, 128] float32
    weight_ref: Any,
    arrived: Any,  # [2] semaphores
    *,
    split: Heads,
    scale: float,
    window: int | None,
) -> None:
    _, _, columns, _, page_size, _ = k_buffer.shape
    rows, last = q_ref.shape[0], last_ref[0]
    width = table_ref.shape[0] // rows
    pools = _pools(pl.program_id(0), split, k_hbm, v_hbm)

    def span(item: _Item) -> tuple[Any, Any, Any]:
        """First key of the item's block, and the keys low..high that its row sees; none past the last row."""
        row, block = lax.min(item[0], rows - 1), item[1]
        high = lax.select(item[0] < last, length_ref[row], 0)
        low = 0 if window is None else lax.max(high - window, 0)
        return (low // page_size + block * columns) * page_size, low, high

    def following(item: _Item) -> _Item:
        first, _, high = span(item)
        more = first + columns * page_size < high
        return lax.select(more, item[0], item[0] + 1), lax.select(more, item[1] + 1, 0)

    def group_at(item: _Item) -> tuple[list[_Item], _Item]:
        """The group that begins with an item, and the item after it."""
        group: list[_Item] = []
        for _ in range(_ITEMS):
            group.append(item)
            item = following(item)
        return group, item

    def each_copy(group: list[_Item], slot: Any, act: Any) -> None:
        for which, item in enumerate(group):
            first, _, high = span(item)
            row = lax.min(item[0], rows - 1)
            start = row * width + first // page_size - first_page_ref[row]
            pages = _page_count(high - first, page_size, columns)
            target = (k_buffer.at[slot, which], v_buffer.at[slot, which])
            listed = (table_ref, start, offset_ref[0])
            _each_page(pages, listed, pools, target, arrived.at[slot], act)

    def one(state: tuple[_Item, Any]) -> tuple[_Item, Any]:
        item, slot = state
        group, after = group_at(item)
        each_copy(group_at(after)[0], 1 - slot, issue)
        each_copy(group, slot, wait)
        parts: list[_Part] = []
        for which, item in enumerate(group):
            first, low, high = span(item)
            _clear(v_buffer.at[slot, which], first, low, high)
            at = first + lax.broadcasted_iota(jnp.int32, (1, columns * page_size), 1)
            seen = (at >= low) & (at < high)
            q = q_ref[lax.min(item[0], rows - 1)]
            pages = k_buffer.at[slot, which], v_buffer.at[slot, which]
            parts.append(_part(q, *pages, seen, scale, split))
        for (row, _), part in zip(group, parts, strict=True):

            @pl.when(row < last)
            def _add(row: Any = row, part: _Part = part) -> None:
                _merge(part, most_ref.at[row], weight_ref.at[row], out_ref.at[row])

        return after, 1 - slot

    most_ref[...] = jnp.full(most_ref.shape, MASKED)
    weight_ref[...] = jnp.zeros(weight_ref.shape)
    out_ref[...] = jnp.zeros(out_ref.shape)
    begin = (jnp.int32(0), jnp.int32(0))
    each_copy(group_at(begin)[0], 0, issue)
    lax.while_loop(lambda state: state[0][0] < last, one, (begin, jnp.int32(0)))
    weight = weight_ref[..., :1]
    out_ref[...] = out_ref[...] / jnp.where(weight == 0, 1, weight)


# Prefill.


@partial(jax.jit, static_argnames=("scale", "interpret"))
def prefill(
    q: Array,
    kv: KV,
    work: Work,
    scale: float,
    *,
    offset: Array | int = 0,
    interpret: bool = False,
) -> Array:
    """Rows of several tokens: q [T, N, H] -> float32 [T, N, H]; tokens of no tile undefined."""
    tokens, heads, head_dim = q.shape
    kv_heads, _, page_size, _ = kv.k.shape
    assert work.tiles is not None
    split, rows, tiles = heads_of(heads, kv_heads), work.rows, work.tiles
    size, low, pages, column = _tile_spans(tiles, rows, page_size, work.window)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    pool = pl.BlockSpec(memory_space=pltpu.HBM)
    queries = (tiles.queries, split.queries, head_dim)
    columns = max(1, tiles.keys // page_size)
    buffer = pltpu.VMEM((2, columns, split.kv, page_size, head_dim), kv.k.dtype)
    running = pltpu.VMEM((tiles.queries * split.queries, 128), jnp.float32)
    out = pl.pallas_call(
        partial(_prefill_kernel, split=split, scale=scale, window=work.window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=9,
            grid=(split.blocks,),
            in_specs=[anywhere, pool, pool],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((2, *queries), jnp.float32),
                buffer,
                buffer,
                pltpu.VMEM(queries, jnp.float32),
                running,
                running,
                pltpu.VMEM((tiles.queries * split.queries, head_dim), jnp.float32),
                pltpu.SemaphoreType.DMA((5,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(
            (split.blocks, tokens, split.queries, head_dim), jnp.float32
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="prefill_attention",
    )(
        tiles.begin, size, tiles.position, low, pages, column, jnp.int32(offset)[None],
        rows.table.reshape(-1), tiles.count[None], _blocked(q, split), stay(kv.k, interpret), stay(kv.v, interpret),
    )  # fmt: skip
    return _unblocked(out)


def _tile_spans(
    tiles: Tiles, rows: Ragged, page_size: int, window: int | None
) -> tuple[Array, Array, Array, Array]:
    """Of each tile: its tokens, the first key it sees, its pages, and where they begin in the flat table."""
    row = tiles.row
    end = rows.q_start[row] + rows.q_len[row]
    size = jnp.clip(end - tiles.begin, 0, tiles.queries)
    low = jnp.maximum(tiles.position - window + 1, 0) if window else jnp.zeros_like(tiles.position)
    first = low // page_size
    pages = -(-(tiles.position + size) // page_size) - first
    return size, low, pages, row * rows.table.shape[1] + first - rows.first_page[row]


def _prefill_kernel(
    begin_ref: Any,  # [C] int32, like the next eight in SMEM
    size_ref: Any,  # [C]
    position_ref: Any,  # [C]
    low_ref: Any,  # [C]
    pages_ref: Any,  # [C]
    column_ref: Any,  # [C]
    offset_ref: Any,  # [1]: added to every page
    table_ref: Any,  # [R * M]
    count_ref: Any,  # [1]
    q_hbm: Any,  # [blocks, T, queries, H] float32
    k_hbm: Any,  # [K, P, Z, H]
    v_hbm: Any,
    out_hbm: Any,  # [blocks, T, queries, H] float32
    q_buffer: Any,  # [2, Q, queries, H] float32
    k_buffer: Any,  # [2, J, kv, Z, H]
    v_buffer: Any,
    out_buffer: Any,  # [Q, queries, H] float32
    most_ref: Any,  # [Q * queries, 128] float32
    weight_ref: Any,
    sum_ref: Any,  # [Q * queries, H] float32
    arrived: Any,  # semaphores: 0, 1 K/V; 2, 3 queries; 4 outputs
    *,
    split: Heads,
    scale: float,
    window: int | None,
) -> None:
    _, columns, _, page_size, _ = k_buffer.shape
    _, queries, per_query, _ = q_buffer.shape
    block_heads, count = pl.program_id(0), count_ref[0]
    pools = _pools(block_heads, split, k_hbm, v_hbm)

    def each_copy(tile: Any, block: Any, slot: Any, act: Any) -> None:
        pages = _page_count((pages_ref[tile] - block * columns) * page_size, page_size, columns)
        target = (k_buffer.at[slot], v_buffer.at[slot])
        listed = (table_ref, column_ref[tile] + block * columns, offset_ref[0])
        _each_page(pages, listed, pools, target, arrived.at[slot], act)

    def each_query(tile: Any, act: Any) -> None:
        slot, begin = lax.rem(tile, 2), begin_ref[tile]
        source, target = q_hbm.at[block_heads, pl.ds(begin, queries)], q_buffer.at[slot]
        _each_token(size_ref[tile], source, target, arrived.at[2 + slot], act)

    def each_output(tile: Any, act: Any) -> None:
        target = out_hbm.at[block_heads, pl.ds(begin_ref[tile], queries)]
        _each_token(size_ref[tile], out_buffer, target, arrived.at[4], act)

    def ahead(tile: Any, block: Any, slot: Any) -> None:
        last = (block + 1) * columns >= pages_ref[tile]
        after = lax.select(last, tile + 1, tile)

        @pl.when(after < count)
        def _next() -> None:
            each_copy(after, lax.select(last, 0, block + 1), slot, issue)
            pl.when(last)(lambda: each_query(after, issue))

    def one_tile(tile: Any, turn: Any) -> Any:
        each_query(tile, wait)
        most_ref[...] = jnp.full(most_ref.shape, MASKED)
        weight_ref[...] = jnp.zeros(weight_ref.shape)
        sum_ref[...] = jnp.zeros(sum_ref.shape)
        first, size = low_ref[tile] // page_size * page_size, size_ref[tile]
        high = position_ref[tile] + size
        shape = (queries * per_query, columns * page_size)
        position = position_ref[tile] + lax.broadcasted_iota(jnp.int32, shape, 0) // per_query
        q = q_buffer[lax.rem(tile, 2)].reshape(queries * per_query, -1).astype(k_buffer.dtype)

        def one_block(block: Any, turn: Any) -> Any:
            slot = lax.rem(turn, 2)
            ahead(tile, block, 1 - slot)
            each_copy(tile, block, slot, wait)
            start = first + block * columns * page_size
            _clear(v_buffer.at[slot], start, low_ref[tile], high)
            key = start + lax.broadcasted_iota(jnp.int32, shape, 1)
            seen = (key <= position) & (key < high)
            if window is not None:
                seen &= key > position - window
            part = _part(q, k_buffer.at[slot], v_buffer.at[slot], seen, scale, split)
            _merge(part, most_ref, weight_ref, sum_ref)
            return turn + 1

        turn = lax.fori_loop(0, pl.cdiv(pages_ref[tile], columns), one_block, turn)
        pl.when(tile > 0)(lambda: each_output(tile - 1, wait))
        weight = weight_ref[:, :1]
        result = sum_ref[...] / jnp.where(weight == 0, 1, weight)
        out_buffer[...] = result.reshape(out_buffer.shape)
        each_output(tile, issue)
        return turn

    @pl.when(count > 0)
    def _run() -> None:
        each_copy(0, 0, 0, issue)
        each_query(0, issue)
        lax.fori_loop(0, count, one_tile, 0)
        each_output(count - 1, wait)


# Phases that both share.


def _pools(block: Any, split: Heads, k_hbm: Any, v_hbm: Any) -> tuple[Any, Any]:
    """The block's heads of both pools."""
    mine = pl.ds(block * split.kv, split.kv)
    return k_hbm.at[mine], v_hbm.at[mine]


def _page_count(keys: Any, page_size: int, columns: int) -> Any:
    """Pages of a block that has `keys` left, none when that is negative."""
    return lax.clamp(0, (keys + page_size - 1) // page_size, columns)


def _each_page(
    count: Any, listed: tuple[Any, Any, Any], pools: Any, target: Any, arrived: Any, act: Any
) -> None:
    """Act on the copies of `count` pages: pool[:, page] [kv, Z, H] -> target[j]. `listed` is (table, start, offset):
    page j is offset + table[start + j].
    """
    table, start, offset = listed

    def one(index: Any, _: Any) -> None:
        page = offset + table[start + index]
        for pool, buffer in zip(pools, target, strict=True):
            act(pltpu.make_async_copy(pool.at[:, page], buffer.at[index], arrived))

    lax.fori_loop(0, count, one, None)


def _each_token(count: Any, source: Any, target: Any, arrived: Any, act: Any) -> None:
    """Act on copies of the first `count` tokens, eight at a time and then singly: no token more is touched."""

    def one(size: int, base: Any, index: Any, _: Any) -> None:
        part = pl.ds(base + index * size, size)
        act(pltpu.make_async_copy(source.at[part], target.at[part], arrived))

    eights = count // 8
    lax.fori_loop(0, eights, partial(one, 8, 0), None)
    lax.fori_loop(0, count - eights * 8, partial(one, 1, eights * 8), None)


def _clear(values: Any, first: Any, low: Any, high: Any) -> None:
    """Zero values [J, kv, Z, H] of keys outside low..high, the first key's position being `first`."""
    columns, _, page_size, _ = values.shape

    def one(index: Any, _: Any) -> None:
        start = first + index * page_size

        @pl.when((start < low) | (start + page_size > high))
        def _edge() -> None:
            page = values[index]
            at = start + lax.broadcasted_iota(jnp.int32, page.shape, 1)
            kept = jnp.where((at >= low) & (at < high), page.astype(jnp.float32), 0)
            values[index] = kept.astype(page.dtype)

    @pl.when((first < low) | (first + columns * page_size > high))
    def _edges() -> None:
        lax.fori_loop(0, columns, one, None)


def _part(q: Array, keys: Any, values: Any, seen: Array, scale: float, split: Heads) -> _Part:
    """One block's share of the softmax: q [n, H], keys and values [J, kv, Z, H], seen [n or 1, S]."""
    rows, head_dim = q.shape
    head = lax.broadcasted_iota(jnp.int32, (rows, head_dim), 0) % split.queries // split.group
    score = jnp.zeros((rows, seen.shape[1]))
    for index in range(split.kv):
        mine = q if split.kv == 1 else jnp.where(head == index, q.astype(jnp.float32), 0)
        k = keys[:, index].reshape(-1, head_dim)
        score += _dot(mine.astype(k.dtype), k, 1)
    score = jnp.where(seen, score * scale, MASKED)
    most = score.max(-1, keepdims=True)
    share = jnp.where(seen, jnp.exp(score - most), 0)
    out = jnp.zeros((rows, head_dim))
    for index in range(split.kv):
        v = values[:, index].reshape(-1, head_dim)
        mixed = _dot(share.astype(v.dtype), v, 0)
        out = mixed if split.kv == 1 else jnp.where(head == index, mixed, out)
    return most, share.sum(-1, keepdims=True), out


def _merge(part: _Part, most_ref: Any, weight_ref: Any, out_ref: Any) -> None:
    """Add a part to a running softmax: most and weight [n, 128], equal along the lanes, out [n, H]."""
    most, weight, out = part
    before = most_ref[...]
    new = jnp.maximum(before, most)
    fade, share = jnp.exp(before - new), jnp.exp(most - new[:, :1])
    most_ref[...] = new
    weight_ref[...] = weight_ref[...] * fade + weight * share
    out_ref[...] = out_ref[...] * fade[:, :1] + out * share


def _dot(left: Array, right: Array, axis: int) -> Array:
    return lax.dot_general(
        left, right, (((1,), (axis,)), ((), ())),
        precision=precision(right.dtype), preferred_element_type=jnp.float32,
    )  # fmt: skip


def _blocked(q: Array, split: Heads) -> Array:
    """[T, N, H] -> [blocks, T, queries, H]; free where one block holds all heads."""
    return q.reshape(q.shape[0], split.blocks, split.queries, q.shape[2]).swapaxes(0, 1)


def _unblocked(out: Array) -> Array:
    blocks, tokens, queries, head_dim = out.shape
    return out.swapaxes(0, 1).reshape(tokens, blocks * queries, head_dim)
