"""The config.json that a GGUF file's metadata amounts to.

Owns the keys of the architectures gemma3 and gemma4, and the few facts about Gemma 3 that its files leave out (each
stated at its constant). Everything else must be in the file: a missing key is an error that names it. Refuses to know
how tensors are stored; it looks at their shapes, and at the rotary divisors that it is handed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onechip.checkpoint.base import Array, TensorInfo
from onechip.errors import CheckpointError

# What Gemma 3 files do not say, from the published configs of every Gemma 3 size.
GEMMA3_LOCAL_THETA = 10_000.0
GEMMA3_FULL_EVERY = 6  # layers 5, 11, 17, ... see the whole context
# Gemma 3 27B (62 layers) scales its queries by hidden size / heads = 168 where all others take the head dim.
GEMMA3_27B_LAYERS = 62

# GGUF files of Gemma 4 name one end-of-sequence id; generation ends at <eos>, <turn|> and <|tool_response>.
GEMMA4_EOS_IDS = (1, 106, 50)
GEMMA3_END_OF_TURN = (106, "<end_of_turn>")

# A divisor of 1 leaves a frequency as it is; llama.cpp writes 1e30 to stop one.
STOPPED_DIVISOR = 1e20

SAMPLING_KEYS: Mapping[str, str] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
}


@dataclass(frozen=True)
class Keys:
    """Metadata under one architecture's prefix. Raises CheckpointError naming file and key."""

    source: str
    architecture: str
    metadata: Mapping[str, Any]

    def get(self, key: str) -> Any:
        """The value of "{architecture}.{key}", numpy arrays as lists, None when absent."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value.tolist() if isinstance(value, np.ndarray) else value

    def need(self, key: str) -> Any:
        """The same, required."""
        value = self.get(key)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def integer(self, key: str, least: int = 1) -> int:
        """A required whole number of `least` or more."""
        value = self.need(key)
        if type(value) is not int or value < least:
            raise self.error(key, f"is {value!r}, not a whole number of {least} or more")
        return value

    def real(self, key: str) -> float:
        """A required number. Stored as float32: the shortest decimal of that is what the config said."""
        value = self.need(key)
        if not isinstance(value, int | float):
            raise self.error(key, f"is {value!r}, not a number")
        return float(str(np.float32(value)))

    def per_layer(self, key: str, layers: int) -> list[int]:
        """A required number for each layer, stored once or as an array."""
        value = self.need(key)
        values = [value] * layers if type(value) is int else value
        if not isinstance(values, list) or len(values) != layers:
            raise self.error(key, f"does not give one number for each of {layers} layers")
        if not all(type(item) is int for item in values):
            raise self.error(key, "does not hold whole numbers")
        return values

    def error(self, key: str, problem: str) -> CheckpointError:
        """The error for a key of this architecture."""
        return CheckpointError(
            f"{self.source}: metadata key {self.architecture}.{key} {problem}; convert the model again"
        )

    def token_id(self, key: str) -> int:
        """A required id of the tokenizer's metadata."""
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if type(value) is not int:
            raise CheckpointError(
                f"{self.source}: metadata key tokenizer.ggml.{key} is {value!r}, not an id;"
                " convert the model again"
            )
        return value


def config_of(
    keys: Keys, tensors: Mapping[str, TensorInfo], divisors: Array | None
) -> dict[str, Any]:
    """config.json, flat, for the text model that `keys` and `tensors` (by canonical name) describe.

    `divisors` holds the file's rotary divisors, None where it has none. Raises CheckpointError.
    """
    makers = {"gemma3": _gemma3, "gemma4": _gemma4}
    maker = makers.get(keys.architecture)
    if maker is None:
        raise CheckpointError(
            f"{keys.source} holds the architecture {keys.architecture!r}; supported are"
            f" {', '.join(makers)} text models: choose another file"
        )
    common = _common(keys, tensors)  # first: it checks the layer count that the rest counts by
    return common | maker(keys, tensors, divisors)


def generation_config_of(keys: Keys, eos_ids: Sequence[int]) -> dict[str, Any]:
    """generation_config.json: stop ids, and sampling defaults where the file carries them."""
    sampling = {
        name: value.item() if isinstance(value, np.generic) else value
        for key, name in SAMPLING_KEYS.items()
        if (value := keys.metadata.get(key)) is not None
    }
    return {
        "bos_token_id": keys.token_id("bos_token_id"),
        "eos_token_id": list(eos_ids),
        "pad_token_id": keys.token_id("padding_token_id"),
        **sampling,
    }


def eos_ids_of(keys: Keys) -> list[int]:
    """The ids that end generation."""
    if keys.architecture == "gemma4":
        return list(GEMMA4_EOS_IDS)
    eos = keys.token_id("eos_token_id")
    index, piece = GEMMA3_END_OF_TURN
    pieces = keys.metadata.get("tokenizer.ggml.tokens", ())
    has_turns = len(pieces) > index and pieces[index] == piece
    return [eos, index] if has_turns and eos != index else [eos]


