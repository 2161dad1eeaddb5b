"""OpenTelemetry traces: one server span for each generating request, with the GenAI semantic attributes.

The span is made when the request has ended, from its Record, so nothing is paid while tokens flow. It continues the
caller's trace (W3C traceparent), and follows that trace's decision whether to sample. The libraries are an extra; they
are imported only when an endpoint is configured.
"""

import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from onechip import __version__
from onechip.errors import ConfigError
from onechip.server.journal import Record

log = logging.getLogger("onechip.server")

TRACES_PATH = "/v1/traces"  # where a collector takes OTLP over HTTP
NANOSECONDS = 1_000_000_000


class Tracer:
    """Spans of one server, sent in batches by a thread of the library's."""

    def __init__(self, exporter: Any, *, batch: bool = True):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        resource = Resource.create({"service.name": "onechip", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        processor = BatchSpanProcessor(exporter) if batch else SimpleSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("onechip.server", __version__)

    def span(self, record: Record) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(
            f"{record.operation} {record.model}",
            context=TraceContextTextMapPropagator().extract(record.trace),
            kind=SpanKind.SERVER,
            attributes=attributes(record),
            start_time=record.began_ns,
        )
        if record.status >= 500 or record.error is not None:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(record.began_ns + int(record.seconds * NANOSECONDS))

    def close(self) -> None:
        """Send what is left, and stop."""
        self._provider.shutdown()


def attributes(record: Record) -> Mapping[str, Any]:
    """The span's attributes: gen_ai.* as the semantic conventions name them, and HTTP's."""
    sampling = record.sampling
    told: dict[str, Any] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "onechip",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.answer_id,
        "gen_ai.response.finish_reasons": tuple(record.finish),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.latency.time_in_queue": record.queued_s,
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.path,
        "onechip.request_id": record.request_id,
        "error.type": record.error,
    }
    if record.first_token is not None:
        told["gen_ai.latency.time_to_first_token"] = record.first_token - record.began
    if sampling is not None:
        told |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.choice.count": sampling.n,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.stop_sequences": sampling.stop,
        }
    return {name: value for name, value in told.items() if value is not None}


def open_tracer(endpoint: str | None) -> Tracer | None:
    """A Tracer that exports to an OTLP/HTTP endpoint, None without one. Raises ConfigError: a bad URL, no libraries."""
    if endpoint is None:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-endpoint is {endpoint!r}; it must be an http(s) URL, such as http://localhost:4318"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint needs the OpenTelemetry libraries ({error.name} is missing): "
            "pip install 'onechip[otel]', or leave the endpoint out"
        ) from error
    path = parts.path.rstrip("/")
    url = endpoint.rstrip("/") if path.endswith(TRACES_PATH) else endpoint.rstrip("/") + TRACES_PATH
    log.info("traces go to %s", url)
    return Tracer(OTLPSpanExporter(endpoint=url))
