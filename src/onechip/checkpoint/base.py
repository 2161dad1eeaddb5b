"""The seam between files and model: what every checkpoint reader offers, and the arrays it hands
out.

Owns the `Checkpoint` protocol, the notes a reader leaves for the tokenizer, and the two things all
readers share: arrays that jax on CPU can alias without a copy, and conversion in blocks small
enough that a table of 2.3 G values needs its own output and little more. Refuses to know any file
format, and what a weight means.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onechip.errors import CheckpointError

Array = NDArray[Any]

READ_DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

ALIGNMENT = 64  # bytes; XLA's CPU client copies host arrays that are aligned to less
BLOCK_VALUES = 1 << 17  # dequantised at a time; its temporaries take about 4 MB
MAX_WORKERS = 8  # threads of one read; times the temporaries of a block, still under 64 MB


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor under its canonical name.

    `shape` is the reference's, [out, in] for a matrix; `dtype` the stored type's name ("BF16",
    "F32", "Q4_K", or two joined by "+" where a tensor is put together from parts); `nbytes` its
    size in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class TokenizerFiles:
    """A Hugging Face tokenizer: the path of tokenizer.json and the parsed tokenizer_config.json ({}
    if absent).
    """

    path: Path
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class GgufVocabulary:
    """The vocabulary inside a GGUF file, as stored.

    `model` is the file's name for the scheme: "llama" (scores, no merges) or "gemma4" (merges "left
    right"). `types` holds llama.cpp's token types (3 control, 4 user-defined, 6 byte). `digest` is
    the sha256 of the stored bytes. Ids are None where the file does not say.
    """

    source: str
    model: str
    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    merges: Sequence[str]
    digest: str
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None


class Checkpoint(Protocol):
    """What a model string was resolved to.

    `source` names it in messages and logs. `config` is a whole config.json in Hugging Face's
    dialect, `generation_config` the like ({} if absent), `chat_template` Jinja source or None.
    `tensors` is keyed by canonical names: those of the reference implementation without the text
    model's prefix ("layers.0.self_attn.q_proj.weight"). `ignored` lists, under their stored names,
    the tensors that the name table leaves out (towers, rotary tables).
    """

    @property
    def source(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def ignored(self) -> tuple[str, ...]: ...

    def read(self, name: str, dtype: str, out: Array | None = None) -> Array:
        """The values of tensor `name` as a C-contiguous, 64-byte aligned array of `dtype`, one of
        READ_DTYPES.

        Written into `out` where given (same shape and dtype, contiguous). Safe to call from several
        threads. Raises CheckpointError for a name that the checkpoint does not hold.
        """
        ...

    def tokenizer_files(self) -> TokenizerFiles | GgufVocabulary | None:
        """What `chat.tokenizer` is made from; None for a checkpoint without a tokenizer."""
        ...


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised C-contiguous array that starts on a multiple of ALIGNMENT bytes."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def output_for(info: TensorInfo, dtype: str, out: Array | None) -> Array:
    """The array that a read of `info` as `dtype` fills: `out`, checked, or a fresh aligned one."""
    target = READ_DTYPES[dtype]
    if out is None:
        return aligned_empty(info.shape, target)
    assert out.shape == info.shape
    assert out.dtype == target
    assert out.flags.c_contiguous
    return out


def lookup(tensors: Mapping[str, TensorInfo], name: str, source: str) -> TensorInfo:
    """The entry of `name`. Raises CheckpointError naming tensor and checkpoint when it is absent."""
    info = tensors.get(name)
    if info is None:
        raise CheckpointError(
            f"{source} holds no tensor {name} among its {len(tensors)};"
            " weights and config do not belong together"
        )
    return info


def fill_blocks(out: Array, units: int, decode: Callable[[int, int], Array]) -> None:
    """Fill the flat array `out` with `decode(start, stop)`, the values of units [start, stop) of
    `units` equal ones.

    A unit is a quantisation block. About BLOCK_VALUES values are decoded at a time, on up to
    MAX_WORKERS threads: numpy lets go of the interpreter while it works, and decoding is
    arithmetic, not reading.
    """
    if units == 0:
        return
    width = out.size // units
    step = max(1, BLOCK_VALUES // width)

    def one(start: int) -> None:
        stop = min(start + step, units)
        out[start * width : stop * width] = decode(start, stop).reshape(-1)

    starts = range(0, units, step)
    workers = min(MAX_WORKERS, os.cpu_count() or 1, len(starts))
    if workers == 1:
        for start in starts:
            one(start)
        return
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(one, starts):
            pass
