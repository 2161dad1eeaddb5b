"""Prometheus metrics of one server: what requests did (counted here) and how the engine is (its latest statistics).

Counters equal the sums of the `usage` that clients are told. Every number is kept once and shown under two names: ours,
`onechip_...`, and vLLM's, `vllm:...` with its labels and bucket edges, so that its dashboards and autoscaling rules and
the Kubernetes inference gateway read this server as they read vLLM. `ROWS` is the table of both names. What vLLM counts
and this engine does not have (LoRA adapters, say) is absent, not zero.

It owns names and buckets, and a registry of its own; it knows no routes.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from onechip.request import STEP_TOKEN_EDGES, EngineInfo, EngineStats

# Edges are vLLM's (v1/metrics/loggers.py). Those of token gaps begin finer: a small model on a fast chip needs 2 ms a
# token, and vLLM's first edge, 10 ms, would hold everything.
FIRST_TOKEN_EDGES = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_EDGES = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_EDGES = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
LENGTH_EDGES = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


@dataclass
class Histogram:
    """Observations by edge (at most the edge), the last count for those above all."""

    edges: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.edges) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.total += value * times


class Metrics:
    """What requests did. `stats`, `info` and `up` are asked when the page is rendered."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        info: Callable[[], EngineInfo | None],
        up: Callable[[], bool],
        model_name: str,
    ):
        self.stats, self.info, self.up, self.model_name = stats, info, up, model_name
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)
        self.first_token = Histogram(FIRST_TOKEN_EDGES)
        self.token_gap = Histogram(TOKEN_GAP_EDGES)
        self.per_token = Histogram(TOKEN_GAP_EDGES)
        self.latency = Histogram(LATENCY_EDGES)
        self.queued = Histogram(LATENCY_EDGES)
        self.prefill = Histogram(LATENCY_EDGES)
        self.decode = Histogram(LATENCY_EDGES)
        self.inference = Histogram(LATENCY_EDGES)
        self.prompt_length = Histogram(LENGTH_EDGES)
        self.generation_length = Histogram(LENGTH_EDGES)
        self._registry = CollectorRegistry()
        self._registry.register(_Page(self))

    def render(self) -> bytes:
        return generate_latest(self._registry)

    @property
    def step_tokens(self) -> Histogram:
        stats = self.stats()
        shown = Histogram(STEP_TOKEN_EDGES)
        shown.counts = list(stats.step_tokens) or shown.counts
        shown.total = stats.packed_tokens
        return shown


class Stopwatch:
    """The times of one choice. Times are of the server process: they include the wire."""

    def __init__(self, metrics: Metrics, prompt_tokens: int):
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._start = time.monotonic()
        self.queued_s = 0.0
        self._last = self._start
        self.first: float | None = None

    def tokens(self, count: int, queued_s: float | None) -> None:
        """`count` tokens arrived together. Their gaps are equal shares of the time since the last ones."""
        now = time.monotonic()
        if self.first is None:
            self.first = now
            self.queued_s = queued_s or 0.0
            self._metrics.first_token.observe(now - self._start)
            count -= 1
        if count:
            self._metrics.token_gap.observe((now - self._last) / count, count)
        self._last = now

    def end(self, reason: str, tokens: int) -> None:
        metrics, now = self._metrics, time.monotonic()
        metrics.finished[reason] += 1
        if self.first is None:
            return
        metrics.latency.observe(now - self._start)
        metrics.queued.observe(self.queued_s)
        metrics.prefill.observe(self.first - self._start - self.queued_s)
        metrics.decode.observe(now - self.first)
        metrics.inference.observe(now - self._start - self.queued_s)
        metrics.prompt_length.observe(self._prompt_tokens)
        metrics.generation_length.observe(tokens)
        if tokens > 1:
            metrics.per_token.observe((now - self.first) / (tokens - 1))


Value = float | Mapping[str, float] | Histogram


