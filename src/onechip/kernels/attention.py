"""Attention over pages: packed ragged queries against K/V that lies in pages of one pool.

The public op is `attend`; `write` puts new K/V into its pages first. Both take one layer's `KV` and the step's `Ragged`
rows, and know neither the model nor requests. A row is one sequence: `q_len` packed tokens, the last of which sits at
position kv_len - 1; rows of one token come first. Only pages that a row can see are read: work is a list of
(row, block of keys) items whose length is known only on the device, so short rows cost nothing beside long ones and a
sliding layer never reads behind its window. No mask is ever wider than one block.

`implementation="plain"` is plain JAX: the oracle, and the CPU's path. Others join `IMPLEMENTATIONS`.
Shapes use the package's legend (`onechip.model`); K/V pools are [K, P, Z, H], head-major, so that every matmul's batch
axes lead and the two minor axes fill a TPU tile even with one K/V head. Page 0 is never owned: padding writes there.
"""

from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from onechip.errors import ConfigError
from onechip.kernels import float32

IMPLEMENTATIONS = ("plain",)

# Keys an item of work covers. Decode items are small, because a row of 300 keys should not pay for 512; a prefill tile
# is wide enough that its matmuls dominate the loop round them (both measured on a two-core AVX2 CPU).
_DECODE_KEYS = 64
_TILE_QUERIES = 64
_TILE_KEYS = 128
# Float32 rounds as the reference does (`kernels.float32`), whose softmax knows no blocks: one block for the usual test.
_EXACT_QUERIES = 16
_EXACT_KEYS = 192
_Running = tuple[Array, Array, Array]  # largest score, sum of exponentials, output so far
_MASKED = -1e30  # finite: an all-masked block must not make NaN


@register_dataclass
@dataclass(frozen=True)
class KV:
    """Pages of one layer: k and v [K, P, Z, H].

    `dtype` is what the values are. On a CPU half-precision pages are held as their uint16 bits: XLA's CPU compiler
    widens bf16 scatters and loop-carried gathers by converting the whole pool (40 ms for 32 MB, against 0.02).
    """

    k: Array
    v: Array
    dtype: str = field(metadata={"static": True})


@register_dataclass
@dataclass(frozen=True)
class Ragged:
    """Which packed tokens and which pages belong to each row.

    q_start, q_len, kv_len [R] int32; `table` [R, M] int32 physical pages, column 0 of row r being its logical page
    first_page[r]; `singles` [] int32: rows before it have at most one token. Rows with q_len 0 are empty.
    """

    q_start: Array
    q_len: Array
    kv_len: Array
    table: Array
    first_page: Array
    singles: Array

    def last_tokens(self) -> "Ragged":
        """The same rows with only their last token as a query: packed token r is row r."""
        rows = self.q_len.shape[0]
        return replace(
            self,
            q_start=jnp.arange(rows, dtype=jnp.int32),
            q_len=jnp.minimum(self.q_len, 1),
            singles=jnp.int32(rows),
        )


@register_dataclass
@dataclass(frozen=True)
class Items:
    """The (row, block of keys) list of rows with one query: `count` [] are real, the others belong to no row.

    row [W]; pages [W, J]; first [W]: the position of the block's first key; low [W], high [W]: the keys its row sees.
    """

    row: Array
    pages: Array
    first: Array
    low: Array
    high: Array
    count: Array


@register_dataclass
@dataclass(frozen=True)
class Tiles:
    """The tiles of rows with several queries: `count` [] are real.

    row [C]; begin [C]: the tile's first packed token; position [C]: that token's position. `queries` and `keys` are a
    tile's sizes.
    """

    row: Array
    begin: Array
    position: Array
    count: Array
    queries: int = field(metadata={"static": True})
    keys: int = field(metadata={"static": True})


@register_dataclass
@dataclass(frozen=True)
class Work:
    """A step's rows and the list of work they come to, the same for every layer of a pool: see `plan`.

    No items: every row is tiled, one way of adding up whatever the chunk (`exact`).
    """

    rows: Ragged
    items: Items | None
    tiles: Tiles | None
    window: int | None = field(metadata={"static": True})


def plan(
    rows: Ragged, tokens: int, page_size: int, window: int | None, *, exact: bool = False
) -> Work:
    """List the work of `rows` for layers of that window (None: full attention), once a step.

    `tokens` is the number of packed queries; where it equals the number of rows every row has at most one token, row r
    being token r. `exact` asks for the reference's roundings, whatever the chunk (`kernels.float32`).
    """
    count = rows.q_len.shape[0]
    alone = rows.q_len > 0
    if exact:
        if tokens == count:
            rows = replace(rows, q_start=jnp.arange(count, dtype=jnp.int32))
        tiles = _tiles(rows, alone, tokens, _EXACT_QUERIES, _EXACT_KEYS)
        return Work(rows, None, tiles, window)
    if tokens == count:
        return Work(rows, _items(rows, alone, page_size, window), None, window)
    alone &= jnp.arange(count) < rows.singles
    many = (jnp.arange(count) >= rows.singles) & (rows.q_len > 0)
    tiles = _tiles(rows, many, tokens, _TILE_QUERIES, _TILE_KEYS)
    return Work(rows, _items(rows, alone, page_size, window), tiles, window)


