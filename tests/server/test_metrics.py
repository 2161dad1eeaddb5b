"""The metrics page: valid, true, under both names, and back to zero when nothing runs."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes import FakeEngine
from tests.server.harness import MODEL, Running, error, running, until

from onechip.request import EngineInfo, EngineStats
from onechip.server.metrics import ROWS, Histogram, Metrics

INFO = EngineInfo(10, 20, 3, 400, "cpu", "float32", 1.0, 2.0, 3.0, page_size=16)
CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {"max_tokens": 5000, "ignore_eos": True, "prompt": "a"}


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Every sample by name and labels; the parser refuses a page that is not Prometheus text."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), sample
            found[sample.name][labels] = sample.value
    return found


def page(metrics: Metrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    return samples(metrics.render().decode())


def metrics(**stats: Any) -> Metrics:
    return Metrics(lambda: EngineStats(**stats), lambda: INFO, lambda: True, "m")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_both_names_show_the_same_numbers(row: Any):
    it = metrics(running=3, waiting=2, kv_usage=0.5, preemptions=7, steps=9)
    it.prompt_tokens, it.generation_tokens = 11, 13
    it.finished["stop"] += 2
    for value in vars(it).values():
        if isinstance(value, Histogram):
            value.observe(0.2, 3)
    found = page(it)
    suffixes = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    for suffix in suffixes[row.kind]:
        ours = list(found[f"onechip_{row.name}{suffix}"].values())
        for name in row.vllm:
            theirs = found[f"vllm:{name}{suffix}"]
            assert list(theirs.values()) == ours
            for labels in theirs:
                assert {("engine", "0"), ("model_name", "m")} <= set(labels)


def test_names_that_dashboards_and_the_inference_gateway_read_are_there():
    names = """
        num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc num_preemptions_total
        prompt_tokens_total generation_tokens_total request_success_total time_to_first_token_seconds_bucket
        inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
        request_prefill_time_seconds_bucket request_decode_time_seconds_bucket request_prompt_tokens_bucket
        request_generation_tokens_bucket iteration_tokens_total_bucket request_time_per_output_token_seconds_bucket
        cache_config_info
    """
    found = page(metrics())
    assert {f"vllm:{name}" for name in names.split()} <= set(found)
    assert not any("lora" in name for name in found)
    (labels,) = found["vllm:cache_config_info"]
    assert dict(labels) == {"block_size": "16", "num_gpu_blocks": "25", "engine": "0"}
    reasons = {dict(labels)["finished_reason"] for labels in found["vllm:request_success_total"]}
    assert reasons == {"stop", "length", "abort", "error"}


def test_a_histogram_counts_at_most_the_edge():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 14.0


def test_steps_are_shown_by_their_tokens():
    counts = (1, 0, 2, *[0] * 11)
    found = page(metrics(step_tokens=counts, packed_tokens=25))
    name = "vllm:iteration_tokens_total"
    assert list(found[f"{name}_count"].values()) == [3]
    assert list(found[f"{name}_sum"].values()) == [25]
    buckets = {dict(labels)["le"]: value for labels, value in found[f"{name}_bucket"].items()}
    assert (buckets["1.0"], buckets["8.0"], buckets["16.0"], buckets["+Inf"]) == (1, 1, 3, 3)


@pytest.fixture
def server() -> Iterator[Running]:
    with running(FakeEngine(max_model_len=10_000, sleep=0.002)) as it:
        yield it


def value(server: Running, name: str, **labels: str) -> float:
    found = samples(server.http.get("/metrics").text)[name]
    wanted = set(labels.items())
    return sum(number for had, number in found.items() if wanted <= set(had))


def test_counters_follow_normal_aborted_refused_and_preempted_requests(server: Running):
    usages = [server.complete("abc", max_tokens=n, ignore_eos=True)["usage"] for n in (1, 5, 9)]
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json={"model": MODEL, **LONG}, timeout=0.3)
    error(server.post("/v1/completions", prompt="a", temperature=9), 400)
    server.engine.preemptions = 1
    until(lambda: value(server, "vllm:request_success_total", finished_reason="abort") == 1)
    assert value(server, "vllm:request_success_total", finished_reason="length") == 3
    assert value(server, "vllm:request_success_total") == 4
    assert value(server, "onechip_requests_aborted_total") == 1
    prompts = sum(usage["prompt_tokens"] for usage in usages) + 2  # and the aborted one's
    assert value(server, "vllm:prompt_tokens_total") == prompts
    generated = value(server, "vllm:generation_tokens_total")
    assert generated > 1 + 5 + 9
    assert value(server, "vllm:time_to_first_token_seconds_count") == 4
    assert value(server, "vllm:inter_token_latency_seconds_count") == generated - 4
    assert value(server, "vllm:e2e_request_latency_seconds_count") == 4
    assert value(server, "vllm:request_generation_tokens_sum") == generated
    until(lambda: server.client.stats.running == 0)
    server.complete("a", max_tokens=1)
    assert value(server, "vllm:num_preemptions_total") == 1
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        until(lambda gauge=gauge: value(server, f"vllm:{gauge}") == 0)


def test_what_an_alias_asked_for_is_counted_under_the_first_name():
    from onechip.config import ServerConfig

    with running(config=ServerConfig(served_model_names=("a", "b"))) as server:
        server.http.post(
            "/v1/completions", json={"model": "b", "prompt": "x", "max_tokens": 1}
        ).raise_for_status()
        assert value(server, "vllm:generation_tokens_total", model_name="a") == 1


def test_the_phases_of_a_request_add_up(server: Running):
    server.complete("abc", max_tokens=20, ignore_eos=True)
    whole = value(server, "onechip_request_latency_seconds_sum")
    phases = [
        value(server, f"onechip_request_{phase}_seconds_sum")
        for phase in ("queue", "prefill", "decode")
    ]
    assert sum(phases) == pytest.approx(whole, abs=1e-6)
    assert phases[2] >= 19 * 0.002