@dataclass(frozen=True)
class Row:
    """One metric: our name, its kind, what it says, where the number is, and vLLM's names for it.

    A mapping has one number a value of `label`; vLLM calls that label `vllm_label`.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    value: Callable[[Metrics], Value]
    vllm: tuple[str, ...] = ()
    label: str = ""
    vllm_label: str = ""


def _gauge(name: str, text: str, value: Callable[[Metrics], float], *vllm: str) -> Row:
    return Row(name, "gauge", text, value, vllm)


def _counter(name: str, text: str, value: Callable[[Metrics], float], *vllm: str) -> Row:
    return Row(name, "counter", text, value, vllm)


def _histogram(name: str, text: str, value: Callable[[Metrics], Histogram], *vllm: str) -> Row:
    return Row(name, "histogram", text, value, vllm)


ROWS: tuple[Row, ...] = (
    _gauge("engine_up", "1 when the engine is ready and alive.", lambda m: float(m.up())),
    _gauge(
        "requests_running", "Sequences running on the device.",
        lambda m: m.stats().running, "num_requests_running",
    ),
    _gauge(
        "requests_waiting", "Sequences waiting for a place.",
        lambda m: m.stats().waiting, "num_requests_waiting",
    ),
    _gauge(
        "kv_usage_ratio", "Used share of the fuller K/V pool.",
        lambda m: m.stats().kv_usage, "kv_cache_usage_perc", "gpu_cache_usage_perc",
    ),
    _gauge("kv_pages_total", "K/V pages, both pools.", lambda m: m.stats().pages_total),
    _gauge("kv_pages_free", "K/V pages that are free.", lambda m: m.stats().pages_free),
    _gauge(
        "compiles_since_ready", "Compilations after readiness.",
        lambda m: m.stats().compiles_since_ready,
    ),
    _counter("engine_steps", "Steps of the engine.", lambda m: m.stats().steps),
    _counter(
        "preemptions", "Sequences put back for lack of pages.",
        lambda m: m.stats().preemptions, "num_preemptions",
    ),
    _counter(
        "prompt_tokens", "Prompt tokens of accepted requests.",
        lambda m: m.prompt_tokens, "prompt_tokens",
    ),
    _counter(
        "generation_tokens", "Tokens generated for clients.",
        lambda m: m.generation_tokens, "generation_tokens",
    ),
    _counter(
        "requests_aborted", "Choices whose client went away, or whose time was up.",
        lambda m: m.finished["abort"],
    ),
    Row(
        "requests_finished", "counter", "Choices that ended, by reason.",
        lambda m: dict(m.finished), ("request_success",), "reason", "finished_reason",
    ),
    _histogram(
        "time_to_first_token_seconds", "From submission to a choice's first token.",
        lambda m: m.first_token, "time_to_first_token_seconds",
    ),
    _histogram(
        "inter_token_latency_seconds", "Gap between tokens of a choice.",
        lambda m: m.token_gap, "inter_token_latency_seconds",
    ),
    _histogram(
        "time_per_output_token_seconds", "Mean gap between a choice's tokens.",
        lambda m: m.per_token, "request_time_per_output_token_seconds",
    ),
    _histogram(
        "request_latency_seconds", "From submission to a choice's end.",
        lambda m: m.latency, "e2e_request_latency_seconds",
    ),
    _histogram(
        "request_queue_seconds", "From submission to the first place in a step.",
        lambda m: m.queued, "request_queue_time_seconds",
    ),
    _histogram(
        "request_prefill_seconds", "From the first place in a step to the first token.",
        lambda m: m.prefill, "request_prefill_time_seconds",
    ),
    _histogram(
        "request_decode_seconds", "From the first token to the last.",
        lambda m: m.decode, "request_decode_time_seconds",
    ),
    _histogram(
        "request_inference_seconds", "From the first place in a step to the last token.",
        lambda m: m.inference, "request_inference_time_seconds",
    ),
    _histogram(
        "request_prompt_tokens", "Prompt tokens of a choice that ended.",
        lambda m: m.prompt_length, "request_prompt_tokens",
    ),
    _histogram(
        "request_generation_tokens", "Tokens of a choice that ended.",
        lambda m: m.generation_length, "request_generation_tokens",
    ),
    _histogram(
        "step_tokens", "Tokens that one step of the engine took.",
        lambda m: m.step_tokens, "iteration_tokens_total",
    ),
)  # fmt: skip


class _Page(Collector):
    """The rows as Prometheus families, each under every one of its names."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        theirs = {"model_name": self._metrics.model_name, "engine": "0"}
        for row in ROWS:
            value = row.value(self._metrics)
            yield _family(row, f"onechip_{row.name}", {}, row.label, value)
            for name in row.vllm:
                yield _family(row, f"vllm:{name}", theirs, row.vllm_label, value)
        info = self._metrics.info()
        if info is not None:
            yield _cache_config(info)


def _family(row: Row, name: str, fixed: Mapping[str, str], label: str, value: Value) -> Metric:
    labels = [*fixed, *([label] if label else [])]
    values = list(fixed.values())
    if isinstance(value, Histogram):
        found = HistogramMetricFamily(name, row.text, labels=labels)
        found.add_metric(values, _buckets(value), value.total)
        return found
    kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    family = kind(name, row.text, labels=labels)
    for key, number in ({"": value} if isinstance(value, int | float) else value).items():
        family.add_metric([*values, key] if label else values, number)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus' cumulative buckets."""
    cumulative, seen = list[tuple[str, float]](), 0
    for edge, count in zip((*histogram.edges, float("inf")), histogram.counts, strict=True):
        seen += count
        cumulative.append(("+Inf" if edge == float("inf") else str(float(edge)), seen))
    return cumulative


def _cache_config(info: EngineInfo) -> Metric:
    """vLLM's way to tell the gateway how much K/V there is: a gauge of 1 with the numbers as labels."""
    labels = {
        "block_size": str(info.page_size),
        "num_gpu_blocks": str(info.kv_tokens // max(info.page_size, 1)),
        "engine": "0",
    }
    text = "How much K/V the engine holds, as labels."
    family = GaugeMetricFamily("vllm:cache_config_info", text, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family
