"""The GGUF container: header, metadata and tensor directory, parsed straight from a memory map.

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata: key string | type u32 | value          (strings: length u64, bytes; arrays: type u32, count u64, items)
    tensors:  name string | dims u32 | dim u64 each, fastest first | type u32 | offset u64
    padding to general.alignment, then the data that the offsets count from

Arrays of strings are only measured while parsing and decoded where somebody asks: a vocabulary of 262,144 pieces and
its 514,906 merges cost a fraction of a second. Every length is checked against the file's size before it is believed,
so a damaged file ends in a `CheckpointError` with the offset, never in something else. Refuses to know what keys,
tensors or blocks mean.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from onechip.checkpoint.files import map_file
from onechip.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 1 counted in 32 bits and was gone before Gemma 3
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32  # the format's own
MAX_DIMS = 4  # ggml's

# Type numbers of the format: scalars by their numpy type, and the two that are not scalars.
SCALARS: Mapping[int, np.dtype[Any]] = {
    number: np.dtype(code)
    for number, code in {
        0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
        7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip
STRING, ARRAY = 8, 9

_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class RawTensor:
    """One entry of the tensor directory: `shape` slowest first, as numpy and the reference count; `type` ggml's number;
    `offset` from the file's start.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """A parsed file. `spans` gives the bytes [start, stop) in which the value of a metadata key is stored."""

    path: Path
    data: mmap.mmap
    metadata: Mapping[str, Any]
    spans: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, RawTensor]


class Strings(Sequence[str]):
    """The strings of an array, decoded when asked for. Raises CheckpointError for one that is not UTF-8."""

    def __init__(self, path: Path, data: mmap.mmap, starts: list[int], sizes: list[int]):
        self._path = path
        self._data = data
        self._starts = starts
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = self._starts[index]
        return decode_text(self._path, self._data[start : start + self._sizes[index]], start)

    def __iter__(self) -> Iterator[str]:
        for index in range(len(self)):
            yield self[index]


def decode_text(path: Path, raw: bytes, offset: int) -> str:
    """UTF-8 text at `offset`. Raises CheckpointError."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path}: the string at byte {offset} is not UTF-8; the file is damaged: download it again"
        ) from error


class _Cursor:
    """A position in the map that refuses to leave it. `what` says in errors which part is being read."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.offset = 0
        self.what = "the header"

    def take(self, nbytes: int) -> int:
        """Step over `nbytes`; returns where they start. Raises CheckpointError past the file's end."""
        start = self.offset
        if nbytes > len(self.data) - start:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: {self.what} at byte {start} needs {nbytes} bytes,"
                f" the file has {len(self.data)}; download it again"
            )
        self.offset = start + nbytes
        return start

    def u32(self) -> int:
        return int.from_bytes(self.data[self.take(4) : self.offset], "little")

    def u64(self) -> int:
        return int.from_bytes(self.data[self.take(8) : self.offset], "little")

    def text(self) -> str:
        start = self.take(self.u64())
        return decode_text(self.path, self.data[start : self.offset], start)

    def strings(self, count: int) -> Strings:
        """An array of strings. Written out flat: this loop runs once a piece and once a merge."""
        starts: list[int] = []
        sizes: list[int] = []
        data, end, offset, unpack = self.data, len(self.data), self.offset, _U64.unpack_from
        for _ in range(count):
            offset += 8
            size = unpack(data, offset - 8)[0] if offset <= end else end
            if size > end - offset:
                self.offset = offset
                self.take(size)
            starts.append(offset)
            sizes.append(size)
            offset += size
        self.offset = offset
        return Strings(self.path, data, starts, sizes)

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array(self.u32(), self.u64())
        return self.numbers(kind, 1)[0].item()

    def array(self, kind: int, count: int) -> Any:
        """Strings, or a read-only numpy array over the map."""
        if kind == STRING:
            self.room_for(count, 8)
            return self.strings(count)
        return self.numbers(kind, count)

    def numbers(self, kind: int, count: int) -> Any:
        dtype = SCALARS.get(kind)
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: {self.what} at byte {self.offset} has the unknown value type {kind};"
                " the file is damaged or newer than this reader: download it again"
            )
        start = self.take(count * dtype.itemsize)
        return np.frombuffer(self.data, dtype, count, start)

    def room_for(self, count: int, nbytes: int) -> None:
        """Raise unless `count` things of at least `nbytes` can still follow, before looping over them."""
        position = self.offset
        self.take(count * nbytes)
        self.offset = position


def parse(path: Path) -> GgufFile:
    """Parse header, metadata and tensor directory; tensor data is not touched.

    Raises CheckpointError for a file that is missing, truncated, damaged, of another format or one of several parts.
    """
    data = map_file(path)
    cursor = _Cursor(path, data)
    tensor_count, metadata_count = _header(cursor)
    metadata: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(metadata_count):
        cursor.what = "the next metadata key"
        key = cursor.text()
        cursor.what = f"metadata key {key}"
        kind, start = cursor.u32(), cursor.offset
        metadata[key] = cursor.value(kind)
        spans[key] = (start, cursor.offset)
    parts = metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(
            f"{path} is one of {parts} parts; join them first: llama-gguf-split --merge"
        )
    tensors = _tensors(cursor, tensor_count, metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT))
    return GgufFile(path, data, metadata, spans, tensors)


def _header(cursor: _Cursor) -> tuple[int, int]:
    """Tensor and metadata counts, checked against the file's size."""
    magic = cursor.data[:4]
    if magic != MAGIC:
        raise CheckpointError(
            f"{cursor.path} begins with {magic!r}, not {MAGIC!r}: it is no GGUF file; check the path"
        )
    cursor.offset = 4
    version = cursor.u32()
    if version not in VERSIONS:
        raise CheckpointError(
            f"{cursor.path} is GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]},"
            " little-endian, are supported: convert the model again"
        )
    tensor_count, metadata_count = cursor.u64(), cursor.u64()
    cursor.room_for(tensor_count, 24)
    cursor.room_for(metadata_count, 13)
    return tensor_count, metadata_count


def _tensors(cursor: _Cursor, count: int, alignment: Any) -> dict[str, RawTensor]:
    entries = [_tensor(cursor) for _ in range(count)]
    if not isinstance(alignment, int) or alignment <= 0:
        raise CheckpointError(
            f"{cursor.path}: {ALIGNMENT_KEY} is {alignment!r}, not a positive number; download it again"
        )
    base = math.ceil(cursor.offset / alignment) * alignment
    tensors: dict[str, RawTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise CheckpointError(
                f"{cursor.path} lists tensor {name} twice; convert the model again"
            )
        tensors[name] = RawTensor(name, shape, kind, base + offset)
    return tensors


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    cursor.what = "the next tensor's name"
    name = cursor.text()
    cursor.what = f"the entry of tensor {name}"
    dims = cursor.u32()
    if dims > MAX_DIMS:
        raise CheckpointError(
            f"{cursor.path}: tensor {name} has {dims} dimensions, the limit is {MAX_DIMS}; download it again"
        )
    shape = tuple(cursor.u64() for _ in range(dims))[::-1]
    return name, shape, cursor.u32(), cursor.u64()
