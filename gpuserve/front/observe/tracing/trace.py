"""What is noted of one traced request until it is written; moments are nanoseconds of the monotonic clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpuserve.front.observe.tracing.values import TraceLevel

#: The names of the moments, in the order in which they come about.
MOMENTS: Final = (
    "HTTP_RECV_START",
    "HTTP_RECV_END",
    "GRPC_WAITREAD_START",
    "GRPC_WAITREAD_END",
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "INFER_RESPONSE_COMPLETE",
    "REQUEST_END",
    "HTTP_SEND_START",
    "HTTP_SEND_END",
    "GRPC_SEND_START",
    "GRPC_SEND_END",
)


class TracedTensor(NamedTuple):
    """A tensor as it came or went; ``data`` is a copy of its first bytes, ``cut`` where there were more."""

    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    cut: bool


class TraceParent(NamedTuple):
    """The W3C trace context of a caller, as it came; ``traceparent`` is well formed."""

    traceparent: str
    tracestate: str

    @property
    def sampled(self) -> bool:
        return bool(int(self.traceparent.rpartition("-")[2], 16) & 1)


@dataclass(slots=True, eq=False)
class Trace:
    """One traced request, with a trace file's many fields. ``scope``: whose settings chose it."""

    id: int
    model: str
    version: int
    request_id: str
    level: TraceLevel
    scope: str
    log_frequency: int
    parent: TraceParent | None
    parent_id: int = 0
    moments: dict[str, int] = field(default_factory=dict)
    tensors: list[TracedTensor] = field(default_factory=list)
    children: list[Trace] = field(default_factory=list)
    instance: str = ""
    error: str = ""
    finished: bool = False
    #: What added to a moment makes it one since 1970.
    epoch_ns: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())

    def note(self, moment: str, at_ns: int | None = None) -> None:
        """Note the time of a moment, by default now. One that comes about again counts the last time."""
        self.moments[moment] = time.monotonic_ns() if at_ns is None else at_ns

    @property
    def nbytes(self) -> int:
        """About how much memory waits with this trace to be written."""
        own = 2000 + sum(len(one.data) for one in self.tensors)
        return own + sum(child.nbytes for child in self.children)
