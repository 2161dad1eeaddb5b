"""GGUF checkpoints: names, config and dequantisation over the container that `gguf_file` parses.

Owns the block types (sizes and arithmetic come from the gguf package), the checks of every tensor against the file's
size, and what a file stores differently from the reference: norms with an offset, expert halves apart. Refuses to know
what the tensors mean.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from onechip.checkpoint.base import (
    Array,
    GgufVocabulary,
    TensorInfo,
    fill_blocks,
    lookup,
    output_for,
)
from onechip.checkpoint.gguf_config import Keys, config_of, eos_ids_of, generation_config_of
from onechip.checkpoint.gguf_file import GgufFile, RawTensor, Strings, parse
from onechip.checkpoint.gguf_names import (
    EXPERT_HALVES,
    JOINED,
    ROPE_FREQS,
    canonical_name,
    is_ignored,
    norm_offset,
)
from onechip.errors import CheckpointError

PLAIN_TYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
VOCABULARY_KEYS = ("model", "tokens", "scores", "token_type", "merges")


@dataclass(frozen=True)
class Part:
    """One stored tensor: its bytes (a view of the map), type and shape."""

    stored_name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    raw: Array

    def decode_into(self, out: Array, offset: float) -> None:
        """Write the values, less `offset`, into the contiguous array `out` of as many elements."""
        flat = out.reshape(-1)
        if self.type.name in PLAIN_TYPES:
            values = self.raw.view(PLAIN_TYPES[self.type.name])
            flat[...] = values if offset == 0 else values.astype(np.float32) - np.float32(offset)
            return
        block_bytes = GGML_QUANT_SIZES[self.type][1]
        blocks = self.raw.reshape(-1, block_bytes)

        def decode(start: int, stop: int) -> Array:
            # One long row: the package works through rows in small groups, at a cost for each.
            return dequantize(blocks[start:stop].reshape(1, -1), self.type) - np.float32(offset)

        fill_blocks(flat, len(blocks), decode)


@dataclass(frozen=True)
class GgufCheckpoint:
    """A `Checkpoint` over one GGUF file. `parts` holds one stored tensor for a name, or both halves of the experts."""

    source: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    chat_template: str | None
    tensors: Mapping[str, TensorInfo]
    ignored: tuple[str, ...]
    architecture: str
    parts: Mapping[str, tuple[Part, ...]]
    vocabulary: GgufVocabulary | None

    def read(self, name: str, dtype: str, out: Array | None = None) -> Array:
        """See `Checkpoint.read`."""
        out = output_for(lookup(self.tensors, name, self.source), dtype, out)
        parts = self.parts[name]
        offset = norm_offset(self.architecture, name)
        if len(parts) == 1:
            parts[0].decode_into(out, offset)
        else:
            _join_experts(parts, out)
        return out

    def tokenizer_files(self) -> GgufVocabulary | None:
        """See `Checkpoint.tokenizer_files`."""
        return self.vocabulary


def open_gguf(path: Path, source: str) -> GgufCheckpoint:
    """Open a GGUF file of a Gemma 3 or Gemma 4 text model.

    Raises CheckpointError when it is truncated, damaged, of another architecture, or holds a type or a metadata value
    that is not supported.
    """
    file = parse(path)
    architecture = _architecture(file)
    stored = [_part(file, tensor) for tensor in file.tensors.values()]
    parts = _parts(path, [part for part in stored if not is_ignored(part.stored_name)])
    tensors = {name: _info(name, found) for name, found in parts.items()}
    keys = Keys(str(path), architecture, file.metadata)
    return GgufCheckpoint(
        source=source,
        config=config_of(keys, tensors, _rope_divisors(stored)),
        generation_config=generation_config_of(keys, eos_ids_of(keys)),
        chat_template=_chat_template(file),
        tensors=tensors,
        ignored=tuple(part.stored_name for part in stored if is_ignored(part.stored_name)),
        architecture=architecture,
        parts=parts,
        vocabulary=_vocabulary(file),
    )


def _architecture(file: GgufFile) -> str:
    found = file.metadata.get("general.architecture")
    if not isinstance(found, str):
        raise CheckpointError(f"{file.path} names no architecture; convert the model again")
    return found


def _chat_template(file: GgufFile) -> str | None:
    found = file.metadata.get("tokenizer.chat_template")
    return found if isinstance(found, str) else None


def _part(file: GgufFile, tensor: RawTensor) -> Part:
    """A tensor with its bytes. Raises CheckpointError for an unsupported type, a broken row or missing bytes."""
    kind = _type(file, tensor)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    width = tensor.shape[-1] if tensor.shape else 1
    if width % block:
        raise CheckpointError(
            f"{file.path}: tensor {tensor.name} has rows of {width} values, no multiple of the"
            f" {block} in a {kind.name} block; download it again"
        )
    nbytes = math.prod(tensor.shape) // block * block_bytes
    if tensor.offset + nbytes > len(file.data):
        raise CheckpointError(
            f"{file.path} is truncated: tensor {tensor.name} at byte {tensor.offset} needs {nbytes} bytes,"
            f" the file has {len(file.data)}; download it again"
        )
    start = tensor.offset if nbytes else 0
    raw = np.frombuffer(file.data, np.uint8, nbytes, start)
    return Part(tensor.name, tensor.shape, kind, raw)


def _type(file: GgufFile, tensor: RawTensor) -> GGMLQuantizationType:
    names = {kind.value: kind for kind in GGMLQuantizationType}
    kind = names.get(tensor.type)
    if kind is None or kind.name not in (*PLAIN_TYPES, *BLOCK_TYPES):
        shown = kind.name if kind else f"number {tensor.type}"
        raise CheckpointError(
            f"{file.path}: tensor {tensor.name} has type {shown}; supported are"
            f" {', '.join((*PLAIN_TYPES, *BLOCK_TYPES))}: use another quantisation of the model"
        )
    return kind


def _parts(path: Path, stored: list[Part]) -> dict[str, tuple[Part, ...]]:
    """Stored tensors by canonical name, in the order of their place in it."""
    found: dict[str, dict[int, Part]] = {}
    for part in stored:
        name, place = canonical_name(part.stored_name)
        other = found.setdefault(name, {}).setdefault(place, part)
        if other is not part:
            raise CheckpointError(
                f"{path}: tensors {part.stored_name} and {other.stored_name} are both {name};"
                " convert the model again"
            )
    return {name: _complete(path, name, places) for name, places in found.items()}


def _complete(path: Path, name: str, places: Mapping[int, Part]) -> tuple[Part, ...]:
    parts = tuple(places[place] for place in sorted(places))
    halves = name.endswith(JOINED) and any(
        part.stored_name.endswith(EXPERT_HALVES) for part in parts
    )
    if halves and (len(parts) != 2 or parts[0].shape != parts[1].shape or len(parts[0].shape) != 3):
        raise CheckpointError(
            f"{path}: {name} needs {EXPERT_HALVES[0]} and {EXPERT_HALVES[1]} of one 3-D shape, found"
            f" {', '.join(f'{part.stored_name} {list(part.shape)}' for part in parts)}; convert again"
        )
    return parts


def _info(name: str, parts: tuple[Part, ...]) -> TensorInfo:
    shape = parts[0].shape
    if len(parts) == 2:
        experts, rows, width = shape
        shape = (experts, 2 * rows, width)
    types = dict.fromkeys(part.type.name for part in parts)
    return TensorInfo(name, shape, "+".join(types), sum(part.raw.nbytes for part in parts))


def _join_experts(parts: tuple[Part, ...], out: Array) -> None:
    """Write gate [E, F, D] and up [E, F, D] as [E, 2F, D], the gate's rows first, an expert at a time."""
    experts, rows, _ = parts[0].shape
    for part, start in zip(parts, (0, rows), strict=True):
        raw = part.raw.reshape(experts, -1)
        for expert in range(experts):
            one = Part(part.stored_name, part.shape[1:], part.type, raw[expert])
            one.decode_into(out[expert, start : start + rows], 0.0)


