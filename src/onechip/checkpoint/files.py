"""Opening files: JSON documents and memory maps, with errors that name the file.

Owns the translation of what the operating system and the JSON parser say into `CheckpointError`.
Refuses to know what is inside.
"""

import json
import mmap
from pathlib import Path
from typing import Any, cast

from onechip.errors import CheckpointError


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`. Raises CheckpointError naming `what`, also for a key that occurs
    twice.
    """
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{what} holds a JSON {type(value).__name__}, not an object; download it again"
        )
    return cast(dict[str, Any], value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in result if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} occurs twice")
    return result


def read_bytes(path: Path) -> bytes:
    """The bytes of a small file. Raises CheckpointError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError naming the file."""
    return parse_json(read_bytes(path), str(path))


def read_json_if_present(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} when there is no such file."""
    return read_json(path) if path.is_file() else {}


def map_file(path: Path) -> mmap.mmap:
    """A read-only memory map of a file. Raises CheckpointError when it is missing, unreadable or
    empty.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # mmap's answer to a file of no bytes
        raise CheckpointError(f"{path} is empty; download it again") from error
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file that the operating system would not give us."""
    reason = error.strerror or str(error)
    return CheckpointError(f"cannot read {path}: {reason}; check the path and its permissions")
