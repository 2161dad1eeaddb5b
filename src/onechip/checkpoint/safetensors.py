"""Safetensors directories: one file or shards, read through memory maps.

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
then raw little-endian data. Opening checks every offset against the file's size, so a truncated
download fails at once and not in the middle of a load. Owns the format and the directory's layout;
refuses to know what the tensors mean.
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

from onechip.checkpoint.base import Array, TensorInfo, TokenizerFiles, lookup, output_for
from onechip.checkpoint.files import (
    map_file,
    parse_json,
    read_bytes,
    read_json,
    read_json_if_present,
)
from onechip.checkpoint.safetensors_names import canonical_name, is_ignored
from onechip.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself

STORED_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Entry:
    """One tensor as a header lists it; `start` and `stop` are byte offsets into the file."""

    file: Path
    data: mmap.mmap
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def view(self) -> Array:
        """The stored values, unconverted, straight from the map."""
        count = math.prod(self.shape)
        flat = np.frombuffer(self.data, STORED_DTYPES[self.dtype], count, self.start)
        return flat.reshape(self.shape)


@dataclass(frozen=True)
class SafetensorsCheckpoint:
    """A `Checkpoint` over a directory in Hugging Face's layout."""

    source: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    chat_template: str | None
    tensors: Mapping[str, TensorInfo]
    ignored: tuple[str, ...]
    entries: Mapping[str, Entry]
    directory: Path

    def read(self, name: str, dtype: str, out: Array | None = None) -> Array:
        """See `Checkpoint.read`. numpy converts in its own small buffers, so there is no temporary
        at all.
        """
        out = output_for(lookup(self.tensors, name, self.source), dtype, out)
        if out.size:
            out[...] = self.entries[name].view()
        return out

    def tokenizer_files(self) -> TokenizerFiles | None:
        """See `Checkpoint.tokenizer_files`."""
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            return None
        return TokenizerFiles(path, read_json_if_present(self.directory / "tokenizer_config.json"))


def open_directory(
    directory: Path, source: str, *, random_weights: bool = False
) -> SafetensorsCheckpoint:
    """Open a directory with config.json and, unless `random_weights`, model.safetensors or its
    shards.

    Raises CheckpointError for anything missing, truncated, malformed or quantised.
    """
    config = read_json(directory / "config.json")
    entries: dict[str, Entry] = {}
    ignored: list[str] = []
    if not random_weights:
        _refuse_quantised(config, source)
        entries, ignored = _name(_stored_entries(directory))
    return SafetensorsCheckpoint(
        source=source,
        config=config,
        generation_config=read_json_if_present(directory / "generation_config.json"),
        chat_template=_chat_template(directory),
        tensors={name: _info(name, entry) for name, entry in entries.items()},
        ignored=tuple(ignored),
        entries=entries,
        directory=directory,
    )


def _info(name: str, entry: Entry) -> TensorInfo:
    return TensorInfo(name, entry.shape, entry.dtype, entry.stop - entry.start)


def _refuse_quantised(config: Mapping[str, Any], source: str) -> None:
    text = config.get("text_config")
    nested = cast(Mapping[str, Any], text) if isinstance(text, dict) else {}
    found = config.get("quantization_config") or nested.get("quantization_config")
    if found is None:
        return
    method = cast(dict[str, Any], found).get("quant_method") if isinstance(found, dict) else found
    raise CheckpointError(
        f"{source} is quantised (quant_method {method!r}), and quantised safetensors are not"
        " supported yet: use the model's bf16 checkpoint, its -qat-q4_0-unquantized one, or a GGUF file"
    )


def _name(stored: list[Entry]) -> tuple[dict[str, Entry], list[str]]:
    entries: dict[str, Entry] = {}
    ignored: list[str] = []
    for entry in stored:
        if is_ignored(entry.stored_name):
            ignored.append(entry.stored_name)
            continue
        name = canonical_name(entry.stored_name)
        other = entries.setdefault(name, entry)
        if other is not entry:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.stored_name} is {other.stored_name} of"
                f" {other.file.name} over again (both are {name}); keep one of them"
            )
        _check_dtype(entry)
    return entries, ignored


