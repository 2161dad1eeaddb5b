"""Grouped matmul: each row of x meets the weights of its own group (an expert). Nothing is dropped, nothing padded.

Rows arrive sorted by group. `implementation="ragged"` is `jax.lax.ragged_dot`, which a TPU runs as a grouped kernel.
XLA expands it elsewhere, on a CPU to one dense matmul over every group, on a GPU to every row beside every group's
weights (4 GB of temporaries for a 512-token chunk of 26B-A4B). So on a CPU "loop" walks the tiles of the groups that
have rows, reading only those experts' weights, and on a GPU "pallas_triton" is a kernel that does. Knows arrays only.
"""

import jax.numpy as jnp
from jax import Array, lax

from onechip.errors import ConfigError
from onechip.kernels import grouped_matmul_triton
from onechip.kernels.rows import precision

IMPLEMENTATIONS = ("ragged", "loop", "pallas_triton")


def choose(platform: str, capability: float | None = None) -> str:
    """The implementation for programs of "cpu", "gpu" or "tpu"; a GPU's compute capability tells what it has."""
    if platform == "gpu" and (capability is None or capability >= 8.0):
        return "pallas_triton"
    return "loop" if platform == "cpu" else "ragged"


_TILE_ROWS = 16  # rows of one expert a tile; at decode most experts have one or two


def grouped_matmul(
    x: Array, weights: Array, sizes: Array, *, implementation: str, interpret: bool = False
) -> Array:
    """x [M, D] sorted by group, weights [E, F, D], sizes [E] int32 summing to M -> float32 [M, F].

    `interpret` runs a kernel's program on any machine. Raises ConfigError for an implementation that does not exist.
    """
    if implementation == "ragged":
        return lax.ragged_dot(
            x, weights.swapaxes(1, 2), sizes,
            preferred_element_type=jnp.float32, precision=precision(x.dtype),
        )  # fmt: skip
    if implementation == "loop":
        return _loop(x, weights, sizes)
    if implementation == "pallas_triton":
        return grouped_matmul_triton.grouped_matmul(x, weights, sizes, interpret=interpret)
    raise ConfigError(
        f"grouped matmul {implementation!r} does not exist; use one of {IMPLEMENTATIONS}"
    )


def _loop(x: Array, weights: Array, sizes: Array) -> Array:
    """Tiles in row order; one that runs over its group's end is overwritten there by the next group's first tile."""
    count = x.shape[0]
    tiles = -(-sizes // _TILE_ROWS)
    ends, row_ends = jnp.cumsum(tiles), jnp.cumsum(sizes)
    padded = jnp.pad(x, ((0, _TILE_ROWS), (0, 0)))

    def tile(index: Array, out: Array) -> Array:
        group = jnp.searchsorted(ends, index, side="right")
        offset = (index - (ends[group] - tiles[group])) * _TILE_ROWS
        begin = row_ends[group] - sizes[group] + offset
        rows = lax.dynamic_slice_in_dim(padded, begin, _TILE_ROWS)
        weight = lax.dynamic_index_in_dim(weights, group, keepdims=False)
        product = lax.dot_general(
            rows,
            weight,
            (((1,), (1,)), ((), ())),
            precision=precision(x.dtype),
            preferred_element_type=jnp.float32,
        )
        return lax.dynamic_update_slice_in_dim(out, product, begin, axis=0)

    out = jnp.zeros((count + _TILE_ROWS, weights.shape[1]), jnp.float32)
    return lax.fori_loop(0, ends[-1], tile, out)[:count]