def _common(keys: Keys, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": keys.token_id("bos_token_id"),
        "dtype": _compute_dtype(tensors),
        "eos_token_id": eos_ids_of(keys),
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": keys.integer("embedding_length"),
        "max_position_embeddings": keys.integer("context_length"),
        "num_attention_heads": keys.integer("attention.head_count"),
        "num_hidden_layers": _layers(keys, tensors),
        "pad_token_id": keys.token_id("padding_token_id"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "vocab_size": _rows(keys, tensors, "embed_tokens.weight"),
    }


def _layers(keys: Keys, tensors: Mapping[str, TensorInfo]) -> int:
    """The layer count; every layer has more than one tensor, so a damaged count cannot size our lists."""
    layers = keys.integer("block_count")
    if layers > len(tensors):
        raise keys.error("block_count", f"is {layers}, with {len(tensors)} tensors in the file")
    return layers


def _compute_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """Quantised files were made from bfloat16 weights; plain ones say themselves."""
    stored = tensors["embed_tokens.weight"].dtype if "embed_tokens.weight" in tensors else ""
    return {"F32": "float32", "F16": "float16"}.get(stored, "bfloat16")


def _rows(keys: Keys, tensors: Mapping[str, TensorInfo], name: str) -> int:
    info = tensors.get(name)
    if info is None or len(info.shape) != 2:
        raise CheckpointError(
            f"{keys.source} holds no matrix for {name}; it is a vocabulary or a part: use the whole file"
        )
    return info.shape[0]


def _head_dim(keys: Keys, suffix: str = "") -> int:
    dim = keys.integer(f"attention.key_length{suffix}")
    if keys.integer(f"attention.value_length{suffix}") != dim:
        raise keys.error(f"attention.value_length{suffix}", f"differs from key_length ({dim})")
    return dim


def _layer_types(sliding: Sequence[bool]) -> list[str]:
    return ["sliding_attention" if flag else "full_attention" for flag in sliding]


def _gemma3(
    keys: Keys, tensors: Mapping[str, TensorInfo], divisors: Array | None
) -> dict[str, Any]:
    del tensors, divisors
    layers = keys.integer("block_count")
    head_dim = _head_dim(keys)
    wide = layers == GEMMA3_27B_LAYERS
    query_scalar = keys.integer("embedding_length") // keys.integer("attention.head_count")
    cap = "final_logit_softcapping"
    local_theta = "rope.freq_base_swa"
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.real(cap) if keys.get(cap) is not None else None,
        "head_dim": head_dim,
        "intermediate_size": keys.integer("feed_forward_length"),
        "layer_types": _layer_types(_gemma3_pattern(keys, layers)),
        "num_key_value_heads": keys.integer("attention.head_count_kv"),
        "query_pre_attn_scalar": query_scalar if wide else head_dim,
        "rope_parameters": {
            "full_attention": _gemma3_full_rope(keys),
            "sliding_attention": {
                "rope_theta": GEMMA3_LOCAL_THETA
                if keys.get(local_theta) is None
                else keys.real(local_theta),
                "rope_type": "default",
            },
        },
        "sliding_window": keys.integer("attention.sliding_window"),
        "use_bidirectional_attention": False,
    }


def _gemma3_pattern(keys: Keys, layers: int) -> list[bool]:
    """True for sliding layers. The key is a period or an array, and absent in older files."""
    key = "attention.sliding_window_pattern"
    pattern = GEMMA3_FULL_EVERY if keys.get(key) is None else keys.get(key)
    if isinstance(pattern, list):
        return _flags(keys, key, layers)
    if type(pattern) is not int or pattern < 1:
        raise keys.error(key, f"is {pattern!r}, neither a period nor an array")
    return [(index + 1) % pattern != 0 for index in range(layers)]


def _flags(keys: Keys, key: str, layers: int) -> list[bool]:
    flags = keys.need(key)
    if not isinstance(flags, list) or len(flags) != layers:
        raise keys.error(key, f"does not give one flag for each of {layers} layers")
    return [bool(flag) for flag in flags]


def _gemma3_full_rope(keys: Keys) -> dict[str, Any]:
    theta = keys.real("rope.freq_base")
    kind = keys.get("rope.scaling.type")
    if kind in (None, "none"):
        return {"rope_theta": theta, "rope_type": "default"}
    if kind != "linear":
        raise keys.error("rope.scaling.type", f"is {kind!r}, not linear")
    return {"factor": keys.real("rope.scaling.factor"), "rope_theta": theta, "rope_type": "linear"}


