"""Grouped matmul: all implementations are a plain loop over the groups, whatever the groups' sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onechip.errors import ConfigError
from onechip.kernels.grouped_matmul import IMPLEMENTATIONS, choose, grouped_matmul

SIZES = {
    "one row each": [1] * 8,
    "all in the first": [40, 0, 0, 0],
    "all in the last": [0, 0, 0, 40],
    "empty groups between": [0, 3, 0, 0, 17, 1, 0],
    "tile edges": [15, 16, 17, 31, 32, 33],
    "one group": [5],
    "nothing": [0, 0, 0],
}


def compute(sizes: list[int], dtype: str, implementation: str, rows: int | None = None) -> None:
    rng = np.random.default_rng(0)
    total = sum(sizes) if rows is None else rows
    x = jnp.asarray(rng.normal(size=(total, 24)), dtype)
    weights = jnp.asarray(rng.normal(size=(len(sizes), 10, 24)), dtype)
    run = jax.jit(grouped_matmul, static_argnames=("implementation", "interpret"))
    told = {"implementation": implementation, "interpret": implementation == "pallas_triton"}
    found = run(x, weights, jnp.array(sizes, jnp.int32), **told)
    assert (found.dtype, found.shape) == (jnp.float32, (total, 10))
    groups = np.repeat(np.arange(len(sizes)), sizes)
    wide_x, wide_w = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, weights))
    expected = np.einsum("md,mfd->mf", wide_x[: len(groups)], wide_w[groups])
    np.testing.assert_allclose(
        found[: len(groups)], expected, atol=1e-5 if dtype == "float32" else 1e-4
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_row_meets_its_groups_weights(sizes: list[int], dtype: str, implementation: str):
    if not sum(sizes):
        assert grouped_matmul(
            jnp.zeros((0, 24)),
            jnp.zeros((3, 10, 24)),
            jnp.zeros(3, jnp.int32),
            implementation=implementation,
        ).shape == (0, 10)
        return
    compute(sizes, dtype, implementation)


@given(st.lists(st.integers(0, 40), min_size=5, max_size=5).filter(any))
@settings(max_examples=25, deadline=None)
def test_the_implementations_agree_on_any_sizes(sizes: list[int]):
    # Rows past the groups' sum pad all examples to one shape, so that one program serves them all.
    for implementation in IMPLEMENTATIONS:
        compute(sizes, "float32", implementation, rows=200)


@pytest.mark.parametrize("implementation", ["loop", "pallas_triton"])
def test_weights_of_groups_without_rows_are_not_read(implementation: str):
    """At decode most experts have no token: what they hold (here NaN) must not matter."""
    weights = jnp.full((4, 10, 24), jnp.nan).at[2].set(1.0)
    sizes = jnp.array([0, 0, 20, 0])
    out = grouped_matmul(
        jnp.ones((20, 24)), weights, sizes, implementation=implementation, interpret=True
    )
    np.testing.assert_array_equal(out, 24.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_adds_up_several_blocks_with_tails(dtype: str):
    """200 values a row are three steps of a sum and a tail, 150 columns two blocks and a tail."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(120, 200)), dtype)
    weights = jnp.asarray(rng.normal(size=(3, 150, 200)), dtype)
    sizes = jnp.array([70, 0, 50], jnp.int32)
    found = grouped_matmul(x, weights, sizes, implementation="pallas_triton", interpret=True)
    wide_x, wide_w = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, weights))
    expected = np.concatenate([wide_x[:70] @ wide_w[0].T, wide_x[70:] @ wide_w[2].T])
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_gpu_gets_its_kernel_unless_it_is_too_old():
    assert choose("gpu", 9.0) == choose("gpu") == "pallas_triton"
    assert choose("gpu", 7.5) == "ragged"
    assert choose("tpu") == "ragged"
    assert choose("cpu") == "loop"


def test_an_implementation_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="'dense' does not exist"):
        grouped_matmul(
            jnp.ones((1, 2)), jnp.ones((1, 2, 2)), jnp.ones(1, jnp.int32), implementation="dense"
        )
