"""Pages follow from the numbers, and what does not fit is refused with them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_model import tiny_config

from onechip.cache.pages import peak_pages
from onechip.config import EngineConfig, ModelConfig
from onechip.engine.buckets import bucket_table
from onechip.engine.memory import MemoryPlan, estimated_needs, plan_memory
from onechip.engine.programs import Needs
from onechip.errors import ConfigError, DoesNotFit
from onechip.model.load import param_bytes
from onechip.model.spec import model_config

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
GB = 1_000_000_000
NEEDS = Needs(temporaries=256 << 20, code=64 << 20)


def real(name: str) -> ModelConfig:
    return model_config(json.loads((CONFIGS / name / "config.json").read_text()))


def planned(
    config: ModelConfig,
    memory: int,
    *,
    length: int = 8192,
    chunk: int = 512,
    needs: Needs | None = None,
    page_size: int = 16,
    **flags: Any,
) -> MemoryPlan:
    return plan_memory(
        config,
        EngineConfig(**flags),
        max_model_len=length,
        page=page_size,
        chunk=chunk,
        weight_bytes=param_bytes(config, "bfloat16"),
        kv_bytes_per_value=2,
        needs=needs or NEEDS,
        memory=memory,
    )


def test_a_token_of_e2b_costs_6144_bytes_in_the_full_pool():
    few = planned(real("gemma-4-E2B"), 24 * GB, kv_tokens=16_000)
    more = planned(real("gemma-4-E2B"), 24 * GB, kv_tokens=32_000)
    assert more.kv_bytes - few.kv_bytes == 16_000 * 6144
    assert (few.kv_tokens, few.shapes["full"].pages) == (16_000, 1001)


def test_every_sequence_has_its_window_and_the_context_what_is_left():
    config = real("gemma-4-E2B")
    plan = planned(config, 12 * GB, length=131_072, max_seqs=16)
    window = peak_pages(131_072, 1, config.window, 16)
    assert plan.shapes["sliding"].pages - 1 >= 16 * window + 512 // 16
    assert plan.shapes["sliding"].pages < 20 * window, "chunks are not paid for by every sequence"
    assert plan.weight_bytes + plan.kv_bytes < 12 * GB
    assert plan.kv_bytes + plan.weight_bytes > 10 * GB, "most of the memory is used"


def test_no_more_pages_than_all_sequences_could_fill():
    plan = planned(model_config(tiny_config()), 100 * GB, length=128, max_seqs=4)
    assert plan.kv_tokens == 4 * 128


def test_weights_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(DoesNotFit, match=r"weights take 9\.2\d GB, the device has 9\.00 GB"):
        planned(real("gemma-4-E2B"), 9 * GB)


@pytest.mark.parametrize("flags", [{"kv_tokens": 10**7}, {"max_seqs": 512}])
def test_pages_that_do_not_fit_are_refused_with_the_numbers(flags: dict[str, int]):
    with pytest.raises(
        DoesNotFit, match=r"K/V pages for \d+ tokens do not fit: \d+\.\d\d GB are left"
    ):
        planned(real("gemma-4-E2B"), 12 * GB, **flags)


@pytest.mark.parametrize("size", [0, -16, 3, 24])
def test_a_page_size_that_is_no_power_of_two_is_refused(size: int):
    with pytest.raises(ConfigError, match=f"page_size is {size}"):
        planned(model_config(tiny_config()), GB, page_size=size)


def test_a_model_without_sliding_layers_has_one_pool():
    layers = ["full_attention"] * 4
    config = model_config(tiny_config(layer_types=layers, num_kv_shared_layers=0))
    assert planned(config, GB, length=128).shapes.keys() == {"full"}


def test_what_programs_need_is_taken_from_the_pages_and_nothing_is_left_over():
    config = real("gemma-4-E2B")
    small, large = Needs(10**8, 10**8), Needs(10**9, 2 * 10**8)
    plans = [planned(config, 14 * GB, length=131_072, needs=needs) for needs in (small, large)]
    given_up = plans[0].kv_bytes - plans[1].kv_bytes
    assert given_up == pytest.approx(large.total - small.total, abs=16 * 6144)
    for plan in plans:
        assert 0 <= plan.spare - 0.02 * plan.memory < 16 * 6144, "the margin is all that is left"


def test_the_estimate_grows_with_rows_tokens_and_experts():
    e2b, moe = real("gemma-4-E2B"), real("gemma-4-26B-A4B")
    small = estimated_needs(e2b, bucket_table(8, 128, "tpu"))
    rows = estimated_needs(e2b, bucket_table(64, 128, "tpu"))
    tokens = estimated_needs(e2b, bucket_table(8, 1024, "tpu"))
    assert small.total < rows.total and small.total < tokens.total
    dense = replace(moe, moe=None)
    table = bucket_table(8, 512, "tpu")
    assert estimated_needs(dense, table).total < estimated_needs(moe, table).total


def test_kv_tokens_are_rounded_up_to_pages():
    plan = planned(model_config(tiny_config()), GB, length=128, kv_tokens=17)
    assert (plan.kv_tokens, plan.shapes["full"].pages) == (32, 3)
