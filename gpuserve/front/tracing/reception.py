"""The network's side of a traced request: when it was received and sent, and who called.

A ``Reception`` is one HTTP request or gRPC call. It is put around the doors only while something is traced:
``TracedApplication`` around an ASGI door, ``traced_unary`` and ``traced_stream`` around the methods of
grpc.aio. What runs inside finds it in ``CURRENT``.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

from gpuserve.front.endpoint.asgi import MODEL_STREAM_INFER, Application, Receive, Scope, Send, is_grpc
from gpuserve.front.tracing.trace import Trace, TraceParent

#: Gives a finished trace away.
Deliver: TypeAlias = Callable[[Trace], None]
Infer: TypeAlias = Callable[[bytes, Any], Awaitable[bytes]]
StreamInfer: TypeAlias = Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]

_HTTP: Final = ("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END")
_GRPC: Final = ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END")
_TRACEPARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
#: As much as every participant must pass on.
_MAX_TRACESTATE_NBYTES: Final = 512


class Reception:
    """One call. Of a stream every request is a trace of its own; otherwise what comes after the first one is
    its child, and not chosen where the first was not.
    """

    def __init__(
        self, deliver: Deliver, headers: Iterable[tuple[bytes, bytes]], *, grpc: bool, stream: bool
    ) -> None:
        self.stream = stream
        self.decided = False
        self.root: Trace | None = None
        self._deliver = deliver
        self._headers = headers
        self._names = _GRPC if grpc else _HTTP
        self._reading_at = self._read_at = time.monotonic_ns()
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
        """A request of this call is traced."""
        trace.note(self._names[0], self._reading_at)
        trace.note(self._names[1], self._read_at)

    def answered(self, trace: Trace) -> None:
        """It has its answer, which is sent next."""
        if self._closed:
            self._deliver(trace)
        else:
            self._answered.append(trace)

    def reading(self) -> None:
        """The next part of the call is waited for."""
        if self.stream:
            self._reading_at = time.monotonic_ns()

    def read(self) -> None:
        """A part of the call has come."""
        self._read_at = time.monotonic_ns()

    def sending(self) -> None:
        """Something is about to be written."""
        now = time.monotonic_ns()
        for trace in self._answered:
            trace.moments.setdefault(self._names[2], now)

    def sent(self) -> None:
        """It is with the connection. In a stream, so is the answer to all that was answered before."""
        self._sent_at = time.monotonic_ns()
        if self.stream:
            self._give([trace for trace in self._answered if self._names[2] in trace.moments])

    def close(self) -> None:
        """Nothing more is sent."""
        self._closed = True
        self._give(self._answered)

    def _give(self, traces: list[Trace]) -> None:
        given = set(traces)
        self._answered = [trace for trace in self._answered if trace not in given]
        for trace in traces:
            if self._names[2] in trace.moments:
                trace.note(self._names[3], self._sent_at)
            self._deliver(trace)


#: The call that the running task serves; None where nothing is traced.
CURRENT: ContextVar[Reception | None] = ContextVar("gpuserve_reception", default=None)


def inside(trace: Trace | None) -> Reception:
    """What the parts of a request find in ``CURRENT``: they are children of its trace, if it has one."""
    reception = Reception(lambda _: None, (), grpc=False, stream=False)
    reception.decided, reception.root = True, trace
    return reception


class TracedApplication:
    """An ASGI door with a ``Reception`` around each of its requests."""

    def __init__(self, door: Application, deliver: Deliver) -> None:
        self._door = door
        self._deliver = deliver

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        stream = scope["path"] == MODEL_STREAM_INFER
        reception = Reception(self._deliver, scope["headers"], grpc=is_grpc(scope), stream=stream)

        async def traced_receive() -> dict[str, Any]:
            reception.reading()
            message = await receive()
            reception.read()
            return message

        async def traced_send(message: dict[str, Any]) -> None:
            reception.sending()
            await send(message)
            reception.sent()

        token = CURRENT.set(reception)
        try:
            await self._door(scope, traced_receive, traced_send)
        finally:
            CURRENT.reset(token)
            reception.close()


def traced_unary(infer: Infer, deliver: Deliver) -> Infer:
    """A unary method of grpc.aio, which sends after it has returned: the end of that is not seen."""

    async def traced(body: bytes, context: Any) -> bytes:
        reception = Reception(deliver, _metadata(context), grpc=True, stream=False)
        CURRENT.set(reception)  # the task is this call's own
        try:
            reply = await infer(body, context)
            reception.sending()
            reception.sent()
            return reply
        finally:
            reception.close()

    return traced


def traced_stream(stream_infer: StreamInfer, deliver: Deliver) -> StreamInfer:
    """A streaming method of grpc.aio."""

    async def traced(bodies: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        reception = Reception(deliver, _metadata(context), grpc=True, stream=True)
        CURRENT.set(reception)  # the task is this call's own
        try:
            async for message in stream_infer(_read(bodies, reception), context):
                reception.sending()
                yield message
                reception.sent()
        finally:
            reception.close()

    return traced


async def _read(bodies: AsyncIterator[bytes], reception: Reception) -> AsyncIterator[bytes]:
    reception.reading()
    async for body in bodies:
        reception.read()
        yield body
        reception.reading()


def _metadata(context: Any) -> Iterable[tuple[bytes, bytes]]:
    return [
        (name.encode(), value.encode())
        for name, value in context.invocation_metadata() or ()
        if isinstance(value, str)
    ]
