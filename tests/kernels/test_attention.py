"""Attention over pages against a dense float64 oracle that shares no code with it, and proof that K/V stays in place.

One table of cases, for every implementation. In each the pages are shuffled, pages that no row lists hold NaN, and
what a row lists but must not see (page 0, slots past its last key) holds huge numbers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from tests.tiny_model import tiny_config

from onechip.cache.pages import PageTable, PoolShape
from onechip.engine.buckets import Bucket, BucketTable
from onechip.engine.hlo import large_moves
from onechip.engine.runner import DeviceRunner, Shapes
from onechip.errors import ConfigError
from onechip.kernels import attention_tpu, write_tpu
from onechip.kernels.attention import (
    IMPLEMENTATIONS,
    KV,
    Blocks,
    Ragged,
    Work,
    attend,
    attention_bytes,
    choose,
    plan,
    storage_dtype,
    write,
)
from onechip.model.load import random_params
from onechip.model.spec import model_config

HUGE = 6e4  # finite in float16 too
# Of a pool, and of a row's table: the same for all cases, so that they share programs.
PAGES, COLUMNS = 160, 64
# Of kernels in interpret mode: small, so that few queries and keys make many blocks.
SMALL = Blocks(decode_keys=64, tile_queries=8, tile_keys=32)


@dataclass(frozen=True)
class Case:
    """`rows`: (query tokens, keys) of each row, rows of one token first. `mixed`: in a mixed bucket all the same."""

    name: str
    rows: tuple[tuple[int, int], ...]
    window: int | None = None
    page: int = 16
    heads: tuple[int, int, int] = (4, 2, 16)  # N, K, H
    mixed: bool = False

    @property
    def scale(self) -> float:
        return self.heads[2] ** -0.5

    @property
    def bucket(self) -> tuple[int, int]:
        """Two buckets for all cases, so that they share programs; decode has a token a row."""
        decode = all(count <= 1 for count, _ in self.rows) and not self.mixed
        return (10, 10) if decode else (256, 10)


def ones(*keys: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, key) for key in keys)


CASES = [
    Case("decode", ones(1, 2, 40, 100), None),
    Case("decode, page edges", ones(15, 16, 17, 31, 32, 33, 63, 64, 65, 128)),
    Case("decode, page edges of 4", ones(3, 4, 5, 8, 63, 64, 65), page=4),
    Case("decode, one long beside many short", ones(1, 700, 2, 1, 3)),
    Case("decode, window 16", ones(14, 15, 16, 17, 18, 32, 33, 200), 16),
    Case("decode, window 16, pages of 4", ones(15, 16, 17, 19, 20, 21, 200), 16, page=4),
    Case("decode, window 512", ones(511, 512, 513, 1100), 512),
    Case("decode, padding rows", ones(5, 70), 16),
    Case("decode, empty rows between", ((1, 5), (0, 0), (1, 70), (0, 0)), 16),
    Case("decode, window 1", ones(1, 2, 40), 1),
    Case("decode in a mixed bucket", ones(5, 70, 9), None, mixed=True),
    Case("whole prompt", ((50, 50),)),
    Case("one more than a tile", ((65, 65),)),
    Case("second chunk", ((30, 100),)),
    Case("chunk of two, page edges of 4", ((2, 16), (2, 17), (2, 18), (2, 2)), page=4),
    Case("prompt across window 16", ((15, 15), (16, 16), (17, 17), (40, 40)), 16),
    Case("chunk behind window 16", ((3, 17), (20, 100), (150, 400)), 16, page=4),
    Case("prompt across window 512", ((30, 525),), 512),
    Case("singles beside long chunks", ((1, 9), (1, 300), (1, 1), (150, 150), (2, 90)), 16),
    Case(
        "singles beside long chunks, full",
        ((1, 9), (1, 300), (1, 1), (70, 200), (3, 3)),
    ),
    Case("everything padded", ((1, 20), (17, 17)), 16),
    Case("E2B sliding", ((1, 600), (1, 3), (20, 530)), 512, heads=(8, 1, 256)),
    Case("E2B full", ((1, 70), (20, 30)), heads=(8, 1, 512)),
    Case("E4B", ((1, 70), (20, 30)), heads=(8, 2, 256)),
    Case("12B", ((1, 70), (20, 30)), 16, heads=(16, 8, 256)),
    Case("31B full", ((1, 70), (20, 30)), heads=(32, 4, 512)),
    Case("K/V heads 16", ((1, 70), (20, 30)), heads=(16, 16, 16)),
    Case("K/V heads 3", ((1, 70), (20, 30)), heads=(9, 3, 32)),
    Case("270M", ((1, 70), (20, 30)), 16, heads=(4, 1, 256)),
]


@dataclass
class Problem:
    """Inputs of one case, and the same keys and values as plain arrays."""

    q: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    pools: tuple[np.ndarray, np.ndarray]
    rows: Ragged


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(x, dtype).astype(jnp.float32))


def problem(case: Case, dtype: str, stale: float = HUGE) -> Problem:
    """Random inputs, exact in `dtype`. `stale` fills the slots past a row's last key, in pages it owns."""
    rng = np.random.default_rng(len(case.name))
    (heads, kv_heads, dim), (tokens, slots), page = case.heads, case.bucket, case.page
    pages = [-(-keys // page) for _, keys in case.rows]
    physical = iter(rng.permutation(np.arange(1, PAGES)))
    pools = [np.full((kv_heads, PAGES, page, dim), np.nan, np.float32) for _ in range(2)]
    for pool in pools:
        pool[:, 0] = HUGE
    lists, firsts, contents = [], [], ([], [])
    for (count, keys), held in zip(case.rows, pages, strict=True):
        first = 0 if case.window is None else max(0, keys - count - case.window + 1) // page
        owned = [int(next(physical)) for _ in range(held - first)]
        for pool, content in zip(pools, contents, strict=True):
            content.append(rounded(rng.normal(size=(keys, kv_heads, dim)), dtype))
            for column, where in enumerate(owned, first):
                part = content[-1][column * page : (column + 1) * page]
                pool[:, where] = stale
                pool[:, where, : len(part)] = part.transpose(1, 0, 2)
        lists.append(owned)
        firsts.append(first)
    table = np.zeros((slots, COLUMNS), np.int32)
    for index, owned in enumerate(lists):
        table[index, : len(owned)] = owned
    lengths = np.zeros((4, slots), np.int32)
    lengths[1, : len(case.rows)] = [count for count, _ in case.rows]
    lengths[2, : len(case.rows)] = [keys for _, keys in case.rows]
    lengths[3, : len(case.rows)] = firsts
    lengths[0] = np.cumsum(lengths[1]) - lengths[1]
    if tokens == slots:
        lengths[0] = np.arange(slots)
    singles = next((i for i, (n, _) in enumerate(case.rows) if n > 1), len(case.rows))
    rows = Ragged(
        *map(jnp.asarray, lengths[:3]),
        jnp.asarray(table),
        jnp.asarray(lengths[3]),
        jnp.int32(singles),
    )
    q = rounded(rng.normal(size=(tokens, heads, dim)), dtype)
    return Problem(q, contents[0], contents[1], (pools[0], pools[1]), rows)


def stored(pool: np.ndarray, dtype: str, storage: str) -> jax.Array:
    values = jnp.asarray(pool, dtype)
    return values if storage == dtype else jax.lax.bitcast_convert_type(values, storage)


def oracle(case: Case, given: Problem) -> Iterator[tuple[int, np.ndarray]]:
    """(packed index, output [N, H]) of every real query, one softmax at a time, in float64."""
    heads, kv_heads, _ = case.heads
    for row, (count, length) in enumerate(case.rows):
        for index in range(count):
            position = length - count + index
            low = 0 if case.window is None else max(0, position - case.window + 1)
            token = int(given.rows.q_start[row]) + index
            out = []
            for head in range(heads):
                kv = head * kv_heads // heads
                keys = given.keys[row][low : position + 1, kv].astype(np.float64)
                score = case.scale * (keys @ given.q[token, head].astype(np.float64))
                weight = np.exp(score - score.max())
                out.append(weight @ given.values[row][low : position + 1, kv] / weight.sum())
            yield token, np.stack(out)


def run(case: Case, given: Problem, dtype: str, storage: str, implementation: str) -> np.ndarray:
    """The op on a pool that it shares with another layer, whose pages lie before its own and hold NaN."""
    shared = [behind_other_pages(pool, np.nan) for pool in given.pools]
    kv, offset = KV(*(stored(pool, dtype, storage) for pool in shared), dtype), jnp.int32(BEFORE)
    static = (case.page, case.window, case.scale, implementation)
    return np.asarray(compute(given.q, kv, given.rows, offset, *static))


def behind_other_pages(pool: np.ndarray, value: float) -> np.ndarray:
    return np.concatenate([np.full_like(pool[:, :BEFORE], value), pool], axis=1)


# Interpreted kernels are large programs, and every one runs once: optimising them would cost more than it saves.
_CHEAPLY = {"xla_backend_optimization_level": 0}


@partial(jax.jit, static_argnums=(4, 5, 6, 7), compiler_options=_CHEAPLY)
def compute(
    q: jax.Array,
    kv: KV,
    rows: Ragged,
    offset: jax.Array,
    page: int,
    window: int | None,
    scale: float,
    implementation: str,
) -> jax.Array:
    blocks = Blocks() if implementation == "plain" else SMALL
    work = plan(rows, q.shape[0], page, window, blocks=blocks)
    kernel = implementation != "plain"
    told = {"implementation": implementation, "interpret": kernel}
    return attend(q, kv, work, scale=scale, offset=offset, **told)


def check(case: Case, dtype: str, storage: str, implementation: str, stale: float = HUGE) -> None:
    given = problem(case, dtype, stale)
    found = run(case, given, dtype, storage, implementation)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert found.dtype == np.float32 and found.shape == given.q.shape
    for token, expected in oracle(case, given):
        np.testing.assert_allclose(found[token], expected, atol=tolerance, err_msg=f"token {token}")


BEFORE = 2  # pages of another layer

# Kernels in interpret mode compile for seconds a program: these cases share two, the others are slow.
QUICK = (
    "decode in a mixed bucket",
    "one more than a tile",
    "second chunk",
    "chunk behind window 16",
    "singles beside long chunks, full",
)
KERNELS = tuple(each for each in IMPLEMENTATIONS if each != "plain")


def named(*names: str) -> list[Case]:
    found = [case for case in CASES if case.name in names]
    assert len(found) == len(names)
    return found


def table(cases: list[Case]) -> list[Any]:
    """Every case with every implementation."""
    return [
        pytest.param(case, each, id=f"{case.name}-{each}", marks=_slow(case, each))
        for case in cases
        for each in IMPLEMENTATIONS
    ]


def _slow(case: Case, implementation: str) -> list[Any]:
    return [] if implementation == "plain" or case.name in QUICK else [pytest.mark.slow]


@pytest.mark.parametrize(("case", "implementation"), table(CASES))
def test_attention_is_the_dense_formula(case: Case, implementation: str):
    check(case, "float32", "float32", implementation)


@pytest.mark.parametrize(
    ("dtype", "storage"),
    [
        ("bfloat16", "uint16"),
        ("float16", "uint16"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
    ],
)
@pytest.mark.parametrize(
    "case", named("decode", "singles beside long chunks, full"), ids=lambda case: case.name
)
def test_half_precision_pages_give_the_same_in_either_storage(case: Case, dtype: str, storage: str):
    check(case, dtype, storage, "plain")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", KERNELS)
def test_kernels_read_half_precision_pages(implementation: str):
    case = named("singles beside long chunks, full")[0]
    check(case, "bfloat16", "bfloat16", implementation)


@pytest.mark.parametrize(
    ("case", "implementation"),
    table(named("decode", "second chunk", "chunk behind window 16", "decode, window 16")),
)
def test_what_a_broken_request_left_in_a_page_does_not_matter(case: Case, implementation: str):
    """NaN times a probability of zero is NaN: values that nobody may see must not meet the matmul."""
    check(case, "float32", "float32", implementation, stale=math.nan)


@pytest.mark.parametrize(
    ("rows", "implementation"),
    [
        (ones(9, 9, 70), "plain"),
        *((((1, 9), (1, 70), (20, 30)), each) for each in IMPLEMENTATIONS),
    ],
)
def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(rows: Any, implementation: str):
    case = Case("a neighbour of NaN", rows)
    given = problem(case, "float32")
    bad = int(given.rows.table[1, 0])
    for pool in given.pools:
        pool[:, bad] = np.nan
    found = run(case, given, "float32", "float32", implementation)
    for token, expected in oracle(case, given):
        if token == 1:
            assert np.isnan(found[token]).all()
        else:
            np.testing.assert_allclose(found[token], expected, atol=1e-5)


def test_an_implementation_that_does_not_exist_is_refused():
    case = CASES[0]
    with pytest.raises(ConfigError, match="'fast' does not exist"):
        run(case, problem(case, "float32"), "float32", "float32", "fast")
    with pytest.raises(ConfigError, match="'fast' does not exist"):
        chosen("fast", "tpu")


def chosen(name: str, platform: str, **changes: Any) -> str:
    given = {"page_size": 64, "head_dims": [256, 512], "kv_dtype": "bfloat16", "capability": 9.0}
    return choose(name, platform, **(given | changes))


def test_every_platform_gets_its_kernels_unless_they_cannot_run():
    assert chosen("auto", "cpu") == "plain"
    assert chosen("auto", "tpu") == "pallas_tpu"
    assert chosen("auto", "gpu") == "pallas_triton"
    assert chosen("plain", "tpu") == "plain"
    assert chosen("auto", "gpu", capability=7.5) == "plain"
    assert chosen("auto", "tpu", head_dims=[192]) == "plain"


@pytest.mark.parametrize(
    ("name", "platform", "changes", "why"),
    [
        ("pallas_tpu", "cpu", {}, "needs a TPU, the device is a cpu"),
        ("pallas_triton", "tpu", {}, "needs a GPU, the device is a tpu"),
        ("pallas_tpu", "tpu", {"page_size": 8}, "multiple of 16 tokens, page_size is 8"),
        ("pallas_tpu", "tpu", {"head_dims": [256, 192]}, "multiples of 128, the model has 192"),
        ("pallas_tpu", "tpu", {"kv_dtype": "float16"}, "not float16"),
        ("pallas_triton", "gpu", {"head_dims": [192]}, "powers of two, the model has 192"),
        ("pallas_triton", "gpu", {"page_size": 8}, "at least 16 tokens, page_size is 8"),
        ("pallas_triton", "gpu", {"capability": 7.5}, "capability 8.0, the device has 7.5"),
    ],
)
def test_a_named_kernel_is_obeyed_or_refused_with_the_reason(
    name: str, platform: str, changes: Any, why: str
):
    with pytest.raises(ConfigError, match=why):
        chosen(name, platform, **changes)


def test_exact_rounding_is_refused_by_a_kernel():
    given = problem(CASES[0], "float32")
    kv = KV(*(stored(pool, "float32", "float32") for pool in given.pools), "float32")
    work = plan(given.rows, given.q.shape[0], 16, None, exact=True)
    with pytest.raises(ConfigError, match="no exact rounding"):
        attend(jnp.asarray(given.q), kv, work, scale=1.0, implementation="pallas_tpu")


def test_the_least_bytes_are_the_visible_keys():
    size = {"kv_heads": 1, "head_dim": 256, "itemsize": 2}
    assert attention_bytes([(1, 8192)], window=None, **size) == 8192 * 1024
    assert attention_bytes([(1, 8192), (1, 100)], window=512, **size) == (512 + 100) * 1024
    assert attention_bytes([(512, 8192)], window=512, **size) == (512 + 511) * 1024
    assert attention_bytes([(1, 8200)], window=512, page_size=64, **size) == 9 * 64 * 1024
    assert attention_bytes([(0, 70)], window=None, **size) == 0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [
        (8, 1, 256, 512), (8, 1, 512, None), (8, 2, 256, 512), (8, 2, 512, None), (16, 8, 256, 1024),
        (16, 1, 512, None), (16, 2, 512, None), (32, 16, 256, 1024), (32, 4, 512, None), (4, 1, 256, 512),
    ],
)  # fmt: skip
@pytest.mark.parametrize("page", [16, 64, 128])
def test_tpu_blocks_are_whole_pages_and_share_the_scoped_memory(
    heads: int, kv_heads: int, head_dim: int, window: int | None, page: int
):
    split = attention_tpu.heads_of(heads, kv_heads)
    blocks = attention_tpu.blocks_for(heads, kv_heads, head_dim, 2, page, window)
    assert split.blocks * split.kv == kv_heads and split.queries == split.kv * split.group
    assert split.queries % 4 == 0 and split.queries <= 16
    assert blocks.decode_keys % page == 0 and blocks.tile_keys % page == 0
    buffers = 2 * 2 * 2 * blocks.decode_keys * split.kv * head_dim * 2
    assert buffers <= 6 << 20


@pytest.mark.parametrize("kv_heads", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_the_tpu_kernel_writes_its_slots_and_nothing_else(kv_heads: int):
    """Single tokens, a chunk that begins inside a group of rows and crosses pages, and padding."""
    rng = np.random.default_rng(0)
    page = [3, 4] + [7] * 12 + [2] * 32 + [9] * 4 + [0] * 6
    slot = [5, 31, *range(20, 32), *range(32), *range(4), *[0] * 6]
    pools = [rng.normal(size=(kv_heads, 20, 32, 16)).astype(np.float32) for _ in range(2)]
    new = [rng.normal(size=(len(page), kv_heads, 16)).astype(np.float32) for _ in range(2)]
    kv = KV(jnp.asarray(pools[0]), jnp.asarray(pools[1]), "float32")
    where = (jnp.array(page), jnp.array(slot))
    for offset in (0, 7):
        found = write_tpu.write(kv, *map(jnp.asarray, new), *where, offset, interpret=True)
        for pool, given, got in zip(pools, new, (found.k, found.v), strict=True):
            expected = pool.copy()
            expected[:, np.array(page) + offset, slot] = given.transpose(1, 0, 2)
            expected[:, offset] = pool[:, offset]
            np.testing.assert_array_equal(got, expected)


def test_decode_reads_no_more_blocks_than_the_rows_need():
    """64 keys an item: a row of 10 keys costs one beside a row of 1,000, and a window costs its own length."""
    rows = problem(Case("full", ((1, 10), (1, 1000), (1, 64), (1, 65), (0, 0))), "float32").rows
    assert item_count(plan(rows, 10, 16, None)) == 1 + 16 + 1 + 2
    assert item_count(plan(rows, 10, 16, 100)) == 1 + 2 + 1 + 2


def test_a_chunk_gets_the_tiles_its_queries_need():
    case = Case("chunks", ((1, 10), (1, 1), (64, 64), (65, 900)))
    work = plan(problem(case, "float32").rows, 256, 16, None)
    assert work.tiles is not None
    assert (item_count(work), int(work.tiles.count)) == (2, 1 + 2)


def item_count(work: Work) -> int:
    assert work.items is not None
    return int(work.items.count)


def shapes_in(jaxpr: Jaxpr) -> Iterator[tuple[int, ...]]:
    """The shape of every intermediate, loop bodies included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval.shape
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if isinstance(inner, ClosedJaxpr):
                    yield from shapes_in(inner.jaxpr)
                elif isinstance(inner, Jaxpr):
                    yield from shapes_in(inner)


@pytest.mark.parametrize("tokens", [8, 96])
def test_nothing_is_as_wide_as_the_context(tokens: int):
    context, rows, page = 8192, 8, 16
    zeros = jnp.zeros(rows, jnp.int32)
    table = jnp.zeros((rows, context // page), jnp.int32)
    ragged = Ragged(zeros, zeros, zeros, table, zeros, jnp.int32(0))
    pool = jax.ShapeDtypeStruct((2, 1031, page, 16), jnp.float32)

    def compute(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, KV(k, v, "float32"), plan(ragged, tokens, page, None), scale=1.0)

    traced = jax.make_jaxpr(compute)(jax.ShapeDtypeStruct((tokens, 4, 16), jnp.float32), pool, pool)
    shapes = list(shapes_in(traced.jaxpr))
    assert len(shapes) > 100
    assert max(max(shape, default=0) for shape in shapes) < context / 4
    assert max(math.prod(shape) for shape in shapes) < tokens * context


# K/V stays where it is.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_new_keys_land_in_their_slots_and_the_pool_is_the_same_memory(dtype: str):
    storage = storage_dtype(dtype, "cpu")
    pools = [jnp.zeros((2, 50, 16, 8), storage) for _ in range(2)]
    kv = KV(pools[0], pools[1], dtype)
    rng = np.random.default_rng(0)
    k, v = (rounded(rng.normal(size=(5, 2, 8)), dtype) for _ in range(2))
    page, slot = jnp.array([3, 3, 7, 0, 49]), jnp.array([0, 15, 2, 0, 4])
    compiled = jax.jit(write, donate_argnums=0).lower(kv, k, v, page, slot).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * pools[0].nbytes
    where = [kv.k.unsafe_buffer_pointer(), kv.v.unsafe_buffer_pointer()]
    new = compiled(kv, k, v, page, slot)
    assert [new.k.unsafe_buffer_pointer(), new.v.unsafe_buffer_pointer()] == where
    for pool, given in ((new.k, k), (new.v, v)):
        values = (
            pool if pool.dtype == jnp.dtype(dtype) else jax.lax.bitcast_convert_type(pool, dtype)
        )
        found = np.array(values.astype(jnp.float32))
        np.testing.assert_array_equal(found[:, page, slot].transpose(1, 0, 2), given)
        found[:, page, slot] = 0
        assert not found.any()


POOL = 4096  # pages: large beside everything else in the tiny model


@pytest.mark.parametrize(
    ("dtype", "bucket"),
    [("float32", Bucket(4, 4)), ("bfloat16", Bucket(4, 4)), ("bfloat16", Bucket(32, 4))],
    ids=str,
)
def test_a_step_neither_copies_nor_converts_a_pool(dtype: Any, bucket: Bucket):
    config = model_config(tiny_config())
    window = config.window
    pages = PageTable(16, {"full": PoolShape(POOL, None), "sliding": PoolShape(POOL, window)})
    counts = {kind: shape.pages for kind, shape in pages.shapes.items()}
    shapes = Shapes(config, dtype, dtype, 16, 4, 8, 4, "auto", counts)
    here = jax.local_devices()[0]
    params = random_params(config, dtype, here)
    runner = DeviceRunner(shapes, BucketTable((bucket,), 32), params, pages, here)
    pools = [pool for kv in runner.caches for pool in (kv.k, kv.v)]
    program = runner.programs.lower(bucket).compile()
    memory = program.memory_analysis()
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.state))
    assert memory.alias_size_in_bytes == sum(pool.nbytes for pool in pools) + state
    smallest = min(pool.size for pool in pools)
    assert memory.temp_size_in_bytes < smallest * pools[0].dtype.itemsize
    # Elements, not bytes: no narrower copy of a pool is let through.
    assert large_moves(program.as_text(), smallest) == []
    where = [pool.unsafe_buffer_pointer() for pool in pools]
    vector, fields = shapes.layout(bucket).pack()
    fields["slot"][:] = 4
    caches, _, _ = program(runner.params, runner.caches, runner.state, vector)
    assert [pool.unsafe_buffer_pointer() for kv in caches for pool in (kv.k, kv.v)] == where


def test_page_zero_may_hold_anything_finite_and_takes_what_padding_writes():
    """Padding rows list page 0 and write to it; real rows must not notice."""
    case = Case("padding", ones(5, 70), None)
    given = problem(case, "float32")
    first = run(case, given, "float32", "float32", "auto")
    for pool in given.pools:
        pool[:, 0] = -3.0
    second = run(case, given, "float32", "float32", "auto")
    np.testing.assert_array_equal(first[:2], second[:2])
