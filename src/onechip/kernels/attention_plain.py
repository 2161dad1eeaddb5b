"""Attention over pages in plain JAX: the oracle of every kernel, and the CPU's path.

Two loops whose trip counts are known only on the device: over rounds of (row, block of keys) items for rows of one
token, over tiles of queries for the others. No mask is ever wider than one block.
"""

import jax.numpy as jnp
from jax import Array, lax

from onechip.kernels import float32
from onechip.kernels.rows import KV, MASKED, Work, precision

_Running = tuple[Array, Array, Array]  # largest score, sum of exponentials, output so far


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


def decode(q: Array, kv: KV, work: Work, scale: float) -> Array:
    """One query a row: q [R, N, H], row r's at its last position -> [R, N, H]; zeros for rows without items.

    Items are handled R at a time, so R items may belong to R rows or all to one; `member` [R, R] says which item is
    whose, and adds each item's share to its row's running softmax.
    """
    assert work.items is not None
    items = work.items
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
            precision=precision(compute), preferred_element_type=jnp.float32,
        ).swapaxes(2, 3) * scale  # fmt: skip
        score = jnp.where(seen, score, MASKED)
        member = row[None, :] == jnp.arange(count)[:, None]
        highest = jnp.where(member[None, :, :, None], score.max(-1)[:, None], MASKED).max(2)
        new_most = jnp.maximum(most, highest)
        share = jnp.where(
            seen, jnp.exp(score - new_most[:, jnp.minimum(row, count - 1)][..., None]), 0
        )
        mixed = jnp.einsum(
            "kcgs,kcsh->kcgh", share.astype(compute), values,
            precision=precision(compute), preferred_element_type=jnp.float32,
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
    start = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    _, weight, out = lax.fori_loop(0, -(-items.count // count), round_, start)
    result = out / jnp.where(weight == 0, 1, weight)[..., None]
    return result.transpose(1, 0, 2, 3).reshape(q.shape)


def _gather_shares(member: Array, shares: Array) -> Array:
    """Sum items' shares [K, C, ...] into their rows [K, R, ...], member [R, C] float32."""
    return jnp.einsum("rc,kc...->kr...", member, shares, precision=lax.Precision.HIGHEST)


def prefill(q: Array, kv: KV, work: Work, scale: float) -> Array:
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
            precision=precision(compute), preferred_element_type=jnp.float32,
        )  # fmt: skip
        return add(state, jnp.where(seen, score, MASKED), seen, values)

    shape = grouped.shape[:-1]
    start = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(grouped.shape, jnp.float32))
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
        precision=precision(values.dtype), preferred_element_type=jnp.float32,
    )  # fmt: skip
