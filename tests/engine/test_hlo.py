"""What is read from jaxprs and HLO is what is there."""

import jax
import jax.numpy as jnp
import pytest

from onechip.engine.hlo import large_moves, launches, matmul_flops


def test_matmul_flops_are_two_a_multiply_add_and_batches_multiply():
    def f(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum("bij,bjk->bik", (x @ w)[None].repeat(3, 0), b)

    shapes = ((8, 16), (16, 32), (3, 32, 4))
    jaxpr = jax.make_jaxpr(f)(*(jnp.zeros(shape) for shape in shapes))
    assert matmul_flops(jaxpr) == 2 * 8 * 16 * 32 + 3 * 2 * 8 * 32 * 4


def test_matmul_flops_look_into_calls_loops_and_the_dearest_branch():
    def f(x: jax.Array) -> jax.Array:
        x = jax.jit(lambda y: y @ y)(x)
        x = jax.lax.fori_loop(0, 5, lambda _, y: y @ y, x)
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x)

    assert matmul_flops(jax.make_jaxpr(f)(jnp.zeros((4, 4)))) == 4 * 2 * 4**3


def test_a_grouped_matmul_counts_each_row_once():
    def f(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, w, sizes)

    jaxpr = jax.make_jaxpr(f)(jnp.zeros((10, 6)), jnp.zeros((4, 6, 3)), jnp.array([1, 2, 3, 4]))
    assert matmul_flops(jaxpr) == 2 * 10 * 6 * 3


def test_large_moves_are_found_by_size_and_by_shape():
    x = jnp.zeros((64, 128))
    text = jax.jit(lambda x: (x.T.astype(jnp.bfloat16), x + 1)).lower(x).compile().as_text()
    assert large_moves(text, 64 * 128 * 2) != []
    assert large_moves(text, 64 * 128 * 4 + 1) == []
    assert large_moves(text, 1 << 40, ((1, 64, 128),)) != []
    assert large_moves(text, 1 << 40, ((64, 127),)) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("  %copy.1 = bf16[4,8]{1,0} copy(%p)", True),
        ("  ROOT %t = f32[4,8]{0,1:T(8,128)} transpose(%p), dimensions={1,0}", True),
        ("  %c = (bf16[4,8]{1,0}, u32[]) copy-start(%p)", True),
        ("  %c = bf16[4,8]{1,0} concatenate(%a, %b), dimensions={0}", True),
        ("  %a = bf16[4,8]{1,0} add(%p, %q)", False),
    ],
)
def test_moves_are_read_from_every_form_of_a_line(line: str, found: bool):
    assert bool(large_moves(line, 64)) == found


def test_launches_count_what_runs_and_a_loops_body_once():
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, x.shape[0], lambda i, y: y @ y, x)

    text = jax.jit(f).lower(jnp.zeros((64, 64))).compile().as_text()
    assert 1 <= launches(text) < 20
    assert launches("nothing here") == 0
