"""Rotary embedding: half-split pairs (dim i turns with i + H/2), angles in float32 from int32 positions."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from onechip.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """float32 [H/2]. Proportional: exponents over the whole head, exactly 0 beyond the `partial` share of pairs.

    Every operation is float32, as in the reference: a rounded exponent moves the angle at position 100,000 by more
    than float32 resolves, and the reference's angles, not the exact ones, are what the weights were trained with.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = np.float32(1.0) / np.power(np.float32(rope.theta), exponent)
    if rope.kind == "linear":
        frequency /= np.float32(rope.factor)
    if rope.kind == "proportional":
        frequency[int(rope.partial * head_dim // 2) :] = 0.0
    return frequency


def angles(rope: Rope, head_dim: int, position: Array) -> Array:
    """float32 radians [T, 1, H/2] of positions [T] int32."""
    return position.astype(jnp.float32)[:, None, None] * inverse_frequencies(rope, head_dim)


def rotate(
    x: Array, cos_sin: tuple[Array, Array], rounded: Callable[[Array], Array] = lambda part: part
) -> Array:
    """Turn x [T, heads, H] by (cos, sin) [T, 1, H/2]; `rounded` is applied to each product before they are added."""
    cos, sin = cos_sin
    left, right = jnp.split(x, 2, axis=-1)
    turned_left = rounded(left * cos) - rounded(right * sin)
    turned_right = rounded(right * cos) + rounded(left * sin)
    return jnp.concatenate([turned_left, turned_right], axis=-1)