def _gemma4(
    keys: Keys, tensors: Mapping[str, TensorInfo], divisors: Array | None
) -> dict[str, Any]:
    layers = keys.integer("block_count")
    sliding = _flags(keys, "attention.sliding_window_pattern", layers)
    shared = keys.integer("attention.shared_kv_layers", 0)
    head_dim = _head_dim(keys, "_swa")
    width, double = _feed_forward(keys, layers, layers - shared)
    k_eq_v = _k_eq_v(tensors, sliding, layers - shared)
    kv_heads, global_kv_heads = _kv_heads(keys, sliding, k_eq_v)
    ple_dim = keys.integer("embedding_length_per_layer_input", 0)
    ple_rows = _rows(keys, tensors, "embed_tokens_per_layer.weight") if ple_dim else None
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_k_eq_v": k_eq_v,
        "final_logit_softcapping": keys.real("final_logit_softcapping"),
        "global_head_dim": _head_dim(keys),
        "head_dim": head_dim,
        "hidden_size_per_layer_input": ple_dim,
        "intermediate_size": width,
        "layer_types": _layer_types(sliding),
        "num_global_key_value_heads": global_kv_heads,
        "num_key_value_heads": kv_heads,
        "num_kv_shared_layers": shared,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": _partial_factor(keys, divisors),
                "rope_theta": keys.real("rope.freq_base"),
                "rope_type": "proportional",
            },
            "sliding_attention": {
                "rope_theta": keys.real("rope.freq_base_swa"),
                "rope_type": "default",
            },
        },
        "sliding_window": keys.integer("attention.sliding_window"),
        "use_bidirectional_attention": None,  # text is causal in every size
        "use_double_wide_mlp": double,
        "vocab_size_per_layer_input": ple_rows or _rows(keys, tensors, "embed_tokens.weight"),
        **_experts(keys),
    }


def _feed_forward(keys: Keys, layers: int, owners: int) -> tuple[int, bool]:
    """The width, and whether layers that share K/V (from `owners` on) have twice of it."""
    widths = keys.per_layer("feed_forward_length", layers)
    width = widths[0]
    double = widths[-1] != width
    shared_width = 2 * width if double else width
    if widths != [width] * owners + [shared_width] * (layers - owners):
        raise keys.error(
            "feed_forward_length", f"is neither one width nor doubled from {owners} on"
        )
    return width, double


def _k_eq_v(tensors: Mapping[str, TensorInfo], sliding: Sequence[bool], owners: int) -> bool:
    """Whether full layers take V from the K projection: then their owners store no V projection."""
    full = [index for index in range(owners) if not sliding[index]]
    return bool(full) and all(
        f"layers.{index}.self_attn.v_proj.weight" not in tensors for index in full
    )


def _kv_heads(keys: Keys, sliding: Sequence[bool], k_eq_v: bool) -> tuple[int, int | None]:
    """K/V heads of sliding and, only where K is V, of full layers (the config has no other place for them)."""
    key = "attention.head_count_kv"
    counts = keys.per_layer(key, len(sliding))
    by_kind = [
        {count for count, flag in zip(counts, sliding, strict=True) if flag == kind}
        for kind in (True, False)
    ]
    if any(len(kinds) > 1 for kinds in by_kind):
        raise keys.error(key, f"differs between layers of one kind: {counts}")
    kv_heads, full = (next(iter(kinds), counts[0]) for kinds in by_kind)
    if full != kv_heads and not k_eq_v:
        raise keys.error(
            key, f"gives full layers {full} heads instead of {kv_heads}, with V stored"
        )
    return kv_heads, full if k_eq_v else None


def _partial_factor(keys: Keys, divisors: Array | None) -> float:
    """The share of rotary pairs that turn on full layers, from the divisors: 1 turns, 1e30 does not."""
    if divisors is None:
        raise CheckpointError(
            f"{keys.source} lacks tensor rope_freqs.weight, which says how full layers rotate;"
            " convert the model again"
        )
    turning = int(np.count_nonzero(divisors == 1.0))
    stopped = int(np.count_nonzero(divisors >= STOPPED_DIVISOR))
    if turning + stopped != divisors.size or not (divisors[:turning] == 1.0).all():
        raise CheckpointError(
            f"{keys.source}: rope_freqs.weight is not {turning} ones followed by 1e30;"
            " this rotary scheme is not supported: use another file"
        )
    return turning / divisors.size


def _experts(keys: Keys) -> dict[str, Any]:
    if not keys.get("expert_count"):
        none = dict.fromkeys(("moe_intermediate_size", "num_experts", "top_k_experts"))
        return {"enable_moe_block": False, **none}
    return {
        "enable_moe_block": True,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_experts": keys.integer("expert_count"),
        "top_k_experts": keys.integer("expert_used_count"),
    }
