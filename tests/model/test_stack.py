"""Every layer is somewhere, once, and shares a program only with its equals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from onechip.config import EngineConfig, ModelConfig
from onechip.engine.design import Hardware, design
from onechip.model import stack
from onechip.model.spec import model_config

DATA = Path(__file__).parents[1] / "data"
CONFIGS = sorted(path.parent for path in DATA.glob("*/gemma*/config.json"))


def config_of(folder: Path, scan_layers: bool) -> ModelConfig:
    config = model_config(json.loads((folder / "config.json").read_text()))
    return replace(config, scan_layers=scan_layers)


def found(name: str) -> list[tuple[int, int, int]]:
    config = config_of(DATA / name, True)
    return [(run.start, run.size, run.turns) for run in stack.runs(config)]


def test_the_repeats_of_the_published_models_are_found():
    assert found("configs/gemma-4-E2B") == [(0, 5, 3), (15, 5, 4)]
    assert found("configs/gemma-4-E4B") == [(0, 6, 4), (24, 6, 3)]
    assert found("configs/gemma-4-31B") == [(0, 6, 10)]
    assert found("golden/gemma4-e2b-mini") == [(0, 1, 4), (4, 1, 1), (5, 1, 4), (9, 1, 1)]
    assert found("golden/gemma4-e4b-mini") == [(0, 6, 2), (12, 1, 5), (17, 1, 1)]


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ("SSSSSF" * 4 + "SS", [(0, 6, 4), (24, 1, 2)]),  # Gemma 3 1B
        ("SSSSSF" * 5 + "SSSS", [(0, 6, 5), (30, 1, 4)]),  # Gemma 3 4B
        ("SSF" * 2 + "F" * 6, [(0, 3, 2), (6, 1, 6)]),
        ("SFFFFFFF", [(0, 1, 1), (1, 1, 7)]),
        ("SF", [(0, 1, 1), (1, 1, 1)]),
    ],
)
def test_a_run_is_the_repeat_that_leaves_the_fewest_layers_to_compile(
    kinds: str, runs: list[tuple[int, int, int]]
):
    spec = config_of(DATA / "configs" / "gemma-4-31B", True)
    sliding, full = spec.layers[0], spec.layers[5]
    layers = tuple(
        replace(full if kind == "F" else sliding, index=i, kv_source=i)
        for i, kind in enumerate(kinds)
    )
    got = stack.runs(replace(spec, layers=layers))
    assert [(run.start, run.size, run.turns) for run in got] == runs


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("folder", CONFIGS, ids=lambda folder: folder.name)
def test_every_layer_is_in_one_entry_beside_its_equals(folder: Path, scan_layers: bool):
    config = config_of(folder, scan_layers)
    entries = list(stack.entries(config))
    assert sorted(layer for layers in entries for layer in layers) == list(
        range(len(config.layers))
    )
    assert scan_layers or all(len(layers) == 1 for layers in entries)
    for layers in entries:
        mine = [config.layers[i] for i in layers]
        assert len({layer.owns_kv for layer in mine}) == 1
        assert len({replace(layer, index=0, kv_source=0) for layer in mine}) == 1
    for run in stack.runs(config):
        places = [entries[run.entry + place] for place in range(run.size)]
        assert places == [run.layers(place) for place in range(run.size)]
        assert run.stop <= config.first_shared or run.start >= config.first_shared


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("folder", CONFIGS, ids=lambda folder: folder.name)
def test_owners_have_pages_of_their_own_and_sharers_those_of_their_source(
    folder: Path, scan_layers: bool
):
    config = config_of(folder, scan_layers)
    places = {layer.index: stack.store_of(config, layer) for layer in config.layers}
    stores = stack.stores(config)
    owned = [places[layer.index] for layer in config.owners]
    assert len(set(owned)) == len(owned) == sum(len(store.owners) for store in stores)
    assert all(places[layer.index] == places[layer.kv_source] for layer in config.layers)
    for layer in config.layers:
        number, before = places[layer.index]
        owners = stores[number].owners
        assert owners[before].index == layer.kv_source
        assert (owners[0].kind, owners[0].head_dim) == (layer.kind, layer.head_dim)
    assert len(stores) == (len({o.kind for o in config.owners}) if scan_layers else len(owned))


@pytest.mark.parametrize(
    ("platform", "asked", "scans"),
    [
        ("tpu", "auto", True),
        ("gpu", "auto", False),
        ("cpu", "auto", False),
        ("tpu", "off", False),
        ("cpu", "on", True),
    ],
)
def test_a_tpu_scans_and_the_others_do_when_told(platform: str, asked: str, scans: bool):
    spec = config_of(DATA / "configs" / "gemma-4-E2B", False)
    engine = EngineConfig(scan_layers=asked, max_model_len=1024)  # type: ignore[arg-type]
    shapes = design(spec, engine, Hardware(platform, 80_000_000_000, 9.0)).shapes
    assert shapes.config.scan_layers == scans
    assert len(shapes.caches(lambda shape, _: shape)) == (2 if scans else 15)
    # The bytes are the same either way.
    elements = sum(
        k[0] * k[1] * k[2] * k[3] for k in (kv.k for kv in shapes.caches(lambda s, _: s))
    )
    each = [layer.kv_heads * layer.head_dim * shapes.pages[layer.kind] for layer in spec.owners]
    assert elements == sum(each) * shapes.page_size


def test_what_cannot_be_scanned_says_why():
    moe = config_of(DATA / "configs" / "gemma-4-26B-A4B", False)
    assert "experts" in str(stack.why_not(moe))
    spec = config_of(DATA / "configs" / "gemma-4-E2B", False)
    assert stack.why_not(spec) is None
    assert "repeat" in str(stack.why_not(replace(spec, layers=spec.layers[4:5])))
