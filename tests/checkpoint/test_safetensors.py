"""Safetensors directories: same tensors whatever the layout, one typed error for whatever is broken."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tests.checkpoint.writers import GOLDEN, STORED, safetensors_bytes, write_directory

from onechip.checkpoint.base import READ_DTYPES
from onechip.checkpoint.safetensors import open_directory, read_header
from onechip.errors import CheckpointError

NAMES = (
    "embed_tokens.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.layer_scalar",
    "norm.weight",
)
GOLDENS = ("gemma3-mini", "gemma4-e2b-mini", "gemma4-26b-a4b-mini")


def some_tensors(prefix="model.", dtype=np.float32):
    rng = np.random.default_rng(7)
    shapes = ((12, 8), (4, 8), (1,), (8,))
    return {
        prefix + name: rng.standard_normal(shape).astype(dtype)
        for name, shape in zip(NAMES, shapes, strict=True)
    }


def values(checkpoint, dtype="float32"):
    return {name: checkpoint.read(name, dtype) for name in checkpoint.tensors}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert np.array_equal(left[name], right[name]), name


@pytest.mark.parametrize("golden", GOLDENS)
def test_goldens_read_as_the_safetensors_library_reads_them(golden):
    expected = load_file(GOLDEN / golden / "model.safetensors")
    checkpoint = open_directory(GOLDEN / golden, golden)
    assert_same(values(checkpoint), {n.removeprefix("model."): a for n, a in expected.items()})
    assert checkpoint.ignored == ()
    assert checkpoint.config == json.loads((GOLDEN / golden / "config.json").read_text())
    assert checkpoint.generation_config["eos_token_id"] == [1, 106]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("target", READ_DTYPES)
def test_every_stored_type_reads_as_every_target_type(tmp_path, stored, target):
    tensors = some_tensors(dtype=STORED[stored])
    checkpoint = open_directory(write_directory(tmp_path, tensors), "x")
    for name, array in tensors.items():
        read = checkpoint.read(name.removeprefix("model."), target)
        assert np.array_equal(read, array.astype(READ_DTYPES[target]))
        assert read.ctypes.data % 64 == 0
        assert checkpoint.tensors[name.removeprefix("model.")].dtype == stored
        assert checkpoint.tensors[name.removeprefix("model.")].nbytes == array.nbytes


def test_a_read_into_a_given_array_equals_a_fresh_one(tmp_path):
    checkpoint = open_directory(write_directory(tmp_path, some_tensors()), "x")
    buffer = np.zeros((3, 12, 8), ml_dtypes.bfloat16)
    assert checkpoint.read("embed_tokens.weight", "bfloat16", buffer[1]) is not None
    assert np.array_equal(buffer[1], checkpoint.read("embed_tokens.weight", "bfloat16"))
    assert not buffer[0].any()
    assert not buffer[2].any()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_shards_equal_one_file(tmp_path, shards):
    single = open_directory(write_directory(tmp_path / "one", some_tensors()), "x")
    sharded = open_directory(write_directory(tmp_path / "n", some_tensors(), shards=shards), "x")
    assert_same(values(single), values(sharded))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_all_prefixes_give_the_same_names(tmp_path, prefix):
    plain = open_directory(write_directory(tmp_path / "plain", some_tensors()), "x")
    other = open_directory(write_directory(tmp_path / "other", some_tensors(prefix)), "x")
    assert_same(values(plain), values(other))


@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
def test_the_head_has_one_name(tmp_path, head):
    tensors = some_tensors() | {head: np.ones((12, 8), np.float32)}
    assert "lm_head.weight" in open_directory(write_directory(tmp_path, tensors), "x").tensors


@pytest.mark.parametrize(
    "tower",
    [
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
        "model.audio_tower.layers.0.self_attn.q_proj.linear.weight",
        "model.embed_vision.embedding_projection.weight",
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
        "model.multi_modal_projector.mm_input_projection_weight",
    ],
)
def test_towers_are_listed_and_never_taken_for_text(tmp_path, tower):
    text = some_tensors("model.language_model.")
    # An integer type: a tower's types must not matter either.
    tensors = {tower: np.ones(3, np.int64)} | text
    checkpoint = open_directory(write_directory(tmp_path, tensors), "x")
    assert checkpoint.ignored == (tower,)
    assert set(checkpoint.tensors) == set(NAMES)


def test_an_unknown_tensor_is_handed_on_under_its_own_name(tmp_path):
    tensors = some_tensors() | {"model.surprise.weight": np.ones(2, np.float32)}
    checkpoint = open_directory(write_directory(tmp_path, tensors), "x")
    assert "model.surprise.weight" in checkpoint.tensors


def test_one_tensor_under_two_prefixes_is_refused(tmp_path):
    tensors = some_tensors() | some_tensors("model.language_model.")
    with pytest.raises(CheckpointError, match=r"model\.language_model\.embed_tokens\.weight"):
        open_directory(write_directory(tmp_path, tensors), "x")


def test_one_tensor_in_two_shards_is_refused(tmp_path):
    write_directory(tmp_path, some_tensors(), shards=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    second.write_bytes(safetensors_bytes(some_tensors()))
    with pytest.raises(CheckpointError, match="over again"):
        open_directory(tmp_path, "x")


def test_a_missing_shard_is_named(tmp_path):
    write_directory(tmp_path, some_tensors(), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the shard model-00002-of-00003\.safetensors"):
        open_directory(tmp_path, "x")


def test_a_tensor_that_only_the_index_knows_is_named(tmp_path):
    write_directory(tmp_path, some_tensors(), shards=1)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.1.layer_scalar"] = "model-00001-of-00001.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks tensor model\.layers\.1\.layer_scalar"):
        open_directory(tmp_path, "x")


def test_an_index_cannot_reach_outside_its_directory(tmp_path):
    write_directory(tmp_path, some_tensors(), shards=1)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"norm.weight": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="no file in its own directory"):
        open_directory(tmp_path, "x")


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path):
    whole = safetensors_bytes(some_tensors())
    write_directory(tmp_path, {})
    for length in range(0, len(whole), 5):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_directory(tmp_path, "x")


def test_a_cut_tensor_is_named_with_needed_and_actual_bytes(tmp_path):
    whole = safetensors_bytes(some_tensors())
    write_directory(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    wanted = rf"model\.norm\.weight needs bytes \d+ to {len(whole)}, the file has {len(whole) - 1}"
    with pytest.raises(CheckpointError, match=wanted):
        open_directory(tmp_path, "x")


@given(st.data())
def test_a_damaged_file_opens_or_fails_with_one_typed_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    whole = bytearray(safetensors_bytes(some_tensors()))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    message = str(path)
    try:
        read_header(path)
    except CheckpointError as error:
        message = str(error)
    assert str(path) in message


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, true]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": 1}',
    ],
)
def test_malformed_headers_are_refused_by_name(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        read_header(path)


def test_a_header_length_beyond_the_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 63).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="header of 9223372036854775808 bytes"):
        read_header(path)


def test_a_size_that_contradicts_the_shape_is_refused(tmp_path):
    header = b'{"model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}'
    write_directory(tmp_path, {})
    raw = len(header).to_bytes(8, "little") + header + bytes(16)
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match="needs 16 bytes, its header gives 8"):
        open_directory(tmp_path, "x")


def test_an_empty_tensor_is_legal(tmp_path):
    tensors = {"model.norm.weight": np.zeros((0, 4), np.float32)}
    checkpoint = open_directory(write_directory(tmp_path, tensors), "x")
    assert checkpoint.read("norm.weight", "bfloat16").shape == (0, 4)


def test_an_unsupported_type_names_the_tensor(tmp_path):
    tensors = {"model.norm.weight": np.zeros(4, np.int8)}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored as INT8"):
        open_directory(write_directory(tmp_path, tensors), "x")


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    checkpoint = open_directory(write_directory(tmp_path, some_tensors()), "x")
    with pytest.raises(CheckpointError, match=r"no tensor layers\.9\.layer_scalar"):
        checkpoint.read("layers.9.layer_scalar", "float32")


@pytest.mark.parametrize("nested", [False, True])
def test_quantised_weights_are_refused_by_method(tmp_path, nested):
    quantised = {"quantization_config": {"quant_method": "compressed-tensors"}}
    config = {"text_config": quantised} if nested else quantised
    with pytest.raises(CheckpointError, match=r"'compressed-tensors'.*not supported yet.*GGUF"):
        open_directory(write_directory(tmp_path, some_tensors(), config), "x")


def test_random_weights_need_only_the_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma4_text"}')
    checkpoint = open_directory(tmp_path, "x", random_weights=True)
    assert checkpoint.tensors == {}
    assert checkpoint.generation_config == {}
    assert checkpoint.chat_template is None
    assert checkpoint.tokenizer_files() is None
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_directory(tmp_path, "x")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", '{"a": 1, "a": 2}'])
def test_a_broken_config_is_refused_by_name(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_directory(tmp_path, "x", random_weights=True)


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        open_directory(tmp_path, "x")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "file", "tokenizer_config.json": {"chat_template": "x"}}, "file"),
        ({"tokenizer_config.json": {"chat_template": "text"}}, "text"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "tools"},
                        {"name": "default", "template": "plain"},
                    ]
                }
            },
            "plain",
        ),
        ({"chat_template.json": {"chat_template": "processor"}}, "processor"),
        ({"tokenizer_config.json": {}}, None),
    ],
)
def test_the_chat_template_is_found_where_it_may_be(tmp_path, files, expected):
    (tmp_path / "config.json").write_text("{}")
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert open_directory(tmp_path, "x", random_weights=True).chat_template == expected


def test_a_chat_template_of_another_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 7}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        open_directory(tmp_path, "x", random_weights=True)
