"""Executables on disk: what `onechip compile --out` saves and `serve --programs` loads without tracing anything.

A folder holds one file a program and `programs.json`, which says what they were compiled for: versions, device, host
features and every static shape. A program is a machine's code; one that was made for anything else is refused with the
difference, never tried. The files hold pickles: load none but
your own. Owns that folder's layout. Loading compiles nothing and traces nothing.
"""

import hashlib
import json
import pickle
import platform
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from onechip import __version__
from onechip.engine.programs import (
    Program,
    Programs,
    Shapes,
    name_of,
)
from onechip.errors import ConfigError

MANIFEST = "programs.json"
_REMEDY = "compile them here with onechip compile --out, or leave --programs out"


@contextmanager
def no_cache() -> Generator[None]:
    """Without jax's persistent compile cache, whoever set it up: a record's seconds are the compiler's own, and on a
    CPU an executable that came from the cache lacks its functions when it is saved again.
    """
    setting = "jax_enable_compilation_cache"
    before = getattr(jax.config, setting)
    jax.config.update(setting, False)
    compilation_cache.reset_cache()  # it asks the configuration once
    try:
        yield
    finally:
        jax.config.update(setting, before)
        compilation_cache.reset_cache()


def save(programs: Mapping[Program, Any], shapes: Shapes, device: Any, folder: Path) -> int:
    """Write compiled programs and the manifest, the manifest last; returns their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    total = 0
    for program, compiled in programs.items():
        code, arguments, results = serialize_executable.serialize(compiled)
        data = pickle.dumps((code, _skeleton(arguments), _skeleton(results)))
        (folder / f"{name_of(program)}.bin").write_bytes(data)
        files[name_of(program)] = hashlib.sha256(data).hexdigest()
        total += len(data)
    manifest = {"made_for": made_for(shapes, device), "programs": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
    return total


def load(folder: Path, wanted: list[Program], programs: Programs, device: Any) -> None:
    """Put the wanted executables into `programs.ready`. Raises ConfigError when they are not for this engine."""
    manifest = _read(folder)
    _compare(manifest["made_for"], made_for(programs.shapes, device), folder)
    for program in wanted:
        name = name_of(program)
        path = folder / f"{name}.bin"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}; {_REMEDY}") from error
        if hashlib.sha256(data).hexdigest() != manifest["programs"].get(name):
            raise ConfigError(f"{path} is not what {MANIFEST} lists; {_REMEDY}")
        code, *skeletons = pickle.loads(data)
        arguments, results = map(jax.tree.structure, skeletons)
        programs.ready[program] = serialize_executable.deserialize_and_load(
            code, arguments, results, backend=device.client, execution_devices=[device]
        )


def _skeleton(tree: Any) -> Any:
    """A tree of numbers with this structure: jax's own description of one with our classes cannot be pickled."""
    return jax.tree.unflatten(tree, range(tree.num_leaves))


def made_for(shapes: Shapes, device: Any) -> dict[str, str]:
    """Everything that an executable depends on, as text."""
    client = device.client
    return {
        "onechip": __version__,
        "jax": jax.__version__,
        "platform": f"{device.platform} {client.platform_version}",
        "device": device.device_kind,
        "host": _host_features() if device.platform == "cpu" else "any",
        "shapes": hashlib.sha256(repr(shapes).encode()).hexdigest(),
        "shape": (
            f"{shapes.config.family}, {len(shapes.config.layers)} layers"
            f"{' in loops' if shapes.config.scan_layers else ''}, {shapes.dtype} weights, "
            f"{shapes.kv_dtype} K/V, {shapes.max_seqs} sequences, pages {dict(shapes.pages)} of "
            f"{shapes.page_size}, tables {shapes.full_columns}/{shapes.sliding_columns}"
        ),
    }


def _host_features() -> str:
    """XLA's CPU compiler uses whatever the host has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    flags = next(
        (line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))), ""
    )
    return f"{platform.machine()} {hashlib.sha256(' '.join(sorted(flags.split())).encode()).hexdigest()[:16]}"


def _read(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        return {"made_for": dict(manifest["made_for"]), "programs": dict(manifest["programs"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {_REMEDY}") from error


def _compare(found: Mapping[str, str], wanted: Mapping[str, str], folder: Path) -> None:
    for key, value in wanted.items():
        if found.get(key) != value and key != "shapes":
            raise ConfigError(
                f"the programs in {folder} are for {key} {found.get(key)!r}, this engine is {value!r}; {_REMEDY}"
            )
    if found.get("shapes") != wanted["shapes"]:
        raise ConfigError(
            f"the programs in {folder} are for another model or other flags; {_REMEDY}"
        )
