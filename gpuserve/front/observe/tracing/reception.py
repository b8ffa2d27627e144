"""The network's side of a traced request: when it was received and sent, and who called. A ``Reception`` is
one HTTP request or gRPC call. The doors make one for each while anything is traced, by ``Receptions``, tell
it when something comes and goes, and give it to the requests that the call leads to. Of a single request only
the time is noted at which it began, and the rest is made once it is to be traced.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from gpuserve.front.observe.tracing.trace import Trace, TraceParent

#: Gives a finished trace away.
Deliver: TypeAlias = Callable[[Trace], None]

_HTTP: Final = ("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END")
_GRPC: Final = ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END")
_TRACEPARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
#: As much as every participant must pass on.
_MAX_TRACESTATE_NBYTES: Final = 512


class Receptions:
    """Makes the receptions of one front; ``deliver`` takes traces, and is None while nothing is traced."""

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
        """The reception of a call that begins now, or began then; None while nothing is traced."""
        if self.deliver is None:
            return None
        return Reception(self.deliver, headers, grpc=grpc, stream=stream, began_ns=began_ns)


class Reception:
    """One call, begun at ``began_ns`` or now. Of a stream every request is a trace of its own; otherwise
    later ones are children.
    """

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
        """The caller's trace context, where it sent one that is well formed."""
        found = {name: value for name, value in self._headers if name in {b"traceparent", b"tracestate"}}
        traceparent = found.get(b"traceparent", b"").strip()
        if _TRACEPARENT.fullmatch(traceparent) is None:
            return None
        tracestate = found.get(b"tracestate", b"")[:_MAX_TRACESTATE_NBYTES]
        return TraceParent(traceparent.decode(), tracestate.decode("latin-1"))

    def begin(self, trace: Trace) -> None:
        trace.note(self._names[0], self._reading_at)
        trace.note(self._names[1], self._read_at)

    def answered(self, trace: Trace) -> None:
        """It has its answer, which is sent next."""
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
        """Note when ``send`` begins and ends to send something; ``end``: the last of the call."""
        self.sending()
        send()
        self.sent()
        if end:
            self.close()

    def sent(self) -> None:
        """It is with the connection. In a stream, so is the answer to all that was answered before."""
        self._sent_at = time.monotonic_ns()
        if self.stream:
            self._give([trace for trace in self._answered if self._names[2] in trace.moments])

    def close(self) -> None:
        self._closed = True
        self._give(self._answered)

    def _give(self, traces: list[Trace]) -> None:
        given = set(traces)
        self._answered = [trace for trace in self._answered if trace not in given]
        for trace in traces:
            if self._names[2] in trace.moments:
                trace.note(self._names[3], self._sent_at)
            self._deliver(trace)


def inside(trace: Trace | None) -> Reception:
    """The reception of the parts of a request: they are children of its trace, if it has one."""
    reception = Reception(lambda _: None, (), grpc=False, stream=False)
    reception.decided, reception.root = True, trace
    return reception