def _check_dtype(entry: Entry) -> None:
    if entry.dtype not in STORED_DTYPES:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.stored_name} is stored as {entry.dtype}; supported are"
            f" {', '.join(STORED_DTYPES)}: use a bf16 checkpoint or a GGUF file"
        )
    needed = math.prod(entry.shape) * STORED_DTYPES[entry.dtype].itemsize
    if entry.stop - entry.start != needed:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.stored_name}, {entry.dtype} {list(entry.shape)}, needs"
            f" {needed} bytes, its header gives {entry.stop - entry.start}; download it again"
        )


def _stored_entries(directory: Path) -> list[Entry]:
    """Every tensor of the directory; the single file wins over an index, as in the reference."""
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    if not (directory / INDEX).is_file():
        raise CheckpointError(
            f"{directory} holds neither {SINGLE} nor {INDEX};"
            " download the weights, or ask for random weights"
        )
    return _sharded_entries(directory)


def _sharded_entries(directory: Path) -> list[Entry]:
    weight_map = _weight_map(directory / INDEX)
    entries: list[Entry] = []
    for shard in sorted(set(weight_map.values())):
        path = directory / shard
        if not path.is_file():
            raise CheckpointError(
                f"{directory} lacks the shard {shard} that {INDEX} names; download it again"
            )
        entries.extend(read_header(path))
    held = {(entry.stored_name, entry.file.name) for entry in entries}
    for name, shard in weight_map.items():
        if (name, shard) not in held:
            raise CheckpointError(
                f"{directory / shard} lacks tensor {name} that {INDEX} promises; download it again"
            )
    return entries


def _weight_map(path: Path) -> dict[str, str]:
    found = read_json(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{path} has no weight_map; download it again")
    weight_map = cast(dict[str, Any], found)
    for name, shard in weight_map.items():
        # A shard outside the directory would let an index read any file of the machine.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path}: {name} names no file in its own directory: {shard!r}")
    return weight_map


def read_header(path: Path) -> list[Entry]:
    """The entries of one safetensors file, every offset checked against the file's size.

    Raises CheckpointError naming the file and, where one is at fault, the tensor with needed and
    actual bytes.
    """
    data = map_file(path)
    if len(data) < 8:
        raise CheckpointError(f"{path} has {len(data)} bytes, a header needs 8; download it again")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > len(data):
        raise CheckpointError(
            f"{path} announces a header of {length} bytes in a file of {len(data)}"
            f" (limit {MAX_HEADER_BYTES}); truncated or no safetensors file: download it again"
        )
    header = parse_json(data[8 : 8 + length], f"the header of {path}")
    header.pop("__metadata__", None)
    return [_entry(path, data, 8 + length, name, spec) for name, spec in header.items()]


def _entry(path: Path, data: mmap.mmap, base: int, name: str, spec: Any) -> Entry:
    fields = cast(dict[str, Any], spec) if isinstance(spec, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    shape, offsets = _sizes(shape), _sizes(offsets)
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise CheckpointError(
            f"{path}: the header entry of tensor {name} is malformed: {spec!r:.200}"
        )
    start, stop = base + offsets[0], base + offsets[1]
    if stop < start or stop > len(data):
        raise CheckpointError(
            f"{path}: tensor {name} needs bytes {start} to {stop}, the file has {len(data)};"
            " it is truncated: download it again"
        )
    return Entry(path, data, name, dtype, shape, start, stop)


def _sizes(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    items = tuple(cast(list[Any], value))
    return items if all(type(item) is int and item >= 0 for item in items) else None


def _chat_template(directory: Path) -> str | None:
    """chat_template.jinja, else the one inside tokenizer_config.json or chat_template.json."""
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        return _text(read_bytes(jinja), jinja)
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = read_json_if_present(directory / name).get("chat_template")
        if found is not None:
            return _template_of(found, directory / name)
    return None


def _template_of(found: Any, path: Path) -> str:
    """A template is a string, or a list of named ones of which "default" is meant."""
    if isinstance(found, list):
        items = [item for item in cast(list[Any], found) if isinstance(item, dict)]
        named = {
            item.get("name"): item.get("template") for item in cast(list[dict[str, Any]], items)
        }
        found = named.get("default", next(iter(named.values()), None))
    if not isinstance(found, str):
        raise CheckpointError(f"{path}: chat_template is neither text nor a list of named texts")
    return found


def _text(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error}; download it again") from error
