"""What attention is asked: pages, rows, and the list of work they come to. The vocabulary of `kernels.attention`.

Shapes use the package's legend (`onechip.model`). K/V pools are [K, P, Z, H] on every platform, head-major: batch axes
lead every matmul, a page of one head is one piece for a TPU's copies or a GPU's loads, and the two minor axes
fill a TPU tile even with one K/V head. Page 0 is never owned: padding writes there.
"""

from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

# Float32 rounds as the reference does (`kernels.float32`), whose softmax knows no blocks: one block for the usual test.
_EXACT_QUERIES = 16
_EXACT_KEYS = 192
MASKED = -1e30  # finite: an all-masked block must not make NaN


@dataclass(frozen=True)
class Blocks:
    """Keys an item of decode covers, and queries and keys of a prefill tile.

    The defaults are the CPU's: decode items are small, because a row of 300 keys should not pay for 512; a prefill tile
    is wide enough that its matmuls dominate the loop round them (both measured on a two-core AVX2 CPU).
    """

    decode_keys: int = 64
    tile_queries: int = 64
    tile_keys: int = 128


@register_dataclass
@dataclass(frozen=True)
class KV:
    """Pages of one layer, or of `layers` of them one behind the other: k and v [K, P, Z, H].

    `dtype` is what the values are. On a CPU half-precision pages are held as their uint16 bits: XLA's CPU compiler
    widens bf16 scatters and loop-carried gathers by converting the whole pool (40 ms for 32 MB, against 0.02).
    """

    k: Array
    v: Array
    dtype: str = field(metadata={"static": True})
    layers: int = field(metadata={"static": True}, default=1)

    @property
    def layer_pages(self) -> int:
        """Pages of each layer."""
        return self.k.shape[1] // self.layers


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
    blocks: Blocks = field(metadata={"static": True}, default_factory=Blocks)

    def moved(self, offset: Array | int) -> "Work":
        """The same work with every page `offset` further."""
        if isinstance(offset, int) and offset == 0:
            return self
        items = self.items
        if items is not None:
            items = replace(items, pages=items.pages + offset)
        return replace(self, rows=replace(self.rows, table=self.rows.table + offset), items=items)


def plan(
    rows: Ragged,
    tokens: int,
    page_size: int,
    window: int | None,
    *,
    exact: bool = False,
    blocks: Blocks = Blocks(),
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
        return Work(rows, None, tiles, window, blocks)
    if tokens == count:
        items = _items(rows, alone, page_size, window, blocks.decode_keys)
        return Work(rows, items, None, window, blocks)
    alone &= jnp.arange(count) < rows.singles
    many = (jnp.arange(count) >= rows.singles) & (rows.q_len > 0)
    tiles = _tiles(rows, many, tokens, blocks.tile_queries, blocks.tile_keys)
    items = _items(rows, alone, page_size, window, blocks.decode_keys)
    return Work(rows, items, tiles, window, blocks)


def _items(rows: Ragged, active: Array, page_size: int, window: int | None, keys: int) -> Items:
    count, columns = rows.table.shape
    pages_a_block = max(1, keys // page_size)
    low = jnp.maximum(rows.kv_len - window, 0) if window else jnp.zeros_like(rows.kv_len)
    first_page = low // page_size
    pages = jnp.where(active, -(-rows.kv_len // page_size) - first_page, 0)
    # A whole number of rounds, so that a round's slice never runs over the end.
    most = count * -(-columns // pages_a_block)
    row, block, total = listed(-(-pages // pages_a_block), most)
    real = jnp.arange(most, dtype=jnp.int32) < total
    logical = (first_page[row] + block * pages_a_block)[:, None] + jnp.arange(pages_a_block)
    mine = real[:, None] & (logical * page_size < rows.kv_len[row][:, None])
    column = jnp.clip(logical - rows.first_page[row][:, None], 0, columns - 1)
    return Items(
        row=jnp.where(real, row, count).astype(jnp.int32),
        pages=jnp.where(mine, rows.table[row[:, None], column], 0),
        first=logical[:, 0] * page_size,
        low=low[row],
        high=jnp.where(real, rows.kv_len[row], 0),
        count=total,
    )


def _tiles(rows: Ragged, tiled: Array, tokens: int, queries: int, keys: int) -> Tiles:
    count = rows.q_len.shape[0]
    tiles = jnp.where(tiled, -(-rows.q_len // queries), 0)
    row, number, total = listed(tiles, -(-tokens // queries) + count)
    offset = number * queries
    return Tiles(
        row=row.astype(jnp.int32),
        begin=rows.q_start[row] + offset,
        position=rows.kv_len[row] - rows.q_len[row] + offset,
        count=total,
        queries=queries,
        keys=keys,
    )


def listed(counts: Array, most: int) -> tuple[Array, Array, Array]:
    """counts[i] pieces of each i, in order, as a list of `most`: whose each is and its number there, both [most], and
    how many are real [].
    """
    ends = jnp.cumsum(counts)
    index = jnp.arange(most, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, index, side="right", method="compare_all")
    owner = jnp.minimum(owner, counts.shape[0] - 1)
    return owner, index - (ends[owner] - counts[owner]), ends[-1]


def storage_dtype(dtype: str, platform: str) -> jnp.dtype:
    """The dtype that pages of logical `dtype` are held in on `platform` (see `KV`)."""
    half = dtype in ("bfloat16", "float16")
    return jnp.dtype(jnp.uint16 if half and platform == "cpu" else dtype)


def precision(dtype: jnp.dtype) -> lax.Precision | None:
    """Float32 means float32: TPUs and GPUs would otherwise round a matmul's inputs."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None
