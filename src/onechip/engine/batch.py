"""One step's inputs, packed into a single int32 vector: one transfer a step, whatever it carries.

The layout is a list of fields; `pack` fills them on the host, `unpack` slices them on the device. Floats travel as
their bits. The vector is fresh every step: on a CPU the device may still be reading the last one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from onechip.engine.buckets import Bucket
from onechip.engine.sequence import LAUNCH_STOPS

# Bits of the per-row `flags`.
SAMPLE = 1  # this row's token is wanted: keep it as the slot's last token
DRAW = 2  # sampled, not greedy
PENALTIES = 4
BIAS = 8
ALLOWED = 16  # the slot's allowed-ids mask applies
MIN_TOKENS = 32  # stop ids are banned until kv_len reaches min_len
LOGPROBS = 64
STOPS = 128  # within a launch of several steps the row ends at one of the launch's `stops`
GRAMMAR = 256  # only `step.choose` sees it: a mask limits what the row may choose from

FROM_DEVICE = -1  # a token id the host does not know yet: take the slot's last one
NO_TOKEN = -3  # pads `stops`

_ROW_INTS = (
    "slot", "q_start", "q_len", "kv_len", "first_page", "flags", "top_k",
    "seed_high", "seed_low", "prompt_len", "min_len", "left",
)  # fmt: skip
_ROW_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


@dataclass(frozen=True)
class BatchLayout:
    """Where each field of a bucket's vector lies. `full_pages`, `sliding_pages`: columns of a row's page tables."""

    bucket: Bucket
    full_pages: int
    sliding_pages: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        tokens, rows = self.bucket.tokens, self.bucket.rows
        per_row = dict.fromkeys(_ROW_INTS + _ROW_FLOATS, (rows,))
        target = {"target": (tokens,)} if self.bucket.score else {}
        return {
            "token": (tokens,),
            "row": (tokens,),
            **target,
            "singles": (),
            "steps": (),
            "stops": (LAUNCH_STOPS,),
            **per_row,
            "full_table": (rows, self.full_pages),
            "sliding_table": (rows, self.sliding_pages),
        }

    @property
    def size(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def pack(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(the vector, writable views of its fields); everything starts as padding: empty rows, row index R."""
        vector = np.zeros(self.size, np.int32)
        fields: dict[str, np.ndarray] = {}
        start = 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape))
            view = vector[start : start + size].reshape(shape)
            fields[name] = view.view(np.float32) if name in _ROW_FLOATS else view
            start += size
        fields["row"][:] = self.bucket.rows
        fields["stops"][:] = NO_TOKEN
        return vector, fields

    def unpack(self, vector: Array) -> Mapping[str, Array]:
        """The same fields as device arrays."""
        fields: dict[str, Array] = {}
        start = 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape))
            part = vector[start : start + size].reshape(shape)
            fields[name] = (
                lax.bitcast_convert_type(part, jnp.float32) if name in _ROW_FLOATS else part
            )
            start += size
        return fields

    def row_fields(self, vector: np.ndarray) -> np.ndarray:
        """A copy of the per-row part of a packed vector, int32 [ROW_FIELDS, R], for `unpack_rows`."""
        shapes, rows = self.shapes, self.bucket.rows
        before = list(shapes)[: list(shapes).index(_ROW_INTS[0])]
        start = sum(int(np.prod(shapes[name])) for name in before)
        return vector[start : start + ROW_FIELDS * rows].reshape(ROW_FIELDS, rows).copy()


ROW_FIELDS = len(_ROW_INTS + _ROW_FLOATS)
ROW_FLAGS = _ROW_INTS.index("flags")  # its place in `row_fields`


def row_part(fields: Mapping[str, Array]) -> Mapping[str, Array]:
    """Of all fields, those [R]."""
    return {name: fields[name] for name in _ROW_INTS + _ROW_FLOATS}


def unpack_rows(block: Array) -> Mapping[str, Array]:
    """The fields of `row_fields` as device arrays [R]."""
    ints = dict(zip(_ROW_INTS, block, strict=False))
    floats = {
        name: lax.bitcast_convert_type(part, jnp.float32)
        for name, part in zip(_ROW_FLOATS, block[len(_ROW_INTS) :], strict=True)
    }
    return {**ints, **floats}
