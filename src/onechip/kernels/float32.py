"""The reference's float32 arithmetic, rounding for rounding: what float32 mode computes instead of JAX's own functions.

A Gemma 4 with random weights multiplies a rounding error by up to 10^5: the reference run in float64 is 0.011 away from
its own float32 logits (gemma4-e4b-mini), and one differently rounded cosine in seventy moves them by 0.003. So "within
0.001 of the reference" can't be had by being more exact, only by rounding where the reference (PyTorch on an x86 CPU)
rounds. This costs nothing in half precision, which never comes here.

Three things differ from the obvious formula. Sums are added in the reference's order (lanes of a vector register, then
across). A product that is then added is rounded first: LLVM would fuse the two (`rounded`). And exp, tanh, cos and sin
are the reference's polynomials (SLEEF's exp and tanh, MKL's sine), evaluated so that each step rounds as theirs does.
XLA's matmuls need only padding (`matmul`).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_F32 = np.float32
_LARGEST = np.finfo(np.float32).max
# ln 2 in two floats, as SLEEF splits it.
_LN2_HIGH, _LN2_LOW = _F32(0.693145751953125), _F32(1.428606765330187e-06)
_LOG2_E = _F32(1.4426950408889634)
# SLEEF's expf and expk2f, highest power first.
_EXP = (0.00019852762, 0.0013930436, 0.008333361, 0.041666485, 0.16666667, 0.5)
_TANH_EXP = (0.1980960224e-3, 0.1394256484e-2, 0.8333456703e-2, 0.4166637361e-1)
_TANH_EXP_CUBIC = float(_F32(0.16666665941423424))
_TANH_IS_ONE = _F32(8.664339742)
# MKL's sine on [-pi/2, pi/2], x + x^3 (...) in float64, lowest power first. Not published: fitted to the rounding
# bounds of three million of its results, all of which it gives.
_SINE = (-0.16666659550423232, 0.00833306624621626, -0.00019809602923986949, 2.605780703859131e-06)
_GELU_SLOPE = _F32(math.sqrt(2.0 / math.pi))
_GELU_CUBIC = _F32(0.044715)


def rounded(x: Array) -> Array:
    """x, which then counts as rounded: no compiler folds the product behind it into a fused multiply-add.

    A minimum with the largest float changes no finite value. An optimization barrier is gone before XLA's CPU
    compiler fuses, and so is a `reduce_precision` to float32.
    """
    return jnp.minimum(x, _LARGEST)


def matmul(x: Array, weight: Array) -> Array:
    """x [T, D] times weight [out, D], added up alike whatever T.

    MKL makes each element one chain of fused multiply-adds along D, and so does XLA's CPU matmul from three rows and
    for a multiple of 16 columns. For fewer columns than that MKL has four chains, of products rounded first.
    """
    rows, columns = x.shape[0], weight.shape[0]
    if columns < 16 and x.shape[1] % 4 == 0:
        products = rounded(x[:, None] * weight)
        chains = products[..., :4]
        for start in range(4, x.shape[1], 4):
            chains = chains + products[..., start : start + 4]
        return (chains[..., 0] + chains[..., 2]) + (chains[..., 1] + chains[..., 3])
    if rows < 4:
        x = jnp.pad(x, ((0, 4 - rows), (0, 0)))
    if columns % 16:
        weight = jnp.pad(weight, ((0, -columns % 16), (0, 0)))
    axes = (((1,), (1,)), ((), ()))
    product = lax.optimization_barrier(  # or the padding would be optimised away
        lax.dot_general(
            x, weight, axes, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
    )
    return product[:rows, :columns]


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) times the weight, over the last axis."""
    size = x.shape[-1]
    squares = rounded(x * x)
    total = _register_sum(squares) if size % 8 == 0 else squares.sum(-1, keepdims=True)
    # Rounded, or XLA would make 1 / sqrt an rsqrt, which is an approximation.
    root = rounded(jnp.sqrt(total / _F32(size) + _F32(eps)))
    normed = rounded(x * (_F32(1) / root))
    return normed if weight is None else rounded(normed * weight)


def softmax_parts(score: Array, seen: Array) -> tuple[Array, Array, Array]:
    """(probabilities, largest score, sum of exponentials) of score [..., S] over the keys seen; S a multiple of 16."""
    most = score.max(-1)
    share = jnp.where(seen, exp(score - most[..., None]), 0)
    lanes = share[..., :16]  # added one by one: XLA sums a minor axis in an order of its own
    for start in range(16, share.shape[-1], 16):
        lanes = lanes + share[..., start : start + 16]
    while lanes.shape[-1] > 1:
        low, high = jnp.split(lanes, 2, axis=-1)
        lanes = low + high
    reciprocal = rounded(_F32(1) / jnp.where(lanes == 0, 1, lanes))
    return rounded(share * reciprocal), most, lanes[..., 0]


