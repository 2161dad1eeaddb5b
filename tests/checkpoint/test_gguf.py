"""GGUF files: block layouts, names, damage."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tests.checkpoint.writers import GOLDEN, gguf_metadata, gguf_tensors, write_gguf

from onechip.checkpoint.base import BLOCK_VALUES, READ_DTYPES
from onechip.checkpoint.gguf import BLOCK_TYPES, PLAIN_TYPES, open_gguf
from onechip.errors import CheckpointError

TINY = {
    "model_type": "gemma3_text",
    "max_position_embeddings": 64,
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "head_dim": 4,
    "sliding_window": 4,
    "rope_parameters": {"full_attention": {"rope_theta": 1e6}},
    "layer_types": ["full_attention"],
}


def half(raw, at):
    return float(np.frombuffer(bytes(raw[at : at + 2]), "<f2")[0])


def nibbles(raw):
    return [b & 15 for b in raw] + [b >> 4 for b in raw]


def fifth_bits(raw):
    word = int.from_bytes(bytes(raw), "little")
    return [((word >> j) & 1) << 4 for j in range(32)]


def k_scales(raw):
    """Scale and minimum of the eight sub-blocks, six bits each, from 12 bytes."""
    low = [(raw[j] & 63, raw[4 + j] & 63) for j in range(4)]
    high = [
        ((raw[4 + j] & 15) | ((raw[j - 4] >> 6) << 4), (raw[4 + j] >> 4) | ((raw[j] >> 6) << 4))
        for j in range(4, 8)
    ]
    return low + high


def k_block(raw, fives, nibble_bytes):
    d, dmin = half(raw, 0), half(raw, 2)
    values = []
    for sub, (scale, minimum) in enumerate(k_scales(raw[4:16])):
        part = nibble_bytes[32 * (sub // 2) : 32 * (sub // 2) + 32]
        four = [b & 15 if sub % 2 == 0 else b >> 4 for b in part]
        fifth = [((b >> sub) & 1) << 4 for b in fives] if len(fives) else [0] * 32
        values += [d * scale * (q + h) - dmin * minimum for q, h in zip(four, fifth, strict=True)]
    return values


def q6_k_block(raw):
    scales = np.frombuffer(bytes(raw[192:208]), np.int8)
    levels = []
    for part in range(2):
        low, high = raw[64 * part : 64 * part + 64], raw[128 + 32 * part : 160 + 32 * part]
        for quarter in range(4):
            source = low[32 * (quarter % 2) : 32 * (quarter % 2) + 32]
            four = [b & 15 if quarter < 2 else b >> 4 for b in source]
            two = [(b >> (2 * quarter)) & 3 for b in high]
            levels += [q | (h << 4) for q, h in zip(four, two, strict=True)]
    return [half(raw, 208) * int(scales[i // 16]) * (q - 32) for i, q in enumerate(levels)]


# The layouts, written out from their description, not from any library.
LAYOUTS = {
    "Q4_0": lambda raw: [half(raw, 0) * (q - 8) for q in nibbles(raw[2:])],
    "Q4_1": lambda raw: [half(raw, 0) * q + half(raw, 2) for q in nibbles(raw[4:])],
    "Q5_0": lambda raw: [
        half(raw, 0) * ((q | h) - 16)
        for q, h in zip(nibbles(raw[6:]), fifth_bits(raw[2:6]), strict=True)
    ],
    "Q5_1": lambda raw: [
        half(raw, 0) * (q | h) + half(raw, 2)
        for q, h in zip(nibbles(raw[8:]), fifth_bits(raw[4:8]), strict=True)
    ],
    "Q8_0": lambda raw: [half(raw, 0) * int(q) for q in np.uint8(raw[2:]).view(np.int8)],
    "Q4_K": lambda raw: k_block(raw, [], raw[16:]),
    "Q5_K": lambda raw: k_block(raw, raw[16:48], raw[48:]),
    "Q6_K": q6_k_block,
}
HALVES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(kind, rows, width, seed=3):
    """Rows of random blocks whose 16-bit floats are ordinary numbers."""
    block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * width // block, nbytes), dtype=np.uint8)
    for at in HALVES_AT.get(kind, (0,)):
        scale = rng.uniform(0.01, 2, len(blocks)).astype("<f2")
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def tiny_file(path, embedding, kind="F32", extra=None, types=None):
    tensors = {"token_embd.weight": embedding} | (extra or {})
    kinds = {"token_embd.weight": kind} | (types or {})
    return write_gguf(path / "x.gguf", "gemma3", gguf_metadata(TINY), tensors, kinds)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_decode_as_their_layout_says(tmp_path, kind):
    raw = random_blocks(kind, rows=6, width=256)
    checkpoint = open_gguf(tiny_file(tmp_path, raw, kind), "x")
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])
    expected = np.array([LAYOUTS[kind](block.tolist()) for block in blocks]).reshape(6, 256)
    read = checkpoint.read("embed_tokens.weight", "float32")
    np.testing.assert_allclose(read, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    info = checkpoint.tensors["embed_tokens.weight"]
    assert (info.dtype, info.shape, info.nbytes) == (kind, (6, 256), raw.nbytes)


@pytest.mark.parametrize("target", READ_DTYPES)
@pytest.mark.parametrize("kind", [*PLAIN_TYPES, *BLOCK_TYPES])
def test_every_type_reads_as_every_target_type_aligned(tmp_path, kind, target):
    if kind in PLAIN_TYPES:
        source = np.linspace(-3, 3, 512, dtype=np.float32).reshape(2, 256)
        stored = quantize(source, GGMLQuantizationType[kind])
        values = stored.view(PLAIN_TYPES[kind]).astype(np.float32).reshape(2, 256)
        raw = source
    else:
        raw = random_blocks(kind, rows=2, width=256)
        values = dequantize(raw, GGMLQuantizationType[kind])
    read = open_gguf(tiny_file(tmp_path, raw, kind), "x").read("embed_tokens.weight", target)
    assert np.array_equal(read, values.astype(READ_DTYPES[target]))
    assert read.ctypes.data % 64 == 0
    assert read.flags.c_contiguous


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_reading_in_blocks_equals_decoding_at_once(tmp_path, kind):
    rows = 2 * BLOCK_VALUES // 256 + 3
    raw = random_blocks(kind, rows=rows, width=256)
    read = open_gguf(tiny_file(tmp_path, raw, kind), "x").read("embed_tokens.weight", "float32")
    assert np.array_equal(read, dequantize(raw, GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_weights_come_back_within_a_step(tmp_path, kind):
    source = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)
    levels = {"4": 8, "5": 16, "8": 127}[kind[1]]
    read = open_gguf(tiny_file(tmp_path, source, kind), "x").read("embed_tokens.weight", "float32")
    assert np.abs(read - source).max() < 1.05 * np.abs(source).max() / levels


def golden_gguf(path, name, types=None):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    golden = load_file(GOLDEN / name / "model.safetensors")
    tensors = gguf_tensors(config, golden)
    arch = "gemma4" if config["model_type"] == "gemma4_text" else "gemma3"
    file = write_gguf(path / f"{name}.gguf", arch, gguf_metadata(config), tensors, types)
    return file, {key.removeprefix("model."): array for key, array in golden.items()}


@pytest.mark.parametrize(
    "name",
    ["gemma3-mini", "gemma4-e2b-mini", "gemma4-e4b-mini", "gemma4-31b-mini", "gemma4-26b-a4b-mini"],
)
def test_a_golden_written_as_gguf_comes_back_under_the_reference_names(tmp_path, name):
    file, golden = golden_gguf(tmp_path, name)
    checkpoint = open_gguf(file, "x")
    assert checkpoint.tensors.keys() == golden.keys()
    assert checkpoint.ignored == (("rope_freqs.weight",) if "gemma4" in name else ())
    for key, expected in golden.items():
        read = checkpoint.read(key, "float32")
        assert read.shape == expected.shape == checkpoint.tensors[key].shape
        # Gemma 3 norms pass through w + 1 in float32; everything else is untouched.
        tolerance = 1.2e-7 * (1 + np.abs(expected)) if name == "gemma3-mini" else 0
        exact = not key.endswith("norm.weight")
        assert (np.abs(read - expected) <= (0 if exact else tolerance)).all(), key


def test_expert_halves_apart_equal_experts_joined(tmp_path):
    file, golden = golden_gguf(tmp_path, "gemma4-26b-a4b-mini")
    joined = open_gguf(file, "x")
    config = json.loads((GOLDEN / "gemma4-26b-a4b-mini" / "config.json").read_text())
    tensors = {}
    for name, array in gguf_tensors(config, {f"model.{k}": v for k, v in golden.items()}).items():
        if name.endswith("ffn_gate_up_exps.weight"):
            half = array.shape[1] // 2
            # The second half first: the order in the file must not matter.
            tensors[name.replace("gate_up", "up")] = array[:, half:].copy()
            tensors[name.replace("gate_up", "gate")] = array[:, :half].copy()
        else:
            tensors[name] = array
    types = {"blk.1.ffn_up_exps.weight": "F16"}
    apart = open_gguf(
        write_gguf(tmp_path / "a.gguf", "gemma4", gguf_metadata(config), tensors, types), "x"
    )
    assert apart.config == joined.config
    for name in joined.tensors:
        assert apart.tensors[name].shape == joined.tensors[name].shape
        same = apart.read(name, "float16"), joined.read(name, "float16")
        assert np.array_equal(*same), name
    assert apart.tensors["layers.1.experts.gate_up_proj"].dtype == "F32+F16"


def test_half_of_the_experts_is_refused(tmp_path):
    extra = {"blk.0.ffn_up_exps.weight": np.ones((2, 3, 4), np.float32)}
    with pytest.raises(
        CheckpointError, match=r"needs ffn_gate_exps\.weight and ffn_up_exps\.weight"
    ):
        open_gguf(tiny_file(tmp_path, np.ones((4, 256), np.float32), extra=extra), "x")


def test_a_tensor_outside_the_tables_is_handed_on_under_its_own_name(tmp_path):
    extra = {"blk.0.attn_q.bias": np.ones(4, np.float32), "mm.0.weight": np.ones(4, np.float32)}
    checkpoint = open_gguf(tiny_file(tmp_path, np.ones((4, 256), np.float32), extra=extra), "x")
    assert "blk.0.attn_q.bias" in checkpoint.tensors
    assert checkpoint.ignored == ("mm.0.weight",)


def test_an_unsupported_type_names_tensor_and_type(tmp_path):
    extra = {"blk.0.attn_q.weight": np.zeros((2, 84), np.uint8)}
    file = tiny_file(
        tmp_path, np.ones((4, 256), np.float32), extra=extra, types={"blk.0.attn_q.weight": "Q2_K"}
    )
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.attn_q\.weight has type Q2_K; supported are"
    ):
        open_gguf(file, "x")


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    checkpoint = open_gguf(tiny_file(tmp_path, np.ones((4, 256), np.float32)), "x")
    with pytest.raises(CheckpointError, match=r"no tensor norm\.weight"):
        checkpoint.read("norm.weight", "float32")


def vocabulary_file(tmp_path) -> Path:
    """A small file with everything in it: strings, arrays, a template, quantised and plain tensors."""
    metadata = gguf_metadata(TINY) | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab"],
        "tokenizer.ggml.scores": [-1000.0, -1000.0, -1000.0, -1000.0, 0.0, 0.0, -1.0],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 1, 1, 1],
        "tokenizer.chat_template": "{{ bos_token }}",
    }
    tensors = {
        "token_embd.weight": random_blocks("Q4_0", 7, 256),
        "output_norm.weight": np.full(256, 3, np.float32),
    }
    return write_gguf(
        tmp_path / "v.gguf", "gemma3", metadata, tensors, {"token_embd.weight": "Q4_0"}
    )


def test_vocabulary_and_template_are_handed_on(tmp_path):
    checkpoint = open_gguf(vocabulary_file(tmp_path), "x")
    vocabulary = checkpoint.tokenizer_files()
    assert list(vocabulary.pieces) == ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab"]
    assert vocabulary.pieces[-1] == "ab"
    assert vocabulary.pieces[1:3] == ["<eos>", "<bos>"]
    assert list(vocabulary.scores)[-1] == -1.0
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id, vocabulary.pad_id) == (
        2,
        1,
        3,
        0,
    )
    assert checkpoint.chat_template == "{{ bos_token }}"
    assert np.array_equal(checkpoint.read("norm.weight", "float32"), np.full(256, 2, np.float32))


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path):
    checkpoint = open_gguf(tiny_file(tmp_path, np.ones((4, 256), np.float32)), "x")
    assert checkpoint.tokenizer_files() is None
    assert checkpoint.chat_template is None


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path):
    whole = vocabulary_file(tmp_path).read_bytes()
    cut = tmp_path / "cut.gguf"
    # The writer pads the last tensor, so the last bytes that matter end before the file does.
    for length in (*range(0, len(whole) - 64, 7), len(whole) - 64):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=re.escape(str(cut))):
            open_gguf(cut, "x")


def test_a_cut_tensor_is_named_with_its_offset(tmp_path):
    whole = vocabulary_file(tmp_path).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-512])
    with pytest.raises(
        CheckpointError, match=r"tensor output_norm\.weight at byte \d+ needs 1024 bytes"
    ):
        open_gguf(tmp_path / "cut.gguf", "x")


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None
)
@given(st.data())
def test_a_damaged_file_opens_or_fails_with_one_typed_error(tmp_path, data):
    whole = bytearray(vocabulary_file(tmp_path).read_bytes())
    header = len(whole) - 1024 - 7 * 144
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header))
        whole[at] = data.draw(st.one_of(st.integers(0, 16), st.just(255)))
    (tmp_path / "damaged.gguf").write_bytes(whole)
    message = "damaged.gguf"
    try:
        vocabulary = open_gguf(tmp_path / "damaged.gguf", "x").tokenizer_files()
        list(vocabulary.pieces if vocabulary else ())
    except CheckpointError as error:
        message = str(error)
    assert "damaged.gguf" in message


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"", "is empty"),
        (b"PK\3\4" + bytes(40), "no GGUF file"),
        (b"GGUF\1\0\0\0" + bytes(40), "version 1"),
        (b"GGUF\0\0\0\3" + bytes(40), "little-endian"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16, "truncated"),
    ],
)
def test_another_kind_of_file_is_refused(tmp_path, start, message):
    (tmp_path / "x.gguf").write_bytes(start)
    with pytest.raises(CheckpointError, match=message):
        open_gguf(tmp_path / "x.gguf", "x")


def test_one_part_of_several_is_refused(tmp_path):
    metadata = gguf_metadata(TINY) | {"split.count": 3}
    file = write_gguf(tmp_path / "x.gguf", "gemma3", metadata, {})
    with pytest.raises(CheckpointError, match="one of 3 parts; join them"):
        open_gguf(file, "x")


def test_another_architecture_is_refused_by_name(tmp_path):
    file = write_gguf(tmp_path / "x.gguf", "llama", {}, {"token_embd.weight": np.ones((2, 2))})
    with pytest.raises(CheckpointError, match="architecture 'llama'; supported are gemma3, gemma4"):
        open_gguf(file, "x")
