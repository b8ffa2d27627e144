"""A callable with spans of its own, and the traces and ids that it sees as its output."""

from __future__ import annotations

import json
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

import gpuserve


def traced(url: str) -> Any:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=url)))
    trace.set_tracer_provider(provider)

    def see(requests: list[gpuserve.Request]) -> list[dict[str, Any]]:
        carrier: dict[str, str] = {}
        with requests[0].traced_span("work"):
            propagate.inject(carrier)
        seen = json.dumps([gpuserve.current_traces(), gpuserve.current_request_ids(), carrier]).encode()
        return [{"seen": [[seen]] * len(one["x"])} for one in requests]

    return see