def _rope_divisors(stored: list[Part]) -> Array | None:
    for part in stored:
        if part.stored_name == ROPE_FREQS:
            values = np.empty(part.shape, np.float32)
            part.decode_into(values, 0.0)
            return values.reshape(-1)
    return None


def _vocabulary(file: GgufFile) -> GgufVocabulary | None:
    """The tokenizer's part of the metadata; None for a file without one."""
    model = file.metadata.get("tokenizer.ggml.model")
    pieces = _strings(file, "tokens")
    if not isinstance(model, str) or not pieces:
        return None
    return GgufVocabulary(
        source=str(file.path),
        model=model,
        pieces=pieces,
        scores=_numbers(file, "scores"),
        types=_numbers(file, "token_type"),
        merges=_strings(file, "merges"),
        digest=_digest(file),
        bos_id=_token_id(file, "bos"),
        eos_id=_token_id(file, "eos"),
        unk_id=_token_id(file, "unknown"),
        pad_id=_token_id(file, "padding"),
    )


def _strings(file: GgufFile, key: str) -> Sequence[str]:
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    return found if isinstance(found, Strings) else ()


def _numbers(file: GgufFile, key: str) -> Sequence[Any]:
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    return found.tolist() if isinstance(found, np.ndarray) else ()


def _token_id(file: GgufFile, name: str) -> int | None:
    found = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return found if type(found) is int else None


def _digest(file: GgufFile) -> str:
    """sha256 over the stored bytes of everything a tokenizer is made from."""
    digest = hashlib.sha256()
    for key in VOCABULARY_KEYS:
        start, stop = file.spans.get(f"tokenizer.ggml.{key}", (0, 0))
        digest.update(key.encode() + (stop - start).to_bytes(8, "little"))
        digest.update(memoryview(file.data)[start:stop])
    return digest.hexdigest()
