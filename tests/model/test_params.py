"""A checkpoint must hold what its config says: every tensor once, none left over, but for what is known to be idle."""

import json
from pathlib import Path

import pytest
from tests.tiny_model import tiny_config

from onechip.config import ModelConfig
from onechip.errors import CheckpointError
from onechip.model.params import check_tensors, ignorable, parameter_specs
from onechip.model.spec import model_config

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
TINY = model_config(tiny_config())


def expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        name: shape
        for spec in parameter_specs(config).values()
        for name, shape in zip(spec.sources, spec.source_shapes, strict=True)
    }


def test_the_exact_set_is_accepted():
    check_tensors(TINY, expected(TINY), "file")


def test_each_missing_tensor_is_named():
    for name in expected(TINY):
        found = {k: v for k, v in expected(TINY).items() if k != name}
        with pytest.raises(CheckpointError, match=rf"file: lacks 1 .*{name}"):
            check_tensors(TINY, found, "file")


@pytest.mark.parametrize(
    "name", ["layers.4.mlp.up_proj.weight", "layers.0.self_attn.q_proj.bias", "lm_head.bias"]
)
def test_an_extra_tensor_is_named(name: str):
    with pytest.raises(CheckpointError, match=f"holds 1 .*{name}"):
        check_tensors(TINY, {**expected(TINY), name: (1,)}, "file")


def test_each_wrong_shape_is_named_with_both_shapes():
    for name, shape in expected(TINY).items():
        wrong = (shape[0] + 1, *shape[1:])
        with pytest.raises(CheckpointError, match=f"{name} has shape"):
            check_tensors(TINY, {**expected(TINY), name: wrong}, "file")


def test_many_names_are_counted_not_listed():
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensor\(s\).* and \d+ more"):
        check_tensors(TINY, {}, "file")


@pytest.mark.parametrize("part", ["k_proj", "v_proj", "k_norm"])
def test_a_layer_that_shares_may_carry_or_lack_its_own(part: str):
    name = f"layers.2.self_attn.{part}.weight"
    assert name not in expected(TINY)
    check_tensors(TINY, {**expected(TINY), name: (9, 9)}, "file")
    owner = f"layers.0.self_attn.{part}.weight"
    without = {k: v for k, v in expected(TINY).items() if k != owner}
    with pytest.raises(CheckpointError, match="lacks"):
        check_tensors(TINY, without, "file")


def test_a_tied_model_may_repeat_its_table_as_head_and_an_untied_one_must_have_it():
    check_tensors(TINY, {**expected(TINY), "lm_head.weight": (512, 32)}, "file")
    untied = model_config(tiny_config(tie_word_embeddings=False))
    assert expected(untied)["lm_head.weight"] == (512, 32)
    assert "lm_head.weight" not in set(ignorable(untied))
    with pytest.raises(CheckpointError, match=r"lacks 1 .*lm_head\.weight"):
        check_tensors(untied, expected(TINY), "file")


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("*/config.json")), ids=lambda path: path.parent.name
)
def test_parameters_follow_from_the_layer_table(path: Path):
    config = model_config(json.loads(path.read_text()))
    specs = parameter_specs(config)
    for spec in specs.values():
        assert len(spec.axes) == len(spec.shape)
        assert spec.shape[0] == sum(shape[0] for shape in spec.source_shapes)
        assert all(shape[1:] == spec.shape[1:] for shape in spec.source_shapes)
    for layer in config.layers:
        kv = 0 if not layer.owns_kv else layer.kv_heads * (1 if layer.k_eq_v else 2)
        rows = (config.heads + kv) * layer.head_dim
        assert specs[f"layers.{layer.index}.qkv_proj"].shape == (rows, config.hidden_size)
        assert specs[f"layers.{layer.index}.gate_up_proj"].shape[0] == 2 * layer.ffn_dim
    sources = [name for spec in specs.values() for name in spec.sources]
    assert len(sources) == len(set(sources)), "every tensor is read once"


def test_only_gemma_3_adds_one_to_its_norms():
    gemma3 = json.loads((CONFIGS.parent / "golden" / "gemma3-mini" / "config.json").read_text())
    for config, offset in ((TINY, 0.0), (model_config(gemma3), 1.0)):
        norms = {s.offset for s in parameter_specs(config).values() if "norm" in s.path}
        others = {s.offset for s in parameter_specs(config).values() if "norm" not in s.path}
        assert (norms, others) == ({offset}, {0.0})
