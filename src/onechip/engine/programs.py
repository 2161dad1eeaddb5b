"""Every program an engine runs, lowered from shapes alone, for the device at hand or for a chip that is elsewhere.

1. `Shapes` are the static facts: model, dtypes, page tables' widths, pools' pages, the platform compiled for.
2. `trace` traces one program on abstract arrays: nothing is allocated, so a 31B model lowers on a laptop.
3. `Programs` holds the executables. `begin` makes them in the background, those that the first answer needs first; one
   that a server does not need (offline scoring) is made when first used.

A program is a bucket of the table, a `Choose`, "admit" (a slot's unusual parameters) or "logits" (offline scoring).
Knows neither requests nor where an executable came from.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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
from onechip.engine.step import choose, hidden_states, logits_block, step
from onechip.kernels.attention import KV, storage_dtype
from onechip.kernels.bits import mask_bytes
from onechip.model import stack
from onechip.model.load import abstract_params
from onechip.request import MAX_LOGPROBS, Request, SamplingParams

LOGITS_ROWS = 32  # positions whose full logits exist at once: 32 x 262,144 float32 are 34 MB
_ALIGNMENT = 64  # of the buffers that XLA's CPU client adopts
COMPILER_THREADS = "onechip-compiler"  # so are the threads named that compile what was planned
COMPILERS = min(
    4, os.cpu_count() or 1
)  # more would cost host memory: a large program takes gigabytes


@dataclass(frozen=True)
class Choose:
    """The program that samples what a launch of `rows` rows left, whatever program the launch was of."""

    rows: int


Program = Bucket | Choose | str
SERVING = ("admit",)  # what a server needs beside its buckets


@dataclass(frozen=True)
class Shapes:
    """The static facts that every program is compiled for. `pages`: of one layer of each kind, page 0 included.

    `steps`: most decode steps of one launch. `platform`: "cpu", "tpu" or "gpu". `attention`, `experts`: implementations
    of `kernels.attention` and `kernels.grouped_matmul`.
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
    experts: str = "loop"

    def layout(self, bucket: Bucket) -> BatchLayout:
        return BatchLayout(bucket, self.full_columns, self.sliding_columns)

    def statics(self, bucket: Bucket) -> dict[str, Any]:
        """The keywords of `step.step` and `step.hidden_states` that follow from the shapes."""
        return {
            "config": self.config, "layout": self.layout(bucket), "page_size": self.page_size,
            "attention": self.attention, "experts": self.experts, "platform": self.platform,
        }  # fmt: skip

    def caches(self, make: Callable[[tuple[int, ...], Any], Any]) -> tuple[KV, ...]:
        """The K/V of every store, each array made by `make(shape, dtype)`."""
        dtype = storage_dtype(self.kv_dtype, self.platform)
        caches: list[KV] = []
        for store in stack.stores(self.config):
            layer, layers = store.owners[0], len(store.owners)
            shape = (
                layer.kv_heads,
                layers * self.pages[layer.kind],
                self.page_size,
                layer.head_dim,
            )
            caches.append(KV(make(shape, dtype), make(shape, dtype), str(self.kv_dtype), layers))
        return tuple(caches)


def name_of(program: Program) -> str:
    """A file name and a table's first column: `decode-8x8`, `mixed-512x4`, `score-512x4`, `choose-8`, `admit`."""
    if isinstance(program, str):
        return program
    if isinstance(program, Choose):
        return f"choose-{program.rows}"
    kind = "score" if program.score else "decode" if program.decode else "mixed"
    return f"{kind}-{program.tokens}x{program.rows}"


def abstract_arguments(shapes: Shapes, program: Program) -> tuple[Any, ...]:
    """The arguments of a program as `jax.ShapeDtypeStruct`s."""
    config = shapes.config
    state = _shape_of(slots.empty_state(shapes.max_seqs, config.vocab_size))
    if program == "admit":
        rows = slots.slot_rows(Request("", (0,), SamplingParams()), config.vocab_size)
        return state, jax.ShapeDtypeStruct((), jnp.int32), _shape_of(rows)
    if isinstance(program, Choose):
        return (state, *_abstract_sampled(program.rows, shapes.steps, config.vocab_size))
    params = abstract_params(config, shapes.dtype)
    if program == "logits":
        return params, jax.ShapeDtypeStruct((LOGITS_ROWS, config.hidden_size), jnp.float32)
    assert isinstance(program, Bucket)
    vector = jax.ShapeDtypeStruct((shapes.layout(program).size,), jnp.int32)
    return params, shapes.caches(jax.ShapeDtypeStruct), state, vector


def _abstract_sampled(rows: int, steps: int, vocab: int) -> tuple[Any, ...]:
    """Arguments of `step.choose` after the slots."""
    array, best = jax.ShapeDtypeStruct, (rows, MAX_LOGPROBS)
    return (
        array((rows, vocab), jnp.float32),
        array((steps, rows), jnp.int32),
        (array((rows,), jnp.float32), array(best, jnp.int32), array(best, jnp.float32)),
        array((ROW_FIELDS, rows), jnp.int32),
        array((rows, mask_bytes(vocab)), jnp.uint8),
    )


