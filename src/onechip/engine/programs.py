"""Every program an engine runs, lowered from shapes alone, for the device at hand or for a chip that is elsewhere.

1. `Shapes` are the static facts: model, dtypes, page tables' widths, pools' pages, the platform compiled for.
2. `lower` traces one program on abstract arrays: nothing is allocated, so a 31B model lowers on a laptop.
3. `Programs` holds the executables by name. `compile` makes all of them before the engine is ready; a program that a
   `BucketTable` does not list (offline scoring) is made when first used.

A program is a bucket of the table, a `Constrain` or one of `HELPERS`. Knows neither requests nor where an executable
came from.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onechip.config import LayerKind, ModelConfig
from onechip.engine import state as slots
from onechip.engine.batch import ROW_FIELDS, BatchLayout
from onechip.engine.buckets import Bucket, BucketTable
from onechip.engine.step import constrain, logits_block, step
from onechip.kernels.attention import KV, storage_dtype
from onechip.model.load import abstract_params
from onechip.request import MAX_LOGPROBS, Request, SamplingParams

LOGITS_ROWS = 32  # positions whose full logits exist at once: 32 x 262,144 float32 are 34 MB
_COMPILERS = min(
    4, os.cpu_count() or 1
)  # more would cost host memory: a large program takes gigabytes


@dataclass(frozen=True)
class Constrain:
    """The program that samples a launch of `rows` rows again under masks; `steps` of the launch's program."""

    rows: int
    steps: int


Program = Bucket | Constrain | str
HELPERS = ("admit", "logits")
SERVING = ("admit",)  # what a server needs beside its buckets


@dataclass(frozen=True)
class Shapes:
    """The static facts that every program is compiled for. `pages`: of each pool, page 0 included.

    `steps`: most decode steps of one launch. `platform`: "cpu", "tpu" or "gpu".
    """

    config: ModelConfig
    dtype: Any
    kv_dtype: Any
    page_size: int
    max_seqs: int
    full_columns: int
    sliding_columns: int
    attention: str
    pages: Mapping[LayerKind, int] = field(default_factory=dict[LayerKind, int])
    platform: str = "cpu"
    steps: int = 1

    def layout(self, bucket: Bucket) -> BatchLayout:
        return BatchLayout(bucket, self.full_columns, self.sliding_columns)

    def steps_of(self, bucket: Bucket) -> int:
        """Most decode steps one launch of the bucket's program may take."""
        return self.steps if bucket.decode else 1

    def constrain_of(self, bucket: Bucket) -> Constrain:
        return Constrain(bucket.rows, self.steps_of(bucket))

    def caches(self, make: Callable[[tuple[int, ...], Any], Any]) -> tuple[KV, ...]:
        """K/V pools of every owning layer, each array made by `make(shape, dtype)`."""
        dtype = storage_dtype(self.kv_dtype, self.platform)
        pools: list[KV] = []
        for layer in self.config.owners:
            shape = (layer.kv_heads, self.pages[layer.kind], self.page_size, layer.head_dim)
            pools.append(KV(make(shape, dtype), make(shape, dtype), str(self.kv_dtype)))
        return tuple(pools)


def name_of(program: Program) -> str:
    """A file name and a table's first column: `decode-8x8`, `mixed-512x4`, `score-512x4`, `constrain-8x1`, `admit`."""
    if isinstance(program, str):
        return program
    if isinstance(program, Constrain):
        return f"constrain-{program.rows}x{program.steps}"
    kind = "score" if program.score else "decode" if program.decode else "mixed"
    return f"{kind}-{program.tokens}x{program.rows}"


