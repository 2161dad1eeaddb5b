"""Parameters on the device: from a checkpoint, tensor by tensor, or random, by the one list in `params`.

Each array is made on the host in its final dtype and layout, put on the device and let go before the next is read, so
the host never holds more than the device does plus the largest tensor. On a CPU the device's memory is the host's:
`checkpoint.base.aligned_empty` buffers are adopted without a copy. Knows numpy and jax, not files.
"""

import math
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import Any

import jax
import ml_dtypes
import numpy as np

from onechip.checkpoint.base import Checkpoint, aligned_empty
from onechip.config import DTypeName, ModelConfig
from onechip.model import stack
from onechip.model.params import ParamSpec, Place, check_tensors, device_arrays, parameter_specs

_CHUNK = 1 << 22  # values drawn at once: 8 MB of random bits


# Told of every finished parameter: bytes done, bytes in all.
Progress = Callable[[int, int], None]


def load_params(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: DTypeName,
    device: Any,
    progress: Progress | None = None,
) -> Any:
    """The parameter tree of `model.gemma` from a checkpoint. Raises CheckpointError on any mismatch, before reading."""
    check_tensors(config, shapes_of(checkpoint), checkpoint.source)

    def fill(spec: ParamSpec, out: np.ndarray) -> None:
        row = 0
        for name, shape in zip(spec.sources, spec.source_shapes, strict=True):
            checkpoint.read(name, out.dtype.name, out[row : row + shape[0]])
            row += shape[0]
        if spec.offset:
            out += np.asarray(spec.offset, out.dtype)

    return _build(config, dtype, device, fill, progress)


def shapes_of(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """What `params.check_tensors` compares with a config: no tensor is read."""
    return {name: info.shape for name, info in checkpoint.tensors.items()}


def random_params(
    config: ModelConfig,
    dtype: DTypeName,
    device: Any,
    seed: int = 0,
    progress: Progress | None = None,
) -> Any:
    """Random weights for any config: matrices normal with deviation fan_in^-0.5, norms and scalars 1 (+ offset)."""
    specs = enumerate(parameter_specs(config).values())
    order = {spec.path: index for index, spec in specs}

    def fill(spec: ParamSpec, out: np.ndarray) -> None:
        if spec.use == "vector":
            out[...] = 1
        else:
            _fill_normal(
                out, spec.shape[-1] ** -0.5, np.random.default_rng((seed, order[spec.path]))
            )

    return _build(config, dtype, device, fill, progress)


def _build(
    config: ModelConfig,
    dtype: DTypeName,
    device: Any,
    fill: Callable[[ParamSpec, np.ndarray], None],
    progress: Progress | None,
) -> Any:
    tree = _empty(config)
    arrays = device_arrays(config)
    sizes = {
        place: math.prod(array.shape) * _numpy_dtype(array.specs[0], dtype).itemsize
        for place, array in arrays.items()
    }
    done, total = 0, sum(sizes.values())
    # The largest first: its host copy is then the only thing beside the device's arrays.
    for place in sorted(arrays, key=lambda p: -sizes[p]):
        array = arrays[place]
        host = aligned_empty(array.shape, _numpy_dtype(array.specs[0], dtype))
        for spec, part in zip(array.specs, host if array.stacked else [host], strict=True):
            fill(spec, part)
        _put(tree, place, jax.block_until_ready(jax.device_put(host, device, may_alias=True)))
        done += sizes[place]
        if progress is not None:
            progress(done, total)
    return tree


def abstract_params(config: ModelConfig, dtype: DTypeName) -> Any:
    """The same tree of `jax.ShapeDtypeStruct`s: what ahead-of-time compiles are given."""
    tree = _empty(config)
    for place, array in device_arrays(config).items():
        dtype_held = _numpy_dtype(array.specs[0], dtype)
        _put(tree, place, jax.ShapeDtypeStruct(array.shape, dtype_held))
    return tree


def param_bytes(config: ModelConfig, dtype: DTypeName) -> int:
    """Bytes the parameters take on the device."""
    specs = parameter_specs(config).values()
    return sum(spec.size * _numpy_dtype(spec, dtype).itemsize for spec in specs)


def _empty(config: ModelConfig) -> dict[str, Any]:
    return {"layers": tuple({} for _ in stack.entries(config))}


def _put(tree: dict[str, Any], place: Place, value: Any) -> None:
    *way, name = place
    for step in way:
        tree = tree[step]  # pyright: ignore[reportArgumentType]
    tree[str(name)] = value


def _numpy_dtype(spec: ParamSpec, dtype: DTypeName) -> np.dtype[Any]:
    if spec.use == "vector" or dtype == "float32":
        return np.dtype(np.float32)
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)


def _fill_normal(out: np.ndarray, deviation: float, rng: np.random.Generator) -> None:
    """Normal values on 65,536 quantiles: one table lookup a value, 20x faster than drawing floats and rounding them."""
    table = _quantiles(deviation).astype(out.dtype)
    flat = out.reshape(-1)
    for part in _chunks(flat):
        part[...] = table[rng.integers(0, 1 << 16, part.size, dtype=np.uint16)]


def _chunks(flat: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK]


def _quantiles(deviation: float) -> np.ndarray:
    """float32 [65536] of N(0, deviation^2) at evenly spaced probabilities."""
    coarse = np.linspace(-6, 6, 24001)
    cdf = np.array([NormalDist().cdf(x) for x in coarse])
    return (deviation * np.interp((np.arange(1 << 16) + 0.5) / (1 << 16), cdf, coarse)).astype(
        np.float32
    )
