"""Weights reach the device as stored, or as drawn from the seed, without a second copy on the host."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.tiny_model import tiny_config

from onechip.checkpoint.source import open_checkpoint
from onechip.config import ModelConfig
from onechip.model import load, stack
from onechip.model.load import abstract_params, load_params, param_bytes, random_params
from onechip.model.params import parameter_specs
from onechip.model.spec import model_config

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
TINY = model_config(tiny_config())


def device() -> jax.Device:
    return jax.local_devices()[0]


def leaf(tree: Any, path: str) -> np.ndarray:
    for part in path.split("."):
        tree = tree[int(part) if part.isdigit() else part]
    return np.asarray(tree)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_the_files_tensors_joined(family: str):
    checkpoint = open_checkpoint(str(GOLDEN / family))
    config = model_config(checkpoint.config)
    tree = load_params(checkpoint, config, "float32", device())
    stored = {
        name.removeprefix("model."): x
        for name, x in load_file(GOLDEN / family / "model.safetensors").items()
    }
    for path, spec in parameter_specs(config).items():
        expected = np.concatenate([stored[name].astype(np.float32) for name in spec.sources])
        if "norm" in path and config.family == "gemma3":
            expected = expected + np.float32(1)
        np.testing.assert_array_equal(leaf(tree, path), expected, err_msg=path)


@pytest.mark.parametrize("family", [name for name in FAMILIES if "26b" not in name])
def test_stacked_weights_are_the_same_ones(family: str):
    checkpoint = open_checkpoint(str(GOLDEN / family))
    config = model_config(checkpoint.config)
    alone = load_params(checkpoint, config, "float32", device())
    config = replace(config, scan_layers=True)
    tree = load_params(checkpoint, config, "float32", device())
    assert len(tree["layers"]) < len(alone["layers"])
    for entry, layers in zip(tree["layers"], stack.entries(config), strict=True):
        for name, array in entry.items():
            parts = array if len(layers) > 1 else [array]
            for layer, part in zip(layers, parts, strict=True):
                np.testing.assert_array_equal(part, alone["layers"][layer][name])
    abstract = abstract_params(config, "float32")
    assert jax.tree.structure(tree) == jax.tree.structure(abstract)
    assert [x.shape for x in jax.tree.leaves(tree)] == [x.shape for x in jax.tree.leaves(abstract)]
    assert sum(x.nbytes for x in jax.tree.leaves(tree)) == param_bytes(config, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_matrices_and_keeps_vectors(dtype: Any):
    checkpoint = open_checkpoint(str(GOLDEN / "gemma4-e2b-mini"))
    config = model_config(checkpoint.config)
    whole = load_params(checkpoint, config, "float32", device())
    half = load_params(checkpoint, config, dtype, device())
    for path, spec in parameter_specs(config).items():
        expected = leaf(whole, path)
        if spec.use != "vector":
            expected = np.asarray(jnp.asarray(expected).astype(dtype))
        found = leaf(half, path)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected, err_msg=path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_random_weights_have_the_abstract_shapes_and_bytes(dtype: Any):
    tree = random_params(TINY, dtype, device())
    abstract = abstract_params(TINY, dtype)
    assert jax.tree.structure(tree) == jax.tree.structure(abstract)
    for real, described in zip(jax.tree.leaves(tree), jax.tree.leaves(abstract), strict=True):
        assert (real.shape, real.dtype) == (described.shape, described.dtype)
    assert sum(x.nbytes for x in jax.tree.leaves(tree)) == param_bytes(TINY, dtype)


def test_random_weights_follow_the_seed():
    one, same, other = (
        jax.tree.leaves(random_params(TINY, "float32", device(), seed)) for seed in (3, 3, 4)
    )
    for a, b, c in zip(one, same, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.ndim == 1 or not np.array_equal(a, c)


def test_random_matrices_keep_the_scale_of_what_passes_through():
    tree = random_params(TINY, "float32", device())
    for path, spec in parameter_specs(TINY).items():
        values = leaf(tree, path)
        if spec.use == "vector":
            assert (values == 1).all()
        elif values.size > 1000:
            assert values.std() == pytest.approx(spec.shape[-1] ** -0.5, rel=0.1)
            assert abs(values.mean()) < 0.1 * spec.shape[-1] ** -0.5
    assert not np.array_equal(leaf(tree, "layers.0.o_proj"), leaf(tree, "layers.2.o_proj"))


def test_progress_ends_at_all_bytes_and_never_goes_back():
    told: list[tuple[int, int]] = []
    random_params(
        TINY, "bfloat16", device(), progress=lambda done, total: told.append((done, total))
    )
    total = param_bytes(TINY, "bfloat16")
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (total, total) and {t for _, t in told} == {total}


def wide() -> ModelConfig:
    return model_config(
        tiny_config(vocab_size=200_000, vocab_size_per_layer_input=1000, hidden_size=64)
    )


def test_the_host_keeps_no_second_copy(monkeypatch: pytest.MonkeyPatch):
    """On a CPU the device's arrays are the host's buffers, and only one is being filled at a time."""
    buffers: dict[int, int] = {}

    def watch(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        made = real(shape, dtype)
        buffers[made.ctypes.data] = made.nbytes
        return made

    real = load.aligned_empty
    monkeypatch.setattr(load, "aligned_empty", watch)
    tree = random_params(wide(), "float32", jax.local_devices(backend="cpu")[0])
    leaves = [x for x in jax.tree.leaves(tree) if x.nbytes >= 1 << 12]
    adopted = [x for x in leaves if x.unsafe_buffer_pointer() in buffers]
    assert len(adopted) == len(leaves) > 10


def test_a_mismatch_is_found_before_a_byte_is_read():
    checkpoint = open_checkpoint(str(GOLDEN / "gemma3-mini"))
    config = json.loads((GOLDEN / "gemma3-mini" / "config.json").read_text())
    config["intermediate_size"] += 8

    class Unread:
        tensors, source = checkpoint.tensors, checkpoint.source

        def read(self, *_: Any) -> None:
            raise AssertionError("read although the shapes differ")

    with pytest.raises(Exception, match="has shape"):
        load_params(Unread(), model_config(config), "float32", device())  # type: ignore[arg-type]