def abstract_arguments(shapes: Shapes, program: Program) -> tuple[Any, ...]:
    """The arguments of a program as `jax.ShapeDtypeStruct`s."""
    config = shapes.config
    state = jax.eval_shape(lambda: slots.empty_state(shapes.max_seqs, config.vocab_size))
    if program == "admit":
        rows = slots.slot_rows(Request("", (0,), SamplingParams()), config.vocab_size)
        return state, jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(lambda: rows)
    if isinstance(program, Constrain):
        return (state, *_abstract_sampled(program, config.vocab_size))
    params = abstract_params(config, shapes.dtype)
    if program == "logits":
        return params, jax.ShapeDtypeStruct((LOGITS_ROWS, config.hidden_size), jnp.float32)
    assert isinstance(program, Bucket)
    vector = jax.ShapeDtypeStruct((shapes.layout(program).size,), jnp.int32)
    return params, shapes.caches(jax.ShapeDtypeStruct), state, vector


def _abstract_sampled(program: Constrain, vocab: int) -> tuple[Any, ...]:
    """Arguments of `step.constrain` after the slots."""
    rows, array = program.rows, jax.ShapeDtypeStruct
    best = (rows, MAX_LOGPROBS)
    return (
        array((rows, vocab), jnp.float32),
        array((program.steps, rows), jnp.int32),
        (array((rows,), jnp.float32), array(best, jnp.int32), array(best, jnp.float32)),
        array((ROW_FIELDS, rows), jnp.int32),
        array((rows, -(-vocab // 32)), jnp.uint32),
    )


def function_of(shapes: Shapes, program: Program) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """(the function to jit, the arguments it donates)."""
    if program == "admit":
        return slots.admit, (0,)
    if isinstance(program, Constrain):
        return partial(constrain), (0,)
    if program == "logits":
        return partial(logits_block, config=shapes.config, platform=shapes.platform), ()
    assert isinstance(program, Bucket)
    function = partial(
        step,
        config=shapes.config,
        layout=shapes.layout(program),
        page_size=shapes.page_size,
        attention=shapes.attention,
        platform=shapes.platform,
        most_steps=shapes.steps_of(program),
    )
    return function, (1, 2)


def lower(shapes: Shapes, program: Program, sharding: Any) -> Any:
    """The program traced and lowered for the device that `sharding` names."""
    function, donated = function_of(shapes, program)

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    arguments = jax.tree.map(placed, abstract_arguments(shapes, program))
    function.__name__ = name_of(program).replace("-", "_")  # pyright: ignore[reportAttributeAccessIssue]
    return jax.jit(function, donate_argnums=donated).lower(*arguments)


class Programs:
    """The executables of one engine on one device, by program."""

    def __init__(self, shapes: Shapes, device: Any):
        self.shapes = shapes
        self.sharding = jax.sharding.SingleDeviceSharding(device)
        self.ready: dict[Program, Callable[..., Any]] = {}

    def compile(self, table: BucketTable, progress: Callable[[str], None] | None = None) -> None:
        """Compile every program, smallest first, a few at a time: XLA's compilers leave the interpreter alone."""
        wanted: list[Program] = [p for p in self.needed(table) if p not in self.ready]
        with ThreadPoolExecutor(_COMPILERS) as pool:
            compiling = [(p, pool.submit(self.lower(p).compile)) for p in wanted]
            for program, future in compiling:
                self.ready[program] = future.result()
                if progress is not None:
                    progress(name_of(program))

    def needed(self, table: BucketTable) -> list[Program]:
        """What a server with this table runs, smallest first."""
        masked = dict.fromkeys(self.shapes.constrain_of(bucket) for bucket in table.buckets)
        return [*SERVING, *table.buckets, *masked]

    def lower(self, program: Program) -> Any:
        return lower(self.shapes, program, self.sharding)

    def __getitem__(self, program: Program) -> Callable[..., Any]:
        """The executable, compiled now if it is not ready."""
        if program not in self.ready:
            self.ready[program] = self.lower(program).compile()
        return self.ready[program]


def zeros_on(device: Any) -> Callable[[tuple[int, ...], Any], jax.Array]:
    """A maker of zeroed arrays by transfer: `jnp.zeros` would compile a program for every shape."""

    def make(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.device_put(np.zeros(shape, dtype), device, may_alias=False)

    return make
