"""The ids and trace contexts of the requests that a callable runs. Coroutines and threads of
``asyncio.to_thread`` inherit them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Final

#: The trace of a request on the wire: ``traceparent`` and ``tracestate``; empty if it is not traced.
TraceContext = tuple[str, ...]

_IDS: Final[ContextVar[tuple[str, ...]]] = ContextVar("gpuserve_request_ids", default=())
_TRACES: Final[ContextVar[Sequence[TraceContext]]] = ContextVar("gpuserve_traces", default=())
_DETACH: Final[ContextVar[Callable[[], None] | None]] = ContextVar("gpuserve_detach", default=None)


def enter_requests(ids: tuple[str, ...], traces: Sequence[TraceContext] = ()) -> None:
    """Set the requests that the calling context runs from now on. If a request is traced and the callable has
    imported OpenTelemetry, set OpenTelemetry's current context too.
    """
    leave_requests()
    _IDS.set(ids)
    if traces:
        _TRACES.set(traces)
        if "opentelemetry" in sys.modules:  # otherwise nobody reads its context
            _DETACH.set(_attach([dict(_headers(one)) for one in traces if one]))


def leave_requests() -> None:
    """Set that the calling context runs no request."""
    _IDS.set(())
    if _TRACES.get():
        _TRACES.set(())
        detach = _DETACH.get()
        if detach is not None:
            _DETACH.set(None)
            detach()


def current_request_ids() -> tuple[str, ...]:
    """Return the ids of the requests of the running batch, in order, "" for a request without an id. Return
    () if no batch is running, or if the server neither keeps an access log nor traces a request of the batch.
    """
    return _IDS.get()


def current_traces() -> tuple[dict[str, str], ...]:
    """Return the W3C trace context of each request of the running batch, in order: the headers
    ``traceparent`` and perhaps ``tracestate``, {} for a request that is not traced. Return () if none is.
    """
    return tuple([dict(_headers(one)) for one in _TRACES.get()])


def _headers(context: TraceContext) -> list[tuple[str, str]]:
    pairs = zip(("traceparent", "tracestate"), context, strict=False)
    return [(name, value) for name, value in pairs if value]


def _attach(traces: list[dict[str, str]]) -> Callable[[], None]:
    """Set OpenTelemetry's context to the only trace, or to a span in the first trace that links the others.
    Return a function that ends the span and restores the context.
    """
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    current, *others = map(TraceContextTextMapPropagator().extract, traces)
    span = None
    if others:
        links = [trace.Link(trace.get_current_span(one).get_span_context()) for one in others]
        span = trace.get_tracer("gpuserve").start_span("batch", current, links=links)
        current = trace.set_span_in_context(span, current)
    token = context.attach(current)

    def detach() -> None:
        context.detach(token)
        if span is not None:
            span.end()

    return detach
