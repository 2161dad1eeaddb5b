"""Prometheus metrics of one server: what requests did (counted here) and how the engine is (its latest statistics).

Counters equal the sums of the `usage` that clients are told. It owns names and buckets, and a registry of its own; it
knows no routes.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from onechip.request import EngineStats

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 80)
PER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
LATENCY_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 960)


class Metrics:
    """Counters and histograms of requests, beside gauges that `stats` and `up` feed at scrape time."""

    def __init__(self, stats: Callable[[], EngineStats], up: Callable[[], bool]):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, up))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated for clients.")
        self.aborted = self._counter("requests_aborted", "Choices whose client went away.")
        self.finished = Counter(
            "onechip_requests_finished",
            "Choices that ended, by reason.",
            ["reason"],
            registry=self._registry,
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "From submission to a choice's first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self.per_token = self._histogram(
            "time_per_output_token_seconds",
            "Mean gap between a choice's tokens.",
            PER_TOKEN_BUCKETS,
        )
        self.latency = self._histogram(
            "request_latency_seconds", "From submission to a choice's end.", LATENCY_BUCKETS
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"onechip_{name}", text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"onechip_{name}", text, buckets=buckets, registry=self._registry)


class Stopwatch:
    """The times of one choice. Times are of the server process: they include the wire."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._start = time.monotonic()
        self._first: float | None = None

    def token(self) -> None:
        if self._first is None:
            self._first = time.monotonic()
            self._metrics.first_token.observe(self._first - self._start)

    def end(self, reason: str, tokens: int) -> None:
        now = time.monotonic()
        self._metrics.finished.labels(reason).inc()
        self._metrics.latency.observe(now - self._start)
        if self._first is not None and tokens > 1:
            self._metrics.per_token.observe((now - self._first) / (tokens - 1))


class _EngineCollector(Collector):
    """The engine's own numbers, read when scraped."""

    def __init__(self, stats: Callable[[], EngineStats], up: Callable[[], bool]):
        self._stats = stats
        self._up = up

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = {
            "engine_up": (float(self._up()), "1 when the engine is ready and alive."),
            "requests_running": (stats.running, "Sequences running on the device."),
            "requests_waiting": (stats.waiting, "Sequences waiting for a place."),
            "kv_usage_ratio": (stats.kv_usage, "Used share of the fuller K/V pool."),
            "kv_pages_total": (stats.pages_total, "K/V pages, both pools."),
            "kv_pages_free": (stats.pages_free, "K/V pages that are free."),
            "compiles_since_ready": (stats.compiles_since_ready, "Compilations after readiness."),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"onechip_{name}", text, value=value)
        yield CounterMetricFamily(
            "onechip_preemptions", "Sequences put back for lack of pages.", value=stats.preemptions
        )
        yield CounterMetricFamily("onechip_engine_steps", "Steps of the engine.", value=stats.steps)
