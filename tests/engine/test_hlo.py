"""What is read from jaxprs and HLO is what is there."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from onechip.engine.hlo import large_moves, launches, matmul_flops
from onechip.kernels.grouped_matmul import grouped_matmul


def test_matmul_flops_are_two_a_multiply_add_and_batches_multiply():
    def f(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum("bij,bjk->bik", (x @ w)[None].repeat(3, 0), b)

    shapes = ((8, 16), (16, 32), (3, 32, 4))
    jaxpr = jax.make_jaxpr(f)(*(jnp.zeros(shape) for shape in shapes))
    assert matmul_flops(jaxpr) == 2 * 8 * 16 * 32 + 3 * 2 * 8 * 32 * 4


def test_matmul_flops_look_into_calls_loops_and_the_dearest_branch():
    def f(x: jax.Array) -> jax.Array:
        x = jax.jit(lambda y: y @ y)(x)
        x = jax.lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y @ y, x)
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x)

    assert matmul_flops(jax.make_jaxpr(f)(jnp.zeros((4, 4)))) == 4 * 2 * 4**3


def test_a_scans_body_counts_as_often_as_it_runs():
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda y, _: (y @ y, None), x, None, length=5)[0]

    assert matmul_flops(jax.make_jaxpr(f)(jnp.zeros((4, 4)))) == 5 * 2 * 4**3


@pytest.mark.parametrize("implementation", ["ragged", "pallas_triton"])
def test_a_grouped_matmul_counts_each_row_once(implementation: str):
    run = partial(grouped_matmul, implementation=implementation)
    sizes = jnp.array([1, 2, 3, 4])
    jaxpr = jax.make_jaxpr(run)(jnp.zeros((10, 6)), jnp.zeros((4, 3, 6)), sizes)
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


def test_launches_count_what_runs_and_a_loops_body_as_often():
    def once(x: jax.Array) -> jax.Array:
        return jnp.sin(x @ x)

    def often(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 100, lambda i, y: once(y), x)

    def unknown(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y[0, 0] < 1, once, x)

    alone, loop, some = (
        launches(jax.jit(f).lower(jnp.zeros((64, 64))).compile().as_text())
        for f in (once, often, unknown)
    )
    assert 1 <= alone < 10
    assert 100 * alone <= loop < 100 * (alone + 10)
    assert alone <= some < 20
    assert launches("nothing here") == 0


# As libtpu writes it: no trip count, but a condition that compares the index with a constant.
LOOP = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %a = f32[8]{0} fusion(%p), kind=kLoop, calls=%c
  ROOT %t = (s32[], f32[8]) tuple(%p, %a)
}

%cond (p: (s32[], f32[8])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(35)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%i, %constant.1), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %while.1 = (s32[]{:T(128)}, f32[8]{0}) while(%tuple.1), condition=%cond, body=%body
  ROOT %r = f32[8]{0} fusion(%while.1), kind=kLoop, calls=%d
}
"""


def test_a_tpus_loops_are_counted_by_their_conditions():
    assert launches(LOOP) == 36
    assert launches(LOOP.replace("constant(35)", "parameter(1)")) == 2