def exp(x: Array) -> Array:
    """exp of x <= 0; 0 where the result would be subnormal."""
    with jax.enable_x64(True):
        inside = jnp.maximum(x, _F32(-88))
        power = jnp.round(rounded(inside * _LOG2_E))
        rest = _fma(power, -_LN2_LOW, _fma(power, -_LN2_HIGH, inside))
        series = _horner(rest, _EXP)
        value = _F32(1) + _fma(rounded(rest * rest), series, rest)
        return jnp.where(x < _F32(-87), _F32(0), rounded(value) * _two_to(power))


def gelu(x: Array) -> Array:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    with jax.enable_x64(True):
        cube = rounded(rounded(x * x) * x)
        bent = rounded(_GELU_SLOPE * _fma(cube, _GELU_CUBIC, x))
        return rounded(_F32(0.5) * x) * rounded(_F32(1) + _tanh(bent))


def cos_sin(turn: Array) -> tuple[Array, Array]:
    """(cos, sin) of angles in float32 radians."""
    with jax.enable_x64(True):
        wide = turn.astype(jnp.float64)
        half_turns = jnp.round(wide / math.pi)
        sine = _sine(wide - half_turns * math.pi, half_turns)
        half_turns = jnp.round(wide / math.pi + 0.5)
        return _sine(wide - (half_turns - 0.5) * math.pi, half_turns), sine


def _sine(x: Array, half_turns: Array) -> Array:
    square = x * x
    series = x + x * square * _series(square, _SINE[::-1])
    return jnp.where(jnp.mod(half_turns, 2) == 0, series, -series).astype(jnp.float32)


def _tanh(x: Array) -> Array:
    """SLEEF's tanh is (e - 1/e) / (e + 1/e) in pairs of floats; float64 stands for the pairs."""
    size = jnp.abs(x)
    power = jnp.round(rounded(size * _LOG2_E))
    wide_power = power.astype(jnp.float64)
    rest = size.astype(jnp.float64) - wide_power * float(_LN2_HIGH)
    rest = rest - rounded(power * _LN2_LOW).astype(jnp.float64)
    series = _horner(rest.astype(jnp.float32), _TANH_EXP).astype(jnp.float64)
    series = (rest * series + _TANH_EXP_CUBIC) * rest + 0.5
    e = (1 + (rest + rest * rest * series)) * _two_to(jnp.minimum(power, 20)).astype(jnp.float64)
    value = ((e - 1 / e) / (e + 1 / e)).astype(jnp.float32)
    return jnp.sign(x) * jnp.where(size > _TANH_IS_ONE, _F32(1), value)


def _fma(a: Array, b: Any, c: Any) -> Array:
    """a b + c rounded once (a product of two floats is exact in float64)."""
    wide: Callable[[Any], Array] = lambda x: jnp.asarray(x).astype(jnp.float64)  # noqa: E731
    return (wide(a) * wide(b) + wide(c)).astype(jnp.float32)


def _horner(x: Array, coefficients: tuple[float, ...]) -> Array:
    value: Any = jnp.full_like(x, _F32(coefficients[0]))
    for coefficient in coefficients[1:]:
        value = _fma(value, x, _F32(coefficient))
    return value


def _series(x: Array, coefficients: tuple[float, ...]) -> Array:
    value: Any = coefficients[0]
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def _two_to(power: Array) -> Array:
    bits = (power.astype(jnp.int32) + 127) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)


def _register_sum(x: Array) -> Array:
    """Sum of the last axis as a vector unit of 8 lanes with 4 registers in flight adds it, keeping the axis."""
    rows = x.reshape(*x.shape[:-1], -1, 8)
    whole = rows.shape[-2] // 4
    registers = rows[..., : whole * 4, :].reshape(*x.shape[:-1], whole, 4, 8).sum(-3)
    lanes = registers[..., 0, :]
    for i in range(whole * 4, rows.shape[-2]):
        lanes = lanes + rows[..., i, :]
    for i in range(1, 4):
        lanes = lanes + registers[..., i, :]
    total = lanes[..., 0]
    for i in range(1, 8):
        total = total + lanes[..., i]
    return total[..., None]
