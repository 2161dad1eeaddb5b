"""From a checkpoint's config to the layer table. Owns what the keys mean; refuses to guess any of them.

Both published spellings are read: `head_dim` + `global_head_dim` + `num_global_key_value_heads`, and `per_layer_config`
(layer index, perhaps zero-padded, to head_dim and num_key_value_heads), which wins where both are present. A key that
is missing or has a value we do not implement is a `ConfigError` that names it: no architecture default anywhere. The
one thing a file may leave out is what its format defines by absence (a null softcap, an old-style Gemma 3 rope).
Source of the rules: the reference implementation's configuration classes (transformers 5.24).
"""

from collections.abc import Mapping
from typing import Any

from onechip.config import DTypeName, LayerKind, LayerSpec, ModelConfig, MoeConfig, Rope
from onechip.errors import ConfigError

_FAMILIES = {
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "gemma4_unified": "gemma4",
    "gemma4_unified_text": "gemma4",
}
_KINDS: dict[str, LayerKind] = {"sliding_attention": "sliding", "full_attention": "full"}
_STOP_IDS = {"gemma3": (1, 106), "gemma4": (1, 106, 50)}  # end of text, end of turn, tool response


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The model a `config.json` (nested `text_config` or flat) describes. Raises ConfigError."""
    text = _text_config(raw)
    family = _family(text)
    kinds = _layer_kinds(text)
    _refuse_unimplemented(text)
    layers = tuple(_layer(text, family, kinds, i) for i in range(len(kinds)))
    _refuse_mixed_geometry(layers)
    gemma4 = family == "gemma4"
    return ModelConfig(
        family=family,
        vocab_size=_int(text, "vocab_size"),
        hidden_size=_int(text, "hidden_size"),
        heads=_int(text, "num_attention_heads"),
        layers=layers,
        norm_eps=_float(text, "rms_norm_eps"),
        norm_offset=0.0 if gemma4 else 1.0,
        query_scale=1.0 if gemma4 else _float(text, "query_pre_attn_scalar") ** -0.5,
        final_softcap=_optional_float(text, "final_logit_softcapping"),
        tie_embeddings=bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", True))),
        ple_dim=_int(text, "hidden_size_per_layer_input") if gemma4 else 0,
        ple_vocab_size=_ple_vocab(text) if gemma4 else 0,
        moe=_moe(text),
        max_positions=_int(text, "max_position_embeddings"),
        bos_id=_int(text, "bos_token_id", fallback=raw.get("bos_token_id", 2)),
        eos_ids=_stop_ids(family, raw, text),
        pad_id=_int(text, "pad_token_id", fallback=raw.get("pad_token_id", 0)),
        stored_dtype=_stored_dtype(raw, text),
    )


def _text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = raw.get("text_config")
    if nested is None:
        return raw
    if not isinstance(nested, Mapping):
        raise ConfigError(
            f"config key text_config is {nested!r}; it must be a mapping of the text model's keys"
        )
    return nested  # pyright: ignore[reportUnknownVariableType]


def _family(text: Mapping[str, Any]) -> Any:
    name = _key(text, "model_type")
    if name not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ConfigError(f"config key model_type is {name!r}; this engine serves {known}")
    return _FAMILIES[name]


def _layer_kinds(text: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    count = _int(text, "num_hidden_layers")
    names = text.get("layer_types")
    if names is None:
        # Gemma 3 files from before layer_types: one full layer closes each period.
        period = _int(text, "sliding_window_pattern", fallback=text.get("_sliding_window_pattern"))
        return tuple("full" if (i + 1) % period == 0 else "sliding" for i in range(count))
    if len(names) != count:
        raise ConfigError(
            f"config key layer_types lists {len(names)} layers, num_hidden_layers says {count}"
        )
    for i, name in enumerate(names):
        if name not in _KINDS:
            raise ConfigError(
                f"config key layer_types[{i}] is {name!r}; this engine knows {' and '.join(_KINDS)}"
            )
    return tuple(_KINDS[name] for name in names)


def _refuse_unimplemented(text: Mapping[str, Any]) -> None:
    activation = text.get("hidden_activation", text.get("hidden_act"))
    if activation != "gelu_pytorch_tanh":
        raise ConfigError(
            f"config key hidden_activation is {activation!r}; only gelu_pytorch_tanh is implemented"
        )
    if text.get("attention_bias"):
        raise ConfigError("config key attention_bias is true; attention biases are not implemented")
    if text.get("attn_logit_softcapping") is not None:
        raise ConfigError(
            f"config key attn_logit_softcapping is {text['attn_logit_softcapping']!r}; "
            "Gemma 3 and 4 have none (it belongs to Gemma 2)"
        )
    if text.get("use_bidirectional_attention") in (True, "all"):
        raise ConfigError(
            "config key use_bidirectional_attention asks for an encoder; only causal text is served"
        )


def _layer(
    text: Mapping[str, Any], family: str, kinds: tuple[LayerKind, ...], index: int
) -> LayerSpec:
    kind = kinds[index]
    k_eq_v = bool(text.get("attention_k_eq_v")) and kind == "full"
    head_dim, kv_heads = _geometry(text, family, kind, k_eq_v, index)
    source = _kv_source(text, kinds, index)
    wide = bool(text.get("use_double_wide_mlp")) and source != index
    return LayerSpec(
        index=index,
        kind=kind,
        kv_source=source,
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=_int(text, "sliding_window") if kind == "sliding" else None,
        rope=_rope(text, kind),
        k_eq_v=k_eq_v,
        ffn_dim=_int(text, "intermediate_size") * (2 if wide else 1),
    )


def _geometry(
    text: Mapping[str, Any], family: str, kind: LayerKind, k_eq_v: bool, index: int
) -> tuple[int, int]:
    """(head_dim, K/V heads) of one layer, from whichever spelling the file uses."""
    head_dim, kv_heads = _int(text, "head_dim"), _int(text, "num_key_value_heads")
    per_layer = text.get("per_layer_config")
    if per_layer is not None:
        row = {int(key): value for key, value in per_layer.items()}.get(index, {})
        return row.get("head_dim", head_dim), row.get("num_key_value_heads", kv_heads)
    if family == "gemma4" and kind == "full":
        head_dim = _int(text, "global_head_dim")
        # Present and null on E2B and E4B: the fallback is for null, and only k_eq_v models use the key at all.
        if k_eq_v and text.get("num_global_key_value_heads") is not None:
            kv_heads = _int(text, "num_global_key_value_heads")
    return head_dim, kv_heads


def _refuse_mixed_geometry(layers: tuple[LayerSpec, ...]) -> None:
    """A kind's layers share one page table, one rope and one plan of attention's work."""
    first: dict[LayerKind, LayerSpec] = {}
    for layer in layers:
        other = first.setdefault(layer.kind, layer)
        if (layer.head_dim, layer.kv_heads) != (other.head_dim, other.kv_heads):
            raise ConfigError(
                f"layer {layer.index} has {layer.kv_heads} K/V heads of {layer.head_dim}, layer {other.index} has "
                f"{other.kv_heads} of {other.head_dim}; all {layer.kind}-attention layers must be alike"
            )


def _kv_source(text: Mapping[str, Any], kinds: tuple[LayerKind, ...], index: int) -> int:
    """The last earlier owner of the same kind for a sharing layer, else the layer itself."""
    first_shared = len(kinds) - int(text.get("num_kv_shared_layers") or 0)
    if index < first_shared:
        return index
    for source in range(first_shared - 1, -1, -1):
        if kinds[source] == kinds[index]:
            return source
    raise ConfigError(
        f"config key num_kv_shared_layers makes layer {index} share K/V, but no {kinds[index]} layer before "
        f"layer {first_shared} owns any"
    )


def _rope(text: Mapping[str, Any], kind: LayerKind) -> Rope:
    parameters = text.get("rope_parameters")
    if parameters is None:
        return _old_rope(text, kind)
    row = _key(parameters, f"{kind}_attention", prefix="rope_parameters.")
    prefix = f"rope_parameters.{kind}_attention."
    name = row.get("rope_type", "default")
    theta = _float(row, "rope_theta", prefix=prefix)
    if name == "default":
        return Rope(theta)
    if name == "linear":
        return Rope(theta, "linear", factor=_float(row, "factor", prefix=prefix))
    if name == "proportional":
        partial = _float(row, "partial_rotary_factor", prefix=prefix)
        return Rope(theta, "proportional", partial=partial)
    raise ConfigError(
        f"config key {prefix}rope_type is {name!r}; implemented: default, linear, proportional"
    )


def _old_rope(text: Mapping[str, Any], kind: LayerKind) -> Rope:
    """Gemma 3 files written before rope_parameters: one theta a kind, scaling on full layers only."""
    if kind == "sliding":
        return Rope(_float(text, "rope_local_base_freq"))
    scaling = text.get("rope_scaling")
    if scaling is None:
        return Rope(_float(text, "rope_theta"))
    name = scaling.get("rope_type", scaling.get("type"))
    if name != "linear":
        raise ConfigError(f"config key rope_scaling.rope_type is {name!r}; implemented: linear")
    return Rope(
        _float(text, "rope_theta"),
        "linear",
        factor=_float(scaling, "factor", prefix="rope_scaling."),
    )


def _moe(text: Mapping[str, Any]) -> MoeConfig | None:
    if not text.get("enable_moe_block"):
        return None
    return MoeConfig(
        experts=_int(text, "num_experts"),
        top_k=_int(text, "top_k_experts"),
        ffn_dim=_int(text, "moe_intermediate_size"),
    )


def _ple_vocab(text: Mapping[str, Any]) -> int:
    return (
        _int(text, "vocab_size_per_layer_input") if text.get("hidden_size_per_layer_input") else 0
    )


def _stop_ids(family: str, raw: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    """The family's stop ids united with the file's: an override must never replace them."""
    ids = set(_STOP_IDS[family])
    for value in (raw.get("eos_token_id"), text.get("eos_token_id")):
        ids.update([value] if isinstance(value, int) else value or ())
    vocab = _int(text, "vocab_size")
    return tuple(sorted(i for i in ids if i < vocab))


def _stored_dtype(raw: Mapping[str, Any], text: Mapping[str, Any]) -> DTypeName:
    for value in (
        text.get("dtype"),
        raw.get("dtype"),
        text.get("torch_dtype"),
        raw.get("torch_dtype"),
    ):
        if value in ("float32", "bfloat16", "float16"):
            return value
    return "bfloat16"


def _key(mapping: Mapping[str, Any], name: str, prefix: str = "") -> Any:
    if mapping.get(name) is None:
        raise ConfigError(
            f"config key {prefix}{name} is missing; use the config.json the model was published with"
        )
    return mapping[name]


def _int(mapping: Mapping[str, Any], name: str, fallback: Any = None) -> int:
    value = mapping.get(name)
    value = fallback if value is None else value
    if value is None:
        _key(mapping, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"config key {name} is {value!r}; it must be a whole number, 0 or more")
    return value


def _float(mapping: Mapping[str, Any], name: str, prefix: str = "") -> float:
    value = _key(mapping, name, prefix)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"config key {prefix}{name} is {value!r}; it must be a number above 0")
    return float(value)


def _optional_float(mapping: Mapping[str, Any], name: str) -> float | None:
    return None if mapping.get(name) is None else _float(mapping, name)
