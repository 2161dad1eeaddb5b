"""Attention over pages: packed ragged queries against K/V that lies in pages of one pool.

The public op is `attend`; `write` puts new K/V into its pages first. Both take one layer's `KV` and the step's `Ragged`
rows, and know neither the model nor requests. A row is one sequence: `q_len` packed tokens, the last of which sits at
position kv_len - 1; rows of one token come first. Only pages that a row can see are read: work is a list of
(row, block of keys) items whose length is known only on the device, so short rows cost nothing beside long ones and a
sliding layer never reads behind its window. No mask is ever wider than one block.

`implementation="plain"` is plain JAX: the oracle, and the path of the CPU. Other implementations join `IMPLEMENTATIONS`.
Shapes use the package's legend (`onechip.model`); K/V pools are [K, P, Z, H], head-major, so that every matmul's batch
axes lead and the two minor axes fill a TPU tile even with one K/V head. Page 0 is never owned: padding writes there.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from onechip.errors import ConfigError

IMPLEMENTATIONS = ("plain",)

# Keys an item of work covers. Decode items are small, because a row of 300 keys should not pay for 512; a prefill tile
# is wide enough that its matmuls dominate the loop round them (both measured on a two-core AVX2 CPU).
_DECODE_KEYS = 64
_TILE_QUERIES = 64
_TILE_KEYS = 128
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


def storage_dtype(dtype: str, platform: str) -> jnp.dtype:
    """The dtype that pages of logical `dtype` are held in on `platform` (see `KV`)."""
    half = dtype in ("bfloat16", "float16")
    return jnp.dtype(jnp.uint16 if half and platform == "cpu" else dtype)


def write(kv: KV, k: Array, v: Array, page: Array, slot: Array) -> KV:
    """Put k and v [T, K, H] into (page, slot) [T] of the pool. In place when the pool is donated."""
    return replace(kv, k=_scatter(kv, kv.k, k, page, slot), v=_scatter(kv, kv.v, v, page, slot))


def attend(
    q: Array,
    kv: KV,
    rows: Ragged,
    *,
    scale: float,
    window: int | None,
    implementation: str = "auto",
) -> Array:
    """Softmax(scale q k^T) v over each row's visible keys: q [T, N, H] -> [T, N, H] in q's dtype.

    A query at position p sees keys 0..p, or the last `window` of them. T equal to the number of rows says that every
    row has at most one token, row r being token r. Raises ConfigError for an implementation that does not exist.
    """
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise ConfigError(f"attention implementation {implementation!r} does not exist; use auto or {IMPLEMENTATIONS}")
    count = rows.q_len.shape[0]
    if q.shape[0] == count:
        return _decode(q, kv, rows, rows.q_len > 0, scale, window)
    # Both phases run; each has a trip count of its own, zero where the step has no such rows.
    single = jnp.arange(count) < rows.singles
    tiled = _prefill(q, kv, rows, scale, window)
    alone = _decode(q[:count], kv, rows, single & (rows.q_len > 0), scale, window)
    return tiled.at[:count].set(jnp.where(single[:, None, None], alone, tiled[:count]))


def _scatter(kv: KV, pool: Array, new: Array, page: Array, slot: Array) -> Array:
    new = new.astype(kv.dtype)
    if pool.dtype != new.dtype:
        new = lax.bitcast_convert_type(new, pool.dtype)
    return pool.at[:, page, slot].set(new.transpose(1, 0, 2), mode="promise_in_bounds")


def _load(kv: KV, pool: Array, pages: Array, compute: jnp.dtype) -> Array:
    """Pages [..., J] of a pool -> keys [K, ..., J * Z, H] in the compute dtype."""
    keys = pool[:, pages]
    keys = keys.reshape(*keys.shape[:-3], keys.shape[-3] * keys.shape[-2], keys.shape[-1])
    if pool.dtype != jnp.uint16:
        return keys.astype(compute)
    if kv.dtype == "bfloat16":  # widening a bf16 is a shift, which XLA fuses into the gather
        return lax.bitcast_convert_type(keys.astype(jnp.uint32) << 16, jnp.float32).astype(compute)
    return lax.bitcast_convert_type(keys, jnp.float16).astype(compute)


def _compute_dtype(kv: KV) -> jnp.dtype:
    """Half-precision matmuls where the chip has them; pages held as bits are widened to float32."""
    return jnp.dtype(jnp.float32 if kv.k.dtype == jnp.uint16 else kv.k.dtype)


def _pages_of(rows: Ragged, row: Array, logical: Array) -> Array:
    """Physical pages of logical pages [..., J] of row [...]; page 0 where the row has none."""
    column = logical - rows.first_page[row][..., None]
    return rows.table[row[..., None], jnp.clip(column, 0, rows.table.shape[1] - 1)]


def _decode(
    q: Array, kv: KV, rows: Ragged, active: Array, scale: float, window: int | None
) -> Array:
    """One query a row: q [R, N, H], row r's query at position kv_len[r] - 1 -> [R, N, H]; zeros where not active.

    Items (row, block of pages) are handled R at a time; each adds its share to its row's running softmax, so R items
    may belong to R rows or all to one.
    """
    count, heads, head_dim = q.shape
    kv_heads, _, page_size, _ = kv.k.shape
    group, compute = heads // kv_heads, _compute_dtype(kv)
    pages_a_block = max(1, _DECODE_KEYS // page_size)
    low = jnp.maximum(rows.kv_len - window, 0) if window else jnp.zeros_like(rows.kv_len)
    first = low // page_size
    pages = jnp.where(active, -(-rows.kv_len // page_size) - first, 0)
    blocks = -(-pages // pages_a_block)
    ends = jnp.cumsum(blocks)
    total = ends[-1]
    grouped = q.reshape(count, kv_heads, group, head_dim).astype(compute)

    def items(step: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        most, weight, out = state
        item = step * count + jnp.arange(count)
        row = jnp.minimum(jnp.searchsorted(ends, item, side="right"), count - 1).astype(jnp.int32)
        block = item - (ends[row] - blocks[row])
        logical = (first[row] + block * pages_a_block)[:, None] + jnp.arange(pages_a_block)
        mine = (item < total)[:, None] & (logical * page_size < rows.kv_len[row][:, None])
        physical = jnp.where(mine, _pages_of(rows, row, logical), 0)
        position = (logical[..., None] * page_size + jnp.arange(page_size)).reshape(count, -1)
        seen = jnp.repeat(mine, page_size, axis=1)
        seen &= (position >= low[row][:, None]) & (position < rows.kv_len[row][:, None])
        keys, values = _load(kv, kv.k, physical, compute), _load(kv, kv.v, physical, compute)
        score = scale * jnp.einsum(
            "ckgh,kcsh->kcgs", grouped[row], keys, preferred_element_type=jnp.float32
        )
        score = jnp.where(seen[None, :, None], score, _MASKED)
        target = jnp.where(item < total, row, count)
        new_most = most.at[:, target].max(score.max(-1))
        share = jnp.where(seen[None, :, None], jnp.exp(score - new_most[:, target][..., None]), 0)
        fade = jnp.exp(most - new_most)
        mixed = jnp.einsum(
            "kcgs,kcsh->kcgh", share.astype(compute), values, preferred_element_type=jnp.float32
        )
        weight = (weight * fade).at[:, target].add(share.sum(-1))
        out = (out * fade[..., None]).at[:, target].add(mixed)
        return new_most, weight, out

    shape = (kv_heads, count + 1, group)
    start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    _, weight, out = lax.fori_loop(0, -(-total // count), items, start)
    result = (out / jnp.where(weight == 0, 1, weight)[..., None])[:, :count]
    return result.transpose(1, 0, 2, 3).reshape(q.shape).astype(q.dtype)


def _prefill(q: Array, kv: KV, rows: Ragged, scale: float, window: int | None) -> Array:
    """Rows of several tokens, a tile of queries at a time: q [T, N, H] -> [T, N, H], other rows' outputs undefined.

    A tile is a plain slice of the packed queries: where it runs over its row's end it computes rubbish for the next
    row's tokens, which that row's own tile, coming later, overwrites.
    """
    tokens, heads, head_dim = q.shape
    count = rows.q_len.shape[0]
    many = (jnp.arange(count) >= rows.singles) & (rows.q_len > 0)
    tiles = jnp.where(many, -(-rows.q_len // _TILE_QUERIES), 0)
    ends = jnp.cumsum(tiles)
    padded = jnp.pad(q, ((0, _TILE_QUERIES), (0, 0), (0, 0))).astype(_compute_dtype(kv))

    def tile(index: Array, out: Array) -> Array:
        row = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        offset = (index - (ends[row] - tiles[row])) * _TILE_QUERIES
        begin = rows.q_start[row] + offset
        queries = lax.dynamic_slice_in_dim(padded, begin, _TILE_QUERIES)
        position = rows.kv_len[row] - rows.q_len[row] + offset + jnp.arange(_TILE_QUERIES)
        result = _tile(queries, kv, rows, row, position, scale, window)
        return lax.dynamic_update_slice_in_dim(out, result.astype(out.dtype), begin, axis=0)

    out = jnp.zeros((tokens + _TILE_QUERIES, heads, head_dim), q.dtype)
    return lax.fori_loop(0, ends[-1], tile, out)[:tokens]


def _tile(
    queries: Array,
    kv: KV,
    rows: Ragged,
    row: Array,
    position: Array,
    scale: float,
    window: int | None,
) -> Array:
    """One row's queries [Q, N, H] at consecutive positions [Q] against the key blocks they can see."""
    count, heads, head_dim = queries.shape
    kv_heads, _, page_size, _ = kv.k.shape
    compute = queries.dtype
    pages_a_block = max(1, _TILE_KEYS // page_size)
    grouped = queries.reshape(count, kv_heads, heads // kv_heads, head_dim).transpose(1, 2, 0, 3)
    low = jnp.maximum(position[0] - window + 1, 0) if window else jnp.int32(0)
    high = jnp.minimum(position[-1] + 1, rows.kv_len[row])
    first = low // page_size

    def block(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        most, weight, out = state
        logical = first + index * pages_a_block + jnp.arange(pages_a_block)
        physical = jnp.where(logical * page_size < high, _pages_of(rows, row, logical), 0)
        key_at = (logical[:, None] * page_size + jnp.arange(page_size)).reshape(-1)
        seen = (key_at[None] <= position[:, None]) & (key_at[None] < high)
        if window:
            seen &= key_at[None] > position[:, None] - window
        keys, values = _load(kv, kv.k, physical, compute), _load(kv, kv.v, physical, compute)
        score = scale * jnp.einsum(
            "kgqh,ksh->kgqs", grouped, keys, preferred_element_type=jnp.float32
        )
        score = jnp.where(seen, score, _MASKED)
        new_most = jnp.maximum(most, score.max(-1))
        share = jnp.where(seen, jnp.exp(score - new_most[..., None]), 0)
        fade = jnp.exp(most - new_most)
        mixed = jnp.einsum(
            "kgqs,ksh->kgqh", share.astype(compute), values, preferred_element_type=jnp.float32
        )
        return new_most, weight * fade + share.sum(-1), out * fade[..., None] + mixed

    shape = grouped.shape[:-1]
    start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros(grouped.shape, jnp.float32))
    trips = -(-(-(-high // page_size) - first) // pages_a_block)
    _, weight, out = lax.fori_loop(0, trips, block, start)
    result = out / jnp.where(weight == 0, 1, weight)[..., None]
    return result.transpose(2, 0, 1, 3).reshape(count, heads, head_dim)
