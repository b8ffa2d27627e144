"""The types of an inference callable's arguments, and spans that a program opens itself. There is never a
parent span, as the server traces elsewhere.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from gpuserve.compat.pytriton.exceptions import PyTritonValidationError
from gpuserve_worker.inference.inference_request import Request

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Response(UserDict[str, "NDArray[Any]"]):
    """The outputs of one request by name; ``data`` is the dictionary itself."""

    def __init__(self, data: dict[str, NDArray[Any]]) -> None:
        self.data = data

    def __repr__(self) -> str:
        return f"Response(data={self.data!r})"


Requests: TypeAlias = list[Request]
Responses: TypeAlias = list[Response]
ResponsesOrError: TypeAlias = Responses | Exception
ResponsesNoneOrError: TypeAlias = Responses | Exception | None
Scope: TypeAlias = dict[str, Any]

_tracer: Any = None


def set_telemetry_tracer(tracer: Any) -> None:
    """Set the OpenTelemetry tracer of ``traced_span``, once. Raise ValueError if there is one already."""
    global _tracer
    if _tracer is not None:
        raise ValueError("Telemetry tracer is already set")
    _tracer = tracer


def get_telemetry_tracer() -> Any:
    return _tracer


def traced_span(request: Any, span_name: str, **kwargs: Any) -> AbstractContextManager[Any]:
    """Return a span around a part of the work for a request. Without a tracer, the span does nothing."""
    return start_span_from_span(getattr(request, "span", None), span_name, **kwargs)


def start_span_from_span(span: Any, span_name: str, **kwargs: Any) -> AbstractContextManager[Any]:
    """Return a span below another span, for ``with``. Without a tracer, the span does nothing."""
    if _tracer is None:
        return nullcontext(span)
    manager: AbstractContextManager[Any] = _tracer.start_as_current_span(span_name, **kwargs)
    return manager


def parse_trace_config(trace_config: Sequence[str]) -> Any:
    """Raise PyTritonValidationError: the server traces as ``trace_config`` says, not this process."""
    raise PyTritonValidationError(
        "a tracer is not made of trace_config by gpuserve, whose server does the tracing: "
        "give a tracer of your own to set_telemetry_tracer()"
    )


build_proxy_tracer_from_triton_config = parse_trace_config
