"""OpenTelemetry export of traces, sent by OTLP over HTTP. Only this module imports OpenTelemetry, an extra:
``pip install gpuserve[otel]``. The SDK's variables (``OTEL_BSP_…``, ``OTEL_EXPORTER_OTLP_…``) apply.

Traces of mode "opentelemetry" become spans::

    InferRequest            from the first byte received to the last one sent; child of the caller's span
    └── <model>             in the scheduler, from acceptance to the answer
        ├── queue           waiting for a worker
        ├── compute         at the worker, including transfers
        │   └── <instance>  in the inference callable
        └── <model> …       requests that this one caused inside the server

Spans are created in the thread of the trace sink, from recorded moments; the SDK's own thread sends them.
"""

from __future__ import annotations

from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gpuserve.config.settings.server import TraceSettings
from gpuserve.core.version import VERSION
from gpuserve.front.observability.tracing.request_trace import Trace

_ROOT: Final = "InferRequest"
_MODEL: Final = "triton.model_name"
_RECEIVED: Final = ("HTTP_RECV_START", "GRPC_WAITREAD_START", "REQUEST_START")
_SENT: Final = ("HTTP_SEND_END", "GRPC_SEND_END", "REQUEST_END")


class _ChosenIds(RandomIdGenerator):
    """A generator of ids: ``trace_id`` for all spans; ``span_id`` for the next span, random if it is 0."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        chosen, self.span_id = self.span_id, 0
        return chosen or super().generate_span_id()


class OtlpWriter:
    """A converter of traces into spans for the SDK."""

    def __init__(self, settings: TraceSettings) -> None:
        # The sampling decision has already been made.
        self._ids = _ChosenIds()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create(settings.resource),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.url)))
        self._tracer = self._provider.get_tracer("gpuserve", VERSION)

    def write(self, traces: list[Trace]) -> None:
        for trace in traces:
            headers = {} if trace.parent is None else trace.parent._asdict()
            caller = TraceContextTextMapPropagator().extract(headers)
            self._ids.trace_id = int(trace.otel_trace_id, 16)
            received = next(trace.moments[one] for one in _RECEIVED if one in trace.moments)
            sent = next(trace.moments[one] for one in _SENT if one in trace.moments)
            inside = self._span(_ROOT, trace, (received, sent), caller, _attributes(trace))
            self._write_model(trace, inside)

    def close(self) -> None:
        self._provider.shutdown()

    def _write_model(self, trace: Trace, context: Context) -> None:
        at = trace.moments
        times = at["REQUEST_START"], at["REQUEST_END"]
        inside = self._span(trace.model, trace, times, context, _attributes(trace))
        answered = at["INFER_RESPONSE_COMPLETE"]
        self._span("queue", trace, (at["QUEUE_START"], at.get("COMPUTE_START", answered)), inside, {})
        if "COMPUTE_START" in at:
            times = at["COMPUTE_START"], at.get("COMPUTE_END", answered)
            self._ids.span_id = int(trace.context[0].split("-")[2], 16)
            compute = self._span("compute", trace, times, inside, {"gpuserve.instance": trace.instance})
            if "COMPUTE_INPUT_END" in at:
                times = at["COMPUTE_INPUT_END"], at["COMPUTE_OUTPUT_START"]
                self._span(trace.instance, trace, times, compute, {})
        for child in trace.children:
            self._write_model(child, inside)

    def _span(
        self, name: str, trace: Trace, times: tuple[int, int], context: Context, attributes: dict[str, Any]
    ) -> Context:
        start, end = (moment + trace.epoch_ns for moment in times)
        kind = SpanKind.SERVER if name == _ROOT else SpanKind.INTERNAL
        span = self._tracer.start_span(name, context, kind, attributes, start_time=start)
        if trace.error and _MODEL in attributes:
            span.set_status(Status(StatusCode.ERROR, trace.error))
        span.end(end)
        return set_span_in_context(span, context)


def _attributes(trace: Trace) -> dict[str, Any]:
    attributes = {_MODEL: trace.model, "triton.model_version": trace.version, "triton.trace_id": trace.id}
    if trace.parent_id:
        attributes["triton.trace_parent_id"] = trace.parent_id
    if trace.request_id:
        attributes["triton.request_id"] = trace.request_id
    return attributes
