"""Writers of small checkpoints, independent of the readers under test."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
STORED = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def safetensors_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
    """A safetensors file; the stored types follow from the arrays."""
    names = {np.dtype(kind): name for name, kind in STORED.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        stop = len(data) + array.nbytes
        dtype = names.get(array.dtype, str(array.dtype).upper())
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), stop],
        }
        data += array.tobytes()
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def write_directory(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any] | None = None,
    *,
    shards: int = 0,
) -> Path:
    """A directory with config.json and one file of weights, or `shards` of them and an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {"model_type": "gemma3_text"}))
    if not shards:
        (path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return path
    weight_map: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::shards]}
        (path / name).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


LLAMA_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}


def llama_name(name: str) -> str:
    """llama.cpp's name for a reference name without prefix."""
    if not name.startswith("layers."):
        return LLAMA_NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{LLAMA_NAMES[rest]}"


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    types: Mapping[str, str] | None = None,
) -> Path:
    """A GGUF file. uint8 arrays are blocks of the type that `types` names, all others are converted to it (F32)."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, array in tensors.items():
        kind = GGMLQuantizationType[(types or {}).get(name, "F32")]
        data = array if array.dtype == np.uint8 else quantize(array.astype(np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


TOKEN_IDS = {
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.padding_token_id": 0,
}


def gguf_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes for a golden's config.json."""
    new = config["model_type"] == "gemma4_text"
    arch = "gemma4" if new else "gemma3"
    ropes = config["rope_parameters"]
    common = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
    }
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    if not new:
        common["attention.sliding_window_pattern"] = sliding.index(False) + 1
    else:
        common |= _gemma4_metadata(config, sliding)
    return TOKEN_IDS | {f"{arch}.{key}": value for key, value in common.items()}


def _gemma4_metadata(config: Mapping[str, Any], sliding: list[bool]) -> dict[str, Any]:
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    full = {int(key): value for key, value in config["per_layer_config"].items()}[
        sliding.index(False)
    ]
    kv_heads = config["num_key_value_heads"]
    full_heads = full.get("num_key_value_heads", kv_heads)
    wide = config["intermediate_size"] * (2 if config["use_double_wide_mlp"] else 1)
    experts = {
        "expert_count": config["num_experts"],
        "expert_used_count": config["top_k_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }
    return {
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.head_count_kv": [kv_heads if flag else full_heads for flag in sliding],
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "feed_forward_length": [config["intermediate_size"]] * (layers - shared) + [wide] * shared,
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        **{key: value for key, value in experts.items() if value is not None},
    }


def gguf_tensors(
    config: Mapping[str, Any], golden: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The golden's tensors as llama.cpp stores them: renamed, Gemma 3 norms + 1, Gemma 4 with rotary divisors."""
    new = config["model_type"] == "gemma4_text"
    tensors = {}
    for name, array in golden.items():
        bare = name.removeprefix("model.")
        offset = np.float32(0 if new or not bare.endswith("norm.weight") else 1)
        tensors[llama_name(bare)] = array + offset
    if new:
        full = next(iter(config["per_layer_config"].values()))["head_dim"]
        rope = config["rope_parameters"]["full_attention"]
        turning = int(full * rope["partial_rotary_factor"] / 2)
        tensors["rope_freqs.weight"] = np.float32([1] * turning + [1e30] * (full // 2 - turning))
    return tensors


def gguf_string(text: str) -> bytes:
    """A string as GGUF stores it."""
    return struct.pack("<Q", len(text.encode())) + text.encode()
