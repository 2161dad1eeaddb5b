"""Bits to booleans, one for each id of a vocabulary.

A mask comes as bytes, so that little crosses to the device. Spreading them is a formula of one line, and on a TPU the
slowest way: neighbours in memory become neighbours in a tile's lanes only through shuffles that its compiler unrolls
(16 s for 262,144 ids, against 3 s). There a matrix multiply spreads them: rows hold 16 bytes each and zeros, and a
matrix of ones copies each byte to its eight lanes. Bytes are exact in bfloat16.
"""

import jax.numpy as jnp
from jax import Array, lax

_LANES = 128


def mask_bytes(count: int) -> int:
    """Bytes of a bit for each of `count` ids, in whole words of 32, as llguidance makes them."""
    return 4 * -(-count // 32)


def unpack_bits(bits: Array, count: int, platform: str) -> Array:
    """bool [R, count] of uint8 [R, at least count / 8], lowest bit first."""
    if platform == "tpu" and bits.shape[1] % _LANES == 0:
        spread = _spread_by_matmul(bits)
        flags = (spread >> jnp.arange(spread.shape[1]) % 8) & 1
    else:
        flags = (bits[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    return flags.reshape(bits.shape[0], -1)[:, :count] != 0


def _spread_by_matmul(bits: Array) -> Array:
    """int32 [R, 8 B]: each byte of [R, B] eight times."""
    lane, byte = jnp.arange(_LANES), _LANES // 8
    mine = lane // byte == jnp.arange(8)[:, None]  # [8 rows, lanes]: the bytes of each row
    blocks = bits.reshape(bits.shape[0], -1, 1, _LANES).astype(jnp.int32)
    rows = jnp.where(mine, blocks, 0).astype(jnp.bfloat16)
    copies = (lane[:, None] % byte == lane // 8).astype(jnp.bfloat16)
    spread = lax.dot_general(
        rows, copies, (((3,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return spread.astype(jnp.int32).reshape(bits.shape[0], -1)
