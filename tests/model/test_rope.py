"""Angles are those of the formula as far as float32 can say, and rotation is the half-split one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onechip.config import Rope
from onechip.kernels import float32
from onechip.model.rope import angles, inverse_frequencies, rotate

POSITIONS = np.array([0, 1, 2, 511, 512, 65_537, 131_071])
ROPES = [
    (Rope(10_000.0), 256),
    (Rope(1_000_000.0, "proportional", partial=0.25), 512),
    (Rope(1_000_000.0, "linear", factor=8.0), 256),
    (Rope(1_000_000.0, "proportional", partial=0.25), 32),
]


def exact(rope: Rope, head_dim: int) -> np.ndarray:
    """float64 inverse frequencies, written out pair by pair."""
    found = []
    for pair in range(head_dim // 2):
        frequency = rope.theta ** (-2 * pair / head_dim) / rope.factor
        turns = pair < rope.partial * head_dim // 2
        found.append(frequency if turns else 0.0)
    return np.array(found)


def turns(rope: Rope, head_dim: int, position: Any) -> tuple[jax.Array, jax.Array]:
    turn = angles(rope, head_dim, jnp.asarray(position, jnp.int32))
    return jnp.cos(turn), jnp.sin(turn)


@pytest.mark.parametrize("of", [lambda turn: (jnp.cos(turn), jnp.sin(turn)), float32.cos_sin])
@pytest.mark.parametrize(("rope", "head_dim"), ROPES, ids=str)
def test_angles_are_within_float32_of_the_formula(rope: Rope, head_dim: int, of: Any):
    turn = angles(rope, head_dim, jnp.asarray(POSITIONS, jnp.int32))
    assert (turn.dtype, turn.shape) == (jnp.float32, (len(POSITIONS), 1, head_dim // 2))
    cos, sin = of(turn)
    expected = POSITIONS[:, None] * exact(rope, head_dim)
    # A frequency carries a rounding or two of its exponent (up to ln(theta)) and of itself; the angle one more.
    allowed = 1e-6 + expected * np.finfo(np.float32).eps * (1.5 + np.log(rope.theta))
    assert (np.abs(cos[:, 0] - np.cos(expected)) <= allowed).all()
    assert (np.abs(sin[:, 0] - np.sin(expected)) <= allowed).all()


def test_positions_are_not_rounded_to_half_precision():
    """bfloat16 can't tell 65,536 from 65,537, nor 131,071 from 131,072."""
    turn = angles(Rope(10_000.0), 64, jnp.array([65_536, 65_537, 131_071, 131_072]))
    np.testing.assert_array_equal(turn[[1, 3], 0, 0] - turn[[0, 2], 0, 0], 1.0)


def test_proportional_frequencies_are_over_the_whole_head_and_stop():
    found = inverse_frequencies(Rope(1_000_000.0, "proportional", partial=0.25), 512)
    assert (found[:64] > 0).all() and not found[64:].any()
    assert found[63] == pytest.approx(1_000_000.0 ** (-126 / 512), rel=1e-5)


def test_rotation_turns_dim_i_with_dim_i_plus_half():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, 8)).astype(np.float32)
    rope, position = Rope(100.0), jnp.array([0, 1, 37])
    found = np.asarray(rotate(jnp.asarray(x), turns(rope, 8, position)))
    for t, p in enumerate(position.tolist()):
        for pair in range(4):
            turned = (x[t, :, pair] + 1j * x[t, :, pair + 4]) * np.exp(
                1j * p * 100.0 ** (-2 * pair / 8)
            )
            np.testing.assert_allclose(found[t, :, pair], turned.real, atol=1e-5)
            np.testing.assert_allclose(found[t, :, pair + 4], turned.imag, atol=1e-5)
    np.testing.assert_array_equal(found[0], x[0])


def test_scores_depend_on_the_distance_only():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 64)), jnp.float32) for _ in range(2))
    rope = Rope(10_000.0)

    def score(at: int, back: int) -> float:
        turned = [rotate(x, turns(rope, 64, [p])) for x, p in ((q, at), (k, at - back))]
        return float((turned[0] * turned[1]).sum())

    assert score(1000, 7) == pytest.approx(score(7, 7), abs=1e-3)
    assert abs(score(1000, 7) - score(1000, 8)) > 1e-3
