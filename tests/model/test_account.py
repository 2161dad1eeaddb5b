"""The account of a model: published figures of the real sizes, and agreement with the parameter list."""

import json
from pathlib import Path

import pytest

from onechip.config import ModelConfig
from onechip.errors import ConfigError, DoesNotFit
from onechip.model.account import (
    CHIPS,
    MARGIN,
    account,
    find_chip,
    fit,
    layer_kv_bytes,
    layer_parameters,
)
from onechip.model.params import parameter_specs
from onechip.model.spec import model_config

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
NAMES = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir())


def load(name: str) -> ModelConfig:
    return model_config(json.loads((CONFIGS / name / "config.json").read_text()))


def test_e2b_costs_what_was_published():
    costs = account(load("gemma-4-E2B"), "bfloat16", "bfloat16")
    assert f"{costs.resident / 1e9:.3f}" == "9.257"
    assert 4.51e9 <= costs.streamed <= 4.56e9
    assert costs.kv_token == 6144
    assert costs.kv_window == 6 * 2**20
    assert f"{costs.parameters / 1e9:.3f}" == "4.629"


# Bytes a token in the full-attention layers, MiB a sequence in the sliding ones; bf16.
@pytest.mark.parametrize(
    ("name", "kv_token", "window_mib"),
    [
        ("gemma-4-E2B", 6_144, 6),
        ("gemma-4-E4B", 16_384, 20),
        ("gemma-4-12B", 16_384, 320),
        ("gemma-4-26B-A4B", 20_480, 200),
        ("gemma-4-31B", 81_920, 800),
    ],
)
def test_kv_bytes_of_every_size(name: str, kv_token: int, window_mib: int):
    costs = account(load(name), "bfloat16", "bfloat16")
    assert (costs.kv_token, costs.kv_window) == (kv_token, window_mib * 2**20)


@pytest.mark.parametrize("name", NAMES)
def test_layers_and_tables_add_up_to_the_whole(name: str):
    config = load(name)
    layers = sum(layer_parameters(config, layer) for layer in config.layers)
    rest = sum(s.size for s in parameter_specs(config).values() if not s.path.startswith("layers."))
    assert layers + rest == account(config, "bfloat16", "bfloat16").parameters


@pytest.mark.parametrize("name", NAMES)
def test_float32_doubles_bfloat16_and_widens_nothing(name: str):
    config = load(name)
    half, full = account(config, "bfloat16", "bfloat16"), account(config, "float32", "float32")
    assert (full.resident, full.streamed) == (2 * half.resident, 2 * half.streamed)
    assert (full.kv_token, full.kv_window) == (2 * half.kv_token, 2 * half.kv_window)
    assert full.widened == 0 < half.widened < half.resident / 1000


def test_lookup_tables_are_gathered_and_the_tied_table_is_streamed_once():
    config = load("gemma-4-E2B")
    costs = account(config, "bfloat16", "bfloat16")
    table = 2 * config.vocab_size * config.hidden_size
    per_layer_table = 2 * config.ple_vocab_size * config.ple_dim * len(config.layers)
    assert costs.resident - costs.streamed == per_layer_table
    assert costs.streamed > table
    assert costs.gathered == 2 * (config.hidden_size + config.ple_dim * len(config.layers))


def test_only_active_experts_are_streamed():
    config = load("gemma-4-26B-A4B")
    assert config.moe is not None
    experts = sum(2 * s.size for s in parameter_specs(config).values() if s.use == "experts")
    costs = account(config, "bfloat16", "bfloat16")
    skipped = experts * (config.moe.experts - config.moe.top_k) // config.moe.experts
    assert costs.resident - costs.streamed == skipped


def test_layers_that_share_kv_store_none():
    config = load("gemma-4-E2B")
    assert [layer.index for layer in config.layers if layer_kv_bytes(layer, "bfloat16")] == list(
        range(15)
    )


def test_each_running_sequence_takes_its_window_from_the_rest():
    costs = account(load("gemma-4-E2B"), "bfloat16", "bfloat16")
    one, many = (fit(costs, CHIPS["tpu-v5e-1"], n) for n in (1, 17))
    assert (
        one.free == int(CHIPS["tpu-v5e-1"].memory * (1 - MARGIN)) - costs.resident - costs.widened
    )
    assert one.tokens - many.tokens == 16 * costs.kv_window // costs.kv_token
    assert many.tokens * costs.kv_token + 17 * costs.kv_window <= many.free


def test_a_model_larger_than_the_chip_is_refused_with_the_numbers():
    costs = account(load("gemma-4-31B"), "bfloat16", "bfloat16")
    with pytest.raises(DoesNotFit, match=r"61\.395 GB.*tpu-v5e-1 has 15\.556 GB usable of 16\.909"):
        fit(costs, CHIPS["tpu-v5e-1"], 1)


def test_an_unknown_chip_is_named_with_those_known():
    with pytest.raises(ConfigError, match=r"'abacus' is unknown; known are tpu-v5e-1"):
        find_chip("abacus")