def storage_dtype(dtype: str, platform: str) -> jnp.dtype:
    """The dtype that pages of logical `dtype` are held in on `platform` (see `KV`)."""
    half = dtype in ("bfloat16", "float16")
    return jnp.dtype(jnp.uint16 if half and platform == "cpu" else dtype)


def write(kv: KV, k: Array, v: Array, page: Array, slot: Array) -> KV:
    """Put k and v [T, K, H] into (page, slot) [T] of the pool. In place when the pool is donated."""
    return replace(kv, k=_scatter(kv, kv.k, k, page, slot), v=_scatter(kv, kv.v, v, page, slot))


def attend(q: Array, kv: KV, work: Work, *, scale: float, implementation: str = "auto") -> Array:
    """Softmax(scale q k^T) v over each row's visible keys: q [T, N, H] -> float32 [T, N, H].

    A query at position p sees keys 0..p, or the last `work.window` of them. Raises ConfigError for an implementation
    that does not exist.
    """
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise ConfigError(
            f"attention implementation {implementation!r} does not exist; use auto or "
            f"{', '.join(IMPLEMENTATIONS)}"
        )
    if work.items is None:
        return _prefill(q, kv, work, scale)
    count = work.rows.q_len.shape[0]
    alone = _decode(q[:count], kv, work.items, scale)
    if work.tiles is None:
        return alone
    # Both phases run; each has a trip count of its own, zero where the step has no such rows.
    tiled = _prefill(q, kv, work, scale)
    single = jnp.arange(count) < work.rows.singles
    return tiled.at[:count].set(jnp.where(single[:, None, None], alone, tiled[:count]))


