"""The config made from GGUF metadata describes the same model as the golden's config.json."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.checkpoint.writers import GOLDEN, gguf_metadata, gguf_tensors, write_gguf

from onechip.checkpoint.gguf import open_gguf
from onechip.errors import CheckpointError
from onechip.model.spec import model_config

GOLDENS = (
    "gemma3-mini",
    "gemma4-e2b-mini",
    "gemma4-e4b-mini",
    "gemma4-31b-mini",
    "gemma4-26b-a4b-mini",
)


def parts_of(name):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    golden = load_file(GOLDEN / name / "model.safetensors")
    arch = "gemma4" if config["model_type"] == "gemma4_text" else "gemma3"
    return config, arch, gguf_metadata(config), gguf_tensors(config, golden)


def opened(path, arch, metadata, tensors):
    return open_gguf(write_gguf(path / "x.gguf", arch, metadata, tensors), "x")


@pytest.mark.parametrize("name", GOLDENS)
def test_the_model_is_the_one_of_the_config_file(tmp_path, name):
    config, arch, metadata, tensors = parts_of(name)
    found = opened(tmp_path, arch, metadata, tensors).config
    # Stop ids differ on purpose: the golden has no vocabulary, and Gemma 4 files always get all three.
    same = {"eos_token_id": [1]}
    assert model_config(dict(found) | same) == model_config(config | same)
    assert found["eos_token_id"] == ([1, 106, 50] if arch == "gemma4" else [1])


@pytest.mark.parametrize("name", ["gemma3-mini", "gemma4-26b-a4b-mini"])
def test_every_key_that_is_read_is_required_by_name(tmp_path, name):
    _, arch, metadata, tensors = parts_of(name)
    optional = {
        "gemma3": {"gemma3.attention.sliding_window_pattern"},
        "gemma4": {"gemma4.expert_count", "tokenizer.ggml.eos_token_id"},
    }
    for key in metadata.keys() - optional[arch] - {"tokenizer.ggml.unknown_token_id"}:
        fewer = {other: value for other, value in metadata.items() if other != key}
        with pytest.raises(CheckpointError) as caught:
            opened(tmp_path, arch, fewer, tensors)
        assert key in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma3-mini", "block_count", 1 << 31),
        ("gemma3-mini", "block_count", 0),
        ("gemma3-mini", "attention.head_count", 0),
        ("gemma3-mini", "attention.head_count", "four"),
        ("gemma3-mini", "attention.value_length", 8),
        ("gemma3-mini", "attention.sliding_window_pattern", 0),
        ("gemma3-mini", "rope.scaling.type", "yarn"),
        ("gemma4-e2b-mini", "attention.sliding_window_pattern", [True, False]),
        ("gemma4-e2b-mini", "feed_forward_length", [96] * 9 + [192]),
        ("gemma4-e2b-mini", "attention.head_count_kv", [1] * 9 + [2]),
        ("gemma4-e2b-mini", "attention.head_count_kv", [1, 1, 1, 1, 2] * 2),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(tmp_path, name, key, value):
    _, arch, metadata, tensors = parts_of(name)
    with pytest.raises(CheckpointError, match=f"{arch}.{key}".replace(".", r"\.")):
        opened(tmp_path, arch, metadata | {f"{arch}.{key}": value}, tensors)


def test_gemma3_pattern_is_every_sixth_where_the_file_is_silent(tmp_path):
    _, arch, metadata, tensors = parts_of("gemma3-mini")
    del metadata["gemma3.attention.sliding_window_pattern"]
    kinds = opened(tmp_path, arch, metadata, tensors).config["layer_types"]
    assert [index for index, kind in enumerate(kinds) if kind == "full_attention"] == [5]


def test_gemma3_ropes_are_read_where_the_file_has_them(tmp_path):
    _, arch, metadata, tensors = parts_of("gemma3-mini")
    extra = {
        "gemma3.rope.freq_base_swa": 5000.0,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    ropes = opened(tmp_path, arch, metadata | extra, tensors).config["rope_parameters"]
    assert ropes == {
        "full_attention": {"factor": 8.0, "rope_theta": 1e6, "rope_type": "linear"},
        "sliding_attention": {"rope_theta": 5000.0, "rope_type": "default"},
    }


@pytest.mark.parametrize(("piece", "eos"), [("<end_of_turn>", [1, 106]), ("turn", [1])])
def test_gemma3_stops_at_the_end_of_turn_its_vocabulary_has(tmp_path, piece, eos):
    _, arch, metadata, tensors = parts_of("gemma3-mini")
    pieces = [f"<{index}>" for index in range(200)]
    pieces[106] = piece
    extra = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces}
    checkpoint = opened(tmp_path, arch, metadata | extra, tensors)
    assert checkpoint.generation_config["eos_token_id"] == eos
    assert checkpoint.config["eos_token_id"] == eos


def test_sampling_defaults_are_those_of_the_file(tmp_path):
    _, arch, metadata, tensors = parts_of("gemma3-mini")
    extra = {"general.sampling.top_k": 64, "general.sampling.temp": 0.5}
    assert opened(tmp_path, arch, metadata | extra, tensors).generation_config == {
        "bos_token_id": 2,
        "eos_token_id": [1],
        "pad_token_id": 0,
        "top_k": 64,
        "temperature": 0.5,
    }


@pytest.mark.parametrize("values", [None, [1.0, 1e30] * 8, [2.0] * 16])
def test_gemma4_rotation_must_be_told_and_proportional(tmp_path, values):
    _, arch, metadata, tensors = parts_of("gemma4-e2b-mini")
    del tensors["rope_freqs.weight"]
    if values:
        tensors["rope_freqs.weight"] = np.float32(values)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        opened(tmp_path, arch, metadata, tensors)


def test_an_untied_head_is_seen(tmp_path):
    _, arch, metadata, tensors = parts_of("gemma4-e2b-mini")
    assert opened(tmp_path, arch, metadata, tensors).config["tie_word_embeddings"]
    tensors["output.weight"] = tensors["token_embd.weight"]
    untied = opened(tmp_path, arch, metadata, tensors)
    assert not untied.config["tie_word_embeddings"]
    assert "lm_head.weight" in untied.tensors


def test_a_vocabulary_without_weights_is_refused(tmp_path):
    _, arch, metadata, _ = parts_of("gemma4-e2b-mini")
    with pytest.raises(CheckpointError, match=r"no matrix|block_count"):
        opened(tmp_path, arch, metadata, {})
