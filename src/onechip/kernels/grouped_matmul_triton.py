"""Grouped matmul for GPUs since Ampere, in Pallas' Triton dialect: a program takes a tile of one group's rows and some
columns of its weights.

Tiles are listed on the device, as many as the groups have rows for; programs past the list end at once. A group's
weights are read once a tile of its rows, so tiles are as high as groups are on average, 16 to 64 rows. Groups without
rows are not read. Why not `lax.ragged_dot`: XLA expands it for a GPU into every row beside every group's weights.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from onechip.kernels.rows import listed, precision

_COLUMNS = 64  # of a program
_DEPTH = 64  # of a step of its sum
_LEAST, _MOST = 16, 64  # rows of a tile; Triton's matmuls have at least 16


@partial(jax.jit, static_argnames="interpret")
def grouped_matmul(x: Array, weights: Array, sizes: Array, *, interpret: bool = False) -> Array:
    """x [M, D] sorted by group, weights [E, F, D], sizes [E] int32 summing to M -> float32 [M, F]."""
    count, (groups, columns, depth) = x.shape[0], weights.shape
    if not count:
        return jnp.zeros((0, columns))
    average = 1 << (max(1, count // groups) - 1).bit_length()
    rows = max(_LEAST, min(_MOST, average))
    group, begin, size = _tiles(sizes, rows, -(-count // rows) + groups)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_kernel, rows=rows),
        grid=(group.shape[0], pl.cdiv(columns, _COLUMNS)),
        in_specs=[whole] * 5,
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((count, columns), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        cost_estimate=pl.CostEstimate(
            flops=2 * count * columns * depth,
            transcendentals=0,
            bytes_accessed=weights.size * weights.dtype.itemsize,
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(x, weights, group, begin, size)


def _tiles(sizes: Array, rows: int, most: int) -> tuple[Array, Array, Array]:
    """Of each of `most` tiles: its group, its first row, and its rows, 0 for those past the list."""
    group, number, total = listed(-(-sizes // rows), most)
    end = jnp.cumsum(sizes)[group]
    begin = end - sizes[group] + number * rows
    size = jnp.where(jnp.arange(most) < total, jnp.clip(end - begin, 0, rows), 0)
    return group.astype(jnp.int32), begin.astype(jnp.int32), size.astype(jnp.int32)


def _kernel(
    x_ref: Any,  # [M, D]
    weights_ref: Any,  # [E, F, D]
    group_ref: Any,  # [C]
    begin_ref: Any,  # [C]
    size_ref: Any,  # [C]
    out_ref: Any,  # [M, F] float32
    *,
    rows: int,
) -> None:
    tile, block = pl.program_id(0), pl.program_id(1)
    _, columns, depth = weights_ref.shape
    group, begin, size = group_ref[tile], begin_ref[tile], size_ref[tile]
    offset = jnp.arange(rows)
    row, column = begin + offset, block * _COLUMNS + jnp.arange(_COLUMNS)
    mine, there = offset < size, column < columns

    def one(step: Any, total: Array) -> Array:
        at = step * _DEPTH + jnp.arange(_DEPTH)
        inside = at < depth
        x = plt.load(
            x_ref.at[row[:, None], at[None, :]], mask=mine[:, None] & inside[None, :], other=0
        )
        weights = plt.load(
            weights_ref.at[group, column[:, None], at[None, :]],
            mask=there[:, None] & inside[None, :],
            other=0,
        )
        return total + lax.dot(
            x, weights.T, precision=precision(x.dtype), preferred_element_type=jnp.float32
        )

    steps = jnp.minimum(size, 1) * pl.cdiv(depth, _DEPTH)
    total = lax.fori_loop(0, steps, one, jnp.zeros((rows, _COLUMNS), jnp.float32))
    plt.store(out_ref.at[row[:, None], column[None, :]], total, mask=mine[:, None] & there[None, :])