def _items(rows: Ragged, active: Array, page_size: int, window: int | None) -> Items:
    count, columns = rows.table.shape
    pages_a_block = max(1, _DECODE_KEYS // page_size)
    low = jnp.maximum(rows.kv_len - window, 0) if window else jnp.zeros_like(rows.kv_len)
    first_page = low // page_size
    pages = jnp.where(active, -(-rows.kv_len // page_size) - first_page, 0)
    blocks = -(-pages // pages_a_block)
    ends = jnp.cumsum(blocks)
    # A whole number of rounds, so that a round's slice never runs over the end.
    item = jnp.arange(count * -(-columns // pages_a_block), dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, item, side="right", method="compare_all"), count - 1)
    real = item < ends[-1]
    block = item - (ends[row] - blocks[row])
    logical = (first_page[row] + block * pages_a_block)[:, None] + jnp.arange(pages_a_block)
    mine = real[:, None] & (logical * page_size < rows.kv_len[row][:, None])
    column = jnp.clip(logical - rows.first_page[row][:, None], 0, columns - 1)
    return Items(
        row=jnp.where(real, row, count).astype(jnp.int32),
        pages=jnp.where(mine, rows.table[row[:, None], column], 0),
        first=logical[:, 0] * page_size,
        low=low[row],
        high=jnp.where(real, rows.kv_len[row], 0),
        count=ends[-1],
    )


def _tiles(rows: Ragged, tiled: Array, tokens: int, queries: int, keys: int) -> Tiles:
    count = rows.q_len.shape[0]
    tiles = jnp.where(tiled, -(-rows.q_len // queries), 0)
    ends = jnp.cumsum(tiles)
    index = jnp.arange(-(-tokens // queries) + count, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), count - 1)
    offset = (index - (ends[row] - tiles[row])) * queries
    return Tiles(
        row=row.astype(jnp.int32),
        begin=rows.q_start[row] + offset,
        position=rows.kv_len[row] - rows.q_len[row] + offset,
        count=ends[-1],
        queries=queries,
        keys=keys,
    )


def _scatter(kv: KV, pool: Array, new: Array, page: Array, slot: Array) -> Array:
    new = new.astype(kv.dtype)
    if pool.dtype != new.dtype:
        new = lax.bitcast_convert_type(new, pool.dtype)
    return pool.at[:, page, slot].set(new.transpose(1, 0, 2), mode="promise_in_bounds")


def _load(
    kv: KV, pool: Array, pages: Array, compute: jnp.dtype, valid: Array | None = None
) -> Array:
    """Pages [..., J] of a pool -> keys [K, ..., J * Z, H] in the compute dtype.

    Keys that are not `valid` [..., J * Z] become 0: a probability of 0 would not keep out a NaN that an earlier owner
    of the page left there.
    """
    keys = pool[:, pages]
    keys = keys.reshape(*keys.shape[:-3], keys.shape[-3] * keys.shape[-2], keys.shape[-1])
    if pool.dtype == jnp.uint16 and kv.dtype == "bfloat16":
        # Widening a bf16 is a shift, which XLA fuses into the gather.
        keys = lax.bitcast_convert_type(keys.astype(jnp.uint32) << 16, jnp.float32)
    elif pool.dtype == jnp.uint16:
        keys = lax.bitcast_convert_type(keys, jnp.float16)
    keys = keys.astype(compute)
    return keys if valid is None else jnp.where(valid[..., None], keys, 0)


def _compute_dtype(kv: KV) -> jnp.dtype:
    """Half-precision matmuls where the chip has them; pages held as bits are widened to float32."""
    return jnp.dtype(jnp.float32 if kv.k.dtype == jnp.uint16 else kv.k.dtype)


def _decode(q: Array, kv: KV, items: Items, scale: float) -> Array:
    """One query a row: q [R, N, H], row r's at its last position -> [R, N, H]; zeros for rows without items.

    Items are handled R at a time, so R items may belong to R rows or all to one; `member` [R, R] says which item is
    whose, and adds each item's share to its row's running softmax.
    """
    count, heads, head_dim = q.shape
    kv_heads, _, page_size, _ = kv.k.shape
    group, compute = heads // kv_heads, _compute_dtype(kv)
    grouped = q.reshape(count, kv_heads, group, head_dim).astype(compute).swapaxes(0, 1)
    offset = jnp.arange(items.pages.shape[1] * page_size)

    def round_(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        most, weight, out = state
        row, pages, first, low, high = (
            lax.dynamic_slice_in_dim(part, index * count, count)
            for part in (items.row, items.pages, items.first, items.low, items.high)
        )
        position = first[:, None] + offset
        mine = (position >= low[:, None]) & (position < high[:, None])
        keys, values = _load(kv, kv.k, pages, compute), _load(kv, kv.v, pages, compute, mine)
        seen = mine[None, :, None]
        queries = grouped[:, jnp.minimum(row, count - 1)]
        # Keys come first, so that it is the few queries XLA's CPU compiler transposes for its matmul, not the keys.
        score = lax.dot_general(
            keys, queries, (((3,), (3,)), ((0, 1), (0, 1))),
            precision=_precision(compute), preferred_element_type=jnp.float32,
        ).swapaxes(2, 3) * scale  # fmt: skip
        score = jnp.where(seen, score, _MASKED)
        member = row[None, :] == jnp.arange(count)[:, None]
        highest = jnp.where(member[None, :, :, None], score.max(-1)[:, None], _MASKED).max(2)
        new_most = jnp.maximum(most, highest)
        share = jnp.where(
            seen, jnp.exp(score - new_most[:, jnp.minimum(row, count - 1)][..., None]), 0
        )
        mixed = jnp.einsum(
            "kcgs,kcsh->kcgh", share.astype(compute), values,
            precision=_precision(compute), preferred_element_type=jnp.float32,
        )  # fmt: skip
        fade = jnp.exp(most - new_most)
        belongs, total = member.astype(jnp.float32), share.sum(-1)
        # 0 times NaN is NaN: an item that is not finite is left out of the matmuls and breaks its own row alone.
        finite = jnp.isfinite(mixed).all((0, 2, 3))
        broken = (member & ~finite).any(1)[None, :, None]
        total = jnp.where(finite[None, :, None], total, 0)
        mixed = jnp.where(finite[None, :, None, None], mixed, 0)
        weight = weight * fade + jnp.where(broken, jnp.nan, _gather_shares(belongs, total))
        out = out * fade[..., None] + _gather_shares(belongs, mixed)
        return new_most, weight, out

    shape = (kv_heads, count, group)
    start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    _, weight, out = lax.fori_loop(0, -(-items.count // count), round_, start)
    result = out / jnp.where(weight == 0, 1, weight)[..., None]
    return result.transpose(1, 0, 2, 3).reshape(q.shape)


def _gather_shares(member: Array, shares: Array) -> Array:
    """Sum items' shares [K, C, ...] into their rows [K, R, ...], member [R, C] float32."""
    return jnp.einsum("rc,kc...->kr...", member, shares, precision=lax.Precision.HIGHEST)


def _precision(dtype: jnp.dtype) -> lax.Precision | None:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _prefill(q: Array, kv: KV, work: Work, scale: float) -> Array:
    """Rows of several tokens, a tile of queries at a time: q [T, N, H] -> [T, N, H], other rows' outputs undefined.

    A tile is a plain slice of the packed queries: where it runs over its row's end it computes rubbish for the next
    row's tokens, which that row's own tile, coming later, overwrites.
    """
    tokens, heads, head_dim = q.shape
    tiles, rows = work.tiles, work.rows
    assert tiles is not None
    padded = jnp.pad(q, ((0, tiles.queries), (0, 0), (0, 0))).astype(_compute_dtype(kv))
    # A block's pages are a plain slice of the row's table, which must not run over its end.
    page_size = kv.k.shape[2]
    table = jnp.pad(rows.table, ((0, 0), (0, max(1, tiles.keys // page_size))))

    def tile(index: Array, out: Array) -> Array:
        row, begin = tiles.row[index], tiles.begin[index]
        queries = lax.dynamic_slice_in_dim(padded, begin, tiles.queries)
        position = tiles.position[index] + jnp.arange(tiles.queries)
        mine = (table[row], rows.first_page[row], rows.kv_len[row])
        result = _tile(
            queries, kv, mine, position, scale, work.window, tiles.keys, work.items is None
        )
        return lax.dynamic_update_slice_in_dim(out, result, begin, axis=0)

    out = jnp.zeros((tokens + tiles.queries, heads, head_dim))
    return lax.fori_loop(0, tiles.count, tile, out)[:tokens]


def _tile(
    queries: Array,
    kv: KV,
    row: tuple[Array, Array, Array],
    position: Array,
    scale: float,
    window: int | None,
    block_keys: int,
    exact: bool,
) -> Array:
    """One row's queries [Q, N, H] at consecutive positions [Q] against the key blocks they can see.

    `row` is its table [M], the logical page of column 0, and its keys' count.
    """
    count, heads, head_dim = queries.shape
    kv_heads, _, page_size, _ = kv.k.shape
    compute = queries.dtype
    pages_a_block = max(1, block_keys // page_size)
    add = _add_exactly if exact else _add
    table, first_page, kv_len = row
    grouped = queries.reshape(count, kv_heads, heads // kv_heads, head_dim).transpose(1, 2, 0, 3)
    low = jnp.maximum(position[0] - window + 1, 0) if window else jnp.int32(0)
    high = jnp.minimum(position[-1] + 1, kv_len)
    first = low // page_size

    def block(index: Array, state: _Running) -> _Running:
        page = first + index * pages_a_block
        pages = lax.dynamic_slice_in_dim(table, page - first_page, pages_a_block)
        key_at = page * page_size + jnp.arange(pages_a_block * page_size)
        pages = jnp.where(key_at[::page_size] < high, pages, 0)
        seen = (key_at[None] <= position[:, None]) & (key_at[None] < high)
        if window:
            seen &= key_at[None] > position[:, None] - window
        mine = key_at < high
        keys, values = _load(kv, kv.k, pages, compute), _load(kv, kv.v, pages, compute, mine)
        score = scale * jnp.einsum(
            "kgqh,ksh->kgqs", grouped, keys,
            precision=_precision(compute), preferred_element_type=jnp.float32,
        )  # fmt: skip
        return add(state, jnp.where(seen, score, _MASKED), seen, values)

    shape = grouped.shape[:-1]
    start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros(grouped.shape, jnp.float32))
    trips = -(-(-(-high // page_size) - first) // pages_a_block)
    _, weight, out = lax.fori_loop(0, trips, block, start)
    result = out if exact else out / jnp.where(weight == 0, 1, weight)[..., None]
    return result.transpose(2, 0, 1, 3).reshape(count, heads, head_dim)


def _add(state: _Running, score: Array, seen: Array, values: Array) -> _Running:
    """Add a block of keys to a running softmax: scores [K, G, Q, S], values [K, S, H]."""
    most, weight, out = state
    new_most = jnp.maximum(most, score.max(-1))
    share = jnp.where(seen, jnp.exp(score - new_most[..., None]), 0)
    fade = jnp.exp(most - new_most)
    mixed = _mix(share.astype(values.dtype), values)
    return new_most, weight * fade + share.sum(-1), out * fade[..., None] + mixed


def _add_exactly(state: _Running, score: Array, seen: Array, values: Array) -> _Running:
    """The same for float32, with `out` kept normalised: the first block's is to the bit what one softmax gives."""
    most, weight, out = state
    share, highest, added = float32.softmax_parts(score, seen)
    new_most = jnp.maximum(most, highest)
    before, new = weight * jnp.exp(most - new_most), added * jnp.exp(highest - new_most)
    total = before + new
    safe = jnp.where(total == 0, 1, total)
    out = out * (before / safe)[..., None] + _mix(share, values) * (new / safe)[..., None]
    return new_most, total, out


def _mix(share: Array, values: Array) -> Array:
    return jnp.einsum(
        "kgqs,ksh->kgqh", share, values,
        precision=_precision(values.dtype), preferred_element_type=jnp.float32,
    )  # fmt: skip