def _shape_of(arrays: Any) -> Any:
    """The same tree of shapes, without tracing anything."""

    def one(x: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    return jax.tree.map(one, arrays)


def function_of(shapes: Shapes, program: Program) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """(the function to jit, the arguments it donates)."""
    if program == "admit":
        return slots.admit, (0,)
    if isinstance(program, Choose):
        return partial(choose, platform=shapes.platform), (0,)
    if program == "logits":
        return partial(logits_block, config=shapes.config, platform=shapes.platform), ()
    assert isinstance(program, Bucket)
    return partial(step, **shapes.statics(program), most_steps=shapes.steps), (1, 2)


def trace(shapes: Shapes, program: Program, sharding: Any) -> Any:
    """The program traced for the device that `sharding` names; `.lower().compile()` makes its executable."""
    function, donated = function_of(shapes, program)

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    arguments = jax.tree.map(placed, abstract_arguments(shapes, program))
    function.__name__ = name_of(program).replace("-", "_")  # pyright: ignore[reportAttributeAccessIssue]
    return jax.jit(function, donate_argnums=donated).trace(*arguments)


def trace_layers(shapes: Shapes, bucket: Bucket, every_position: bool) -> Any:
    """The layers of a bucket's step alone, traced to be counted: as they run, or each of them for every token."""
    function = partial(hidden_states, **shapes.statics(bucket), every_position=every_position)
    return jax.jit(function).trace(*abstract_arguments(shapes, bucket))


@dataclass(frozen=True)
class Needs:
    """Device bytes beside weights and K/V: the largest program's temporaries, and every program's code."""

    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.temporaries + self.code


class Programs:
    """The executables of one engine on one device, by program.

    `begin` compiles on threads of its own, and `wait` for those that are needed first; the others join `ready` while
    the engine works. A compile that fails there is raised by `check`.
    """

    def __init__(self, shapes: Shapes, device: Any):
        self.shapes = shapes
        self.sharding = jax.sharding.SingleDeviceSharding(device)
        self.ready: dict[Program, Any] = {}
        self._coming: dict[Program, Future[None]] = {}

    def begin(self, wanted: Iterable[Program], progress: Callable[[str], None]) -> None:
        """Start to compile what is not ready, in this order, a few at a time; returns at once."""
        pool = ThreadPoolExecutor(COMPILERS, thread_name_prefix=COMPILER_THREADS)
        for program in wanted:
            if program not in self.ready:
                self._coming[program] = pool.submit(self._make, program, progress)
        pool.shutdown(wait=False)

    def wait(self, wanted: Iterable[Program]) -> None:
        for program in wanted:
            if program in self._coming:
                self._coming[program].result()

    @property
    def wanted(self) -> list[Program]:
        """All that was begun."""
        return list(self._coming)

    def stop(self) -> None:
        """Give up what has not begun to compile."""
        for future in self._coming.values():
            future.cancel()

    def check(self) -> bool:
        """Whether all that was begun is ready. Raises what went wrong with one that will never be."""
        done = [future for future in self._coming.values() if future.done()]
        for future in done:
            future.result()
        return len(done) == len(self._coming)

    def needs(self) -> Needs:
        """Of what is ready."""
        found = [program.memory_analysis() for program in list(self.ready.values())]  # it may grow
        known = [memory for memory in found if memory is not None]
        temporaries = max((m.temp_size_in_bytes for m in known), default=0)
        return Needs(temporaries, sum(m.generated_code_size_in_bytes for m in known))

    def lower(self, program: Program) -> Any:
        return trace(self.shapes, program, self.sharding).lower()

    def __getitem__(self, program: Program) -> Any:
        """The executable, compiled now if it is not ready (offline use: a server's are ready before they are asked)."""
        if program not in self.ready:
            self.ready[program] = self.lower(program).compile()
        return self.ready[program]

    def _make(self, program: Program, progress: Callable[[str], None]) -> None:
        self.ready[program] = self.lower(program).compile()
        progress(name_of(program))


def needed(table: BucketTable) -> list[Program]:
    """What a server with this table runs, in the order to compile it: what is needed first, then the others."""
    return list(dict.fromkeys([*needed_first(table), *_choosing(table.buckets), *table.buckets]))


def needed_first(table: BucketTable) -> list[Program]:
    """What the first answer takes, and the largest program: it tells how much memory programs take."""
    largest = max(table.buckets, key=lambda bucket: (bucket.rows * bucket.tokens, bucket.score))
    buckets = (*table.first(), largest)
    return list(dict.fromkeys([*SERVING, *buckets, *_choosing(buckets)]))


def _choosing(buckets: Iterable[Bucket]) -> list[Choose]:
    """The second programs of these buckets' rows."""
    return [Choose(bucket.rows) for bucket in buckets]


def zeros_on(device: Any) -> Callable[[tuple[int, ...], Any], jax.Array]:
    """A maker of zeroed arrays by transfer: `jnp.zeros` would compile a program for every shape."""

    def make(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.device_put(_unadoptable(shape, np.dtype(dtype)), device, may_alias=False)

    return make


def to_device(array: np.ndarray, device: Any) -> jax.Array:
    """The array in memory that the device owns, so that it can be donated."""
    copy = _unadoptable(array.shape, array.dtype)
    copy[...] = array
    return jax.device_put(copy, device, may_alias=False)


def _unadoptable(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros that begin off XLA's alignment. A CPU client adopts aligned numpy memory as it is, whatever `may_alias`
    says, and an array that it has adopted is copied at its first donation.
    """
    size = math.prod(shape) * dtype.itemsize
    room = np.zeros(size + 2 * _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT + dtype.itemsize
    return room[start : start + size].view(dtype).reshape(shape)
