"""The record of one traced request until it is written, and of the call that contained it. Moments are
nanoseconds of the monotonic clock.

A ``Reception`` records one HTTP request or gRPC call: when it was received and sent, and its caller. For a
single request only the start time is recorded at first, and the rest once it is chosen for tracing.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.front.observability.tracing.trace_settings import TraceLevel

#: The names of the moments, in the order in which they occur.
MOMENTS: Final = (
    "HTTP_RECV_START", "HTTP_RECV_END", "GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START",
    "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
    "INFER_RESPONSE_COMPLETE", "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END", "GRPC_SEND_START",
    "GRPC_SEND_END",
)  # fmt: skip


class TracedTensor(NamedTuple):
    """An input or output tensor. ``data`` is a copy of its first bytes, ``cut`` if there were more."""

    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    cut: bool


class TraceParent(NamedTuple):
    """The W3C trace context of a caller, unchanged; ``traceparent`` is well formed."""

    traceparent: str
    tracestate: str

    @property
    def sampled(self) -> bool:
        return bool(int(self.traceparent.rpartition("-")[2], 16) & 1)


@dataclass(slots=True, eq=False)
class Trace:
    """One traced request, with the fields of a trace file. ``scope``: whose settings chose it."""

    id: int
    model: str
    version: int
    request_id: str
    level: TraceLevel
    scope: str
    log_frequency: int
    parent: TraceParent | None
    #: ``traceparent`` and ``tracestate`` for the callable, with the id of the span "compute", if the mode is
    #: opentelemetry.
    context: tuple[str, ...] = ()
    parent_id: int = 0
    moments: dict[str, int] = field(default_factory=dict)
    tensors: list[TracedTensor] = field(default_factory=list)
    children: list[Trace] = field(default_factory=list)
    instance: str = ""
    error: str = ""
    finished: bool = False
    #: The offset between a moment and nanoseconds since 1970.
    epoch_ns: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())
    #: Called once with the answer, until the trace is finished.
    end: Any = field(init=False, repr=False)

    def note(self, moment: str, at_ns: int | None = None) -> None:
        """Record the time of a moment, by default now. A repeated moment keeps its last time."""
        self.moments[moment] = time.monotonic_ns() if at_ns is None else at_ns

    def enter(self, traceparent: str) -> None:
        """Choose the id of the span "compute", in the trace of ``traceparent``; "" starts a new trace."""
        trace_id = traceparent[3:35] or f"{random.getrandbits(128):032x}"
        tracestate = "" if self.parent is None else self.parent.tracestate
        self.context = (f"00-{trace_id}-{random.getrandbits(64):016x}-01", tracestate)

    @property
    def otel_trace_id(self) -> str:
        return self.context[0][3:35]

    @property
    def nbytes(self) -> int:
        """Return the approximate memory of this trace."""
        own = 2000 + sum(len(one.data) for one in self.tensors)
        return own + sum(child.nbytes for child in self.children)


# ---- calls ---------------------------------------------------------------------------------------

#: Receives a finished trace.
Deliver: TypeAlias = Callable[[Trace], None]

_HTTP: Final = ("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END")
_GRPC: Final = ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END")
_TRACEPARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
#: The length that every participant must pass on.
_MAX_TRACESTATE_NBYTES: Final = 512


class Receptions:
    """A factory of receptions. ``deliver`` receives traces, and is None while nothing is traced."""

    def __init__(self) -> None:
        self.deliver: Deliver | None = None

    def of(
        self,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        grpc: bool = True,
        stream: bool = False,
        began_ns: int | None = None,
    ) -> Reception | None:
        """Return the reception of a call that starts now or at ``began_ns``; None without tracing."""
        if self.deliver is None:
            return None
        return Reception(self.deliver, headers, grpc=grpc, stream=stream, began_ns=began_ns)


class Reception:
    """A call since ``began_ns`` or now. Later requests are its children; those of a stream are separate."""

    def __init__(
        self,
        deliver: Deliver,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        grpc: bool,
        stream: bool,
        began_ns: int | None = None,
    ) -> None:
        self.stream = stream
        self.decided = False
        self.root: Trace | None = None
        self._deliver = deliver
        self._headers = headers
        self._names = _GRPC if grpc else _HTTP
        self._read_at = time.monotonic_ns()
        self._reading_at = self._read_at if began_ns is None else began_ns
        self._sent_at = 0
        self._answered: list[Trace] = []
        self._closed = False

    def parent(self) -> TraceParent | None:
        """Return the caller's trace context if it is well formed, else None."""
        found = {name: value for name, value in self._headers if name in {b"traceparent", b"tracestate"}}
        traceparent = found.get(b"traceparent", b"").strip()
        if _TRACEPARENT.fullmatch(traceparent) is None:
            return None
        tracestate = found.get(b"tracestate", b"")[:_MAX_TRACESTATE_NBYTES]
        return TraceParent(traceparent.decode(), tracestate.decode("latin-1"))

    @property
    def began_ns(self) -> int:
        """Return the start of the call, or of its current message."""
        return self._reading_at

    def begin(self, trace: Trace) -> None:
        trace.note(self._names[0], self._reading_at)
        trace.note(self._names[1], self._read_at)

    def answered(self, trace: Trace) -> None:
        """Note that a request has its answer, which is sent next."""
        if self._closed:
            self._deliver(trace)
        else:
            self._answered.append(trace)

    def reading(self) -> None:
        if self.stream:
            self._reading_at = time.monotonic_ns()

    def read(self) -> None:
        self._read_at = time.monotonic_ns()

    def sending(self) -> None:
        now = time.monotonic_ns()
        for trace in self._answered:
            trace.moments.setdefault(self._names[2], now)

    def send(self, send: Callable[[], None], *, end: bool = True) -> None:
        """Call ``send`` and record its start and end. ``end`` marks the last one of the call."""
        self.sending()
        send()
        self.sent()
        if end:
            self.close()

    def sent(self) -> None:
        """Note that the connection has the bytes. In a stream this completes all requests answered before."""
        self._sent_at = time.monotonic_ns()
        if self.stream:
            self._deliver_all([trace for trace in self._answered if self._names[2] in trace.moments])

    def close(self) -> None:
        self._closed = True
        self._deliver_all(self._answered)

    def _deliver_all(self, traces: list[Trace]) -> None:
        given = set(traces)
        self._answered = [trace for trace in self._answered if trace not in given]
        for trace in traces:
            if self._names[2] in trace.moments:
                trace.note(self._names[3], self._sent_at)
            self._deliver(trace)


def inside(trace: Trace | None) -> Reception:
    """Return the reception for the parts of a request, which become children of its trace, if it has one."""
    reception = Reception(lambda _: None, (), grpc=False, stream=False)
    reception.decided, reception.root = True, trace
    return reception
