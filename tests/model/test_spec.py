"""A config says everything or is refused: both dialects, every published size, every missing or unknown key."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_model import tiny_config

from onechip.config import LayerSpec, ModelConfig, Rope
from onechip.errors import ConfigError
from onechip.model.spec import model_config

DATA = Path(__file__).parents[1] / "data"
FILES = sorted(DATA.glob("*/*/config.json"))


def raw(name: str) -> dict[str, Any]:
    (path,) = DATA.glob(f"*/{name}/config.json")
    return json.loads(path.read_text())


def load(name: str) -> ModelConfig:
    return model_config(raw(name))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_a_layer_table_is_consistent(path: Path):
    config = model_config(json.loads(path.read_text()))
    for index, layer in enumerate(config.layers):
        assert layer.index == index
        assert (layer.window is None) == (layer.kind == "full")
        assert config.heads % layer.kv_heads == 0
        source = config.layers[layer.kv_source]
        assert source.owns_kv and source.index <= index
        assert (source.kind, source.kv_heads, source.head_dim) == (
            layer.kind,
            layer.kv_heads,
            layer.head_dim,
        )
        if layer.kv_source != index:
            between = config.layers[source.index + 1 : config.first_shared]
            assert layer.kind not in {other.kind for other in between}, "the last owner of its kind"
    assert config.layers[-1].kind == "full"
    assert {1, 106} <= set(config.eos_ids)


def columns(config: ModelConfig, kind: str) -> set[tuple[int, int, bool]]:
    return {(x.kv_heads, x.head_dim, x.k_eq_v) for x in config.layers if x.kind == kind}


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "window", "sliding", "full", "owners"),
    [
        ("gemma-4-E2B", 35, 1536, 8, 512, (1, 256, False), (1, 512, False), 15),
        ("gemma-4-E4B", 42, 2560, 8, 512, (2, 256, False), (2, 512, False), 24),
        ("gemma-4-12B", 48, 3840, 16, 1024, (8, 256, False), (1, 512, True), 48),
        ("gemma-4-31B", 60, 5376, 32, 1024, (16, 256, False), (4, 512, True), 60),
        ("gemma-4-26B-A4B", 30, 2816, 16, 1024, (8, 256, False), (2, 512, True), 30),
    ],
)
def test_the_published_sizes(
    name: str,
    layers: int,
    width: int,
    heads: int,
    window: int,
    sliding: tuple[int, int, bool],
    full: tuple[int, int, bool],
    owners: int,
):
    config = load(name)
    assert (len(config.layers), config.hidden_size, config.heads) == (layers, width, heads)
    assert (config.window, len(config.owners)) == (window, owners)
    assert (columns(config, "sliding"), columns(config, "full")) == ({sliding}, {full})
    assert (config.vocab_size, config.final_softcap, config.query_scale) == (262_144, 30.0, 1.0)
    assert config.norm_offset == 0 and config.tie_embeddings
    assert (config.moe is not None) == (name == "gemma-4-26B-A4B")


def test_e2b_widens_the_layers_that_share():
    config = load("gemma-4-E2B")
    assert [x.ffn_dim for x in config.layers] == [6144] * 15 + [12288] * 20
    assert config.first_shared == 15
    assert {x.kv_source for x in config.layers[15:]} == {13, 14}


def test_full_layers_of_gemma_4_turn_a_quarter_of_their_pairs():
    ropes = {layer.kind: layer.rope for layer in load("gemma-4-E2B").layers}
    assert ropes == {
        "full": Rope(1_000_000.0, "proportional", partial=0.25),
        "sliding": Rope(10_000.0),
    }


def test_gemma_3_has_its_own_norms_and_scale():
    config = load("gemma3-mini")
    assert (config.norm_offset, config.final_softcap, config.ple_dim) == (1.0, None, 0)
    assert config.query_scale == pytest.approx(raw("gemma3-mini")["query_pre_attn_scalar"] ** -0.5)


def per_layer_dialect(config: dict[str, Any], pad: int = 0) -> dict[str, Any]:
    """The same model in the other spelling."""
    other = {k: v for k, v in config.items() if "global" not in k}
    full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    heads = config["num_global_key_value_heads"]
    row: dict[str, Any] = {"head_dim": config["global_head_dim"]}
    if config.get("attention_k_eq_v") and heads is not None:
        row["num_key_value_heads"] = heads
    other["per_layer_config"] = {str(i).zfill(pad): row for i in full}
    return other


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("name", ["gemma-4-E2B", "gemma-4-31B", "gemma-4-12B"])
def test_both_spellings_give_one_table(name: str, pad: int):
    nested = raw(name)
    text = nested.get("text_config", nested)
    if "global_head_dim" not in text:
        pytest.fail(f"{name} is expected in the spelling with global_head_dim")
    other = {**nested, "text_config": per_layer_dialect(text, pad)}
    assert model_config(other).layers == model_config(nested).layers


def test_the_per_layer_spelling_wins_where_both_are_present():
    config = tiny_config(per_layer_config={"1": {"head_dim": 64}, "3": {"head_dim": 64}})
    assert [layer.head_dim for layer in model_config(config).layers] == [16, 64, 16, 64]


@pytest.mark.parametrize("row", [{"head_dim": 64}, {"num_key_value_heads": 2}])
def test_layers_of_a_kind_that_differ_are_refused(row: dict[str, int]):
    with pytest.raises(ConfigError, match="all full-attention layers must be alike"):
        model_config(
            tiny_config(per_layer_config={"1": {"head_dim": 32}, "3": {"head_dim": 32, **row}})
        )


def test_a_nested_config_is_the_flat_one():
    nested = {"model_type": "gemma4", "text_config": tiny_config(), "vision_config": {"x": 1}}
    assert model_config(nested) == model_config(tiny_config())


NEEDED = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "global_head_dim", "sliding_window", "intermediate_size", "rms_norm_eps",
    "hidden_size_per_layer_input", "vocab_size_per_layer_input", "max_position_embeddings", "hidden_activation",
)  # fmt: skip


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_is_named(key: str):
    config = tiny_config()
    del config[key]
    with pytest.raises(ConfigError, match=rf"\b{key}\b"):
        model_config(config)


@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor"])
def test_a_missing_rope_key_is_named_with_its_place(key: str):
    config = tiny_config()
    del config["rope_parameters"]["full_attention"][key]
    with pytest.raises(ConfigError, match=rf"rope_parameters\.full_attention\.{key} is missing"):
        model_config(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type is 'gemma2'"),
        (
            {"layer_types": ["sliding_attention", "linear_attention"] * 2},
            r"layer_types\[1\] is 'linear_attention'",
        ),
        (
            {"layer_types": ["full_attention"]},
            "layer_types lists 1 layers, num_hidden_layers says 4",
        ),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"hidden_size": -3}, "hidden_size is -3"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"head_dim": True}, "head_dim is True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"text_config": 3}, "text_config is 3"),
    ],
)
def test_what_is_not_understood_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        model_config(tiny_config(**changes))


def test_an_unknown_rope_is_refused():
    config = tiny_config()
    config["rope_parameters"]["full_attention"]["rope_type"] = "yarn"
    with pytest.raises(ConfigError, match=r"rope_parameters\.full_attention\.rope_type is 'yarn'"):
        model_config(config)


def test_the_files_stop_ids_never_replace_the_familys():
    assert model_config(tiny_config(eos_token_id=77)).eos_ids == (1, 50, 77, 106)
    assert model_config(tiny_config(eos_token_id=None)).eos_ids == (1, 50, 106)


def old_gemma_3() -> dict[str, Any]:
    new = raw("gemma3-mini")
    old = {
        k: v
        for k, v in new.items()
        if k not in ("rope_parameters", "layer_types", "_sliding_window_pattern")
    }
    period = new["layer_types"].index("full_attention") + 1
    return {**old, "sliding_window_pattern": period, "rope_theta": 1e6, "rope_local_base_freq": 1e4}


def test_an_old_gemma_3_file_gives_its_kinds_and_ropes():
    config = model_config({**old_gemma_3(), "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    new = load("gemma3-mini")
    assert [layer.kind for layer in config.layers] == [layer.kind for layer in new.layers]
    ropes = {layer.kind: layer.rope for layer in config.layers}
    assert ropes == {"full": Rope(1e6, "linear", factor=8.0), "sliding": Rope(1e4)}


def test_an_old_gemma_3_file_without_a_pattern_is_refused():
    config = old_gemma_3()
    del config["sliding_window_pattern"]
    with pytest.raises(ConfigError, match="sliding_window_pattern is missing"):
        model_config(config)


def test_an_owner_is_told_from_a_sharer():
    row = LayerSpec(3, "full", 1, 1, 16, None, Rope(1e4), False, 8)
    assert not row.owns_kv and LayerSpec(1, "full", 1, 1, 16, None, Rope(1e4), False, 8).owns_kv
