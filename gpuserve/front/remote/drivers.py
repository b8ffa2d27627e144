"""A door's side of inference: drivers of models whose queues and workers are in the front. They are in the
door's table of models as other drivers are in the front's, so that what reads requests and writes answers is
the same. What comes back is taken by ``RemoteRequests``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpuserve.declare.spec import ModelSpec
from gpuserve.errors import Stopping, Unavailable, request_error
from gpuserve.front.batching import refusals
from gpuserve.front.batching.interface import SchedulerStatistics
from gpuserve.front.memory.scatter import cut, requested
from gpuserve.front.models.interface import Driver
from gpuserve.front.models.pending import OnAnswer, OnResponse, PendingRequest
from gpuserve.front.passage import messages
from gpuserve.front.passage.passage import Passage
from gpuserve.front.v2.types import InferRequest, InferResponse, OutputTensor, RegionSlice
from gpuserve.front.v2.validation import CheckedRequest
from gpuserve_worker.memory import arena
from gpuserve_worker.memory.arena import Arena, Block, OutOfMemory
from gpuserve_worker.protocol.wire import INLINE_NBYTES

if TYPE_CHECKING:
    from gpuserve.front.models.model_tracer import ModelTracer

#: What a trace is found by.
#: As many shapes of requests are remembered; then all are forgotten.
_MOST_TEMPLATES: Final = 1024
#: So much of requests is told of in one message.
_ALIKE_NBYTES: Final = 64 << 10
_TRACE_HEADERS: Final = frozenset({b"traceparent", b"tracestate"})


#: The front checks what it is told.
_UNCHECKED: Final = CheckedRequest(1, None, 0)


class RemoteRequest(PendingRequest):
    """A request that the front runs. ``ticket`` is what both know it by."""

    __slots__ = ("ticket",)

    ticket: int


class RemoteRequests:
    """The requests of one door that the front has, and the memory that they lie in."""

    def __init__(self, passage: Passage, max_arena_nbytes: int) -> None:
        self._passage = passage
        self._tickets = itertools.count(1)
        self._pending: dict[int, RemoteRequest] = {}
        #: The numbers of templates that the front knows, and what is to be said by them.
        self._templates: dict[Any, int] = {}
        self._numbers = itertools.count(1)
        self._alike: list[tuple[Any, ...]] = []
        self._alike_nbytes = 0
        self._blocks: dict[tuple[int, int], Block] = {}
        self._lent = arena.Mapping()
        #: Leases of responses that were closed in this turn of the loop.
        self._closed: list[int] = []
        self.tracing = False
        #: The front takes nothing new.
        self.draining = False
        #: The headers that a model tells its clients apart by, "" for their addresses; none: no model does.
        self.fair_by: frozenset[bytes] = frozenset()
        self.arena = Arena(max_arena_nbytes, self._on_segment, self._on_drop)
        self.obey: Mapping[type, Callable[[Any], None]] = {
            messages.Outputs: self._on_outputs,
            messages.Result: self._on_result,
            messages.Refused: self._on_refused,
            messages.Ended: self._on_ended,
            messages.Freed: self._on_freed,
            messages.Unlend: lambda message: self._lent.detach(message.segment),
        }

    # ---- to the front ---------------------------------------------------------------------

    def submit(self, pending: RemoteRequest) -> None:
        """Have the front run a request; its body is with the front then."""
        ticket = pending.ticket = next(self._tickets)
        self._pending[ticket] = pending
        request = pending.request
        if (
            request.parameters
            or request.regions
            or request.priority
            or request.sequence is not None
            or pending.on_response is not None
            or self.fair_by
            or self.tracing
        ):
            self._post(pending, request)
        else:  # a template says all of it but its data
            self._post_alike(ticket, request)
        request.inputs.clear()

    def _post_alike(self, ticket: int, request: InferRequest) -> None:
        inputs = request.inputs
        told = tuple([(one.name, one.datatype, one.shape) for one in inputs])
        key = request.model_name, request.model_version, request.outputs, told
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._forget_templates()
            template = self._templates[key] = next(self._numbers)
            self._say_alike()
            self._passage.post(messages.Template(template, *key))
        parts = [
            one.data if type(one.data) is bytes and len(one.data) <= INLINE_NBYTES else self._told(one.data)
            for one in inputs
        ]
        if not self._alike:
            self._passage.call_at_end(self._say_alike)
        self._alike.append((ticket, template, request.timeout_s, *parts))
        self._alike_nbytes += sum([len(one) for one in parts])
        if self._alike_nbytes > _ALIKE_NBYTES:
            self._say_alike()

    def _say_alike(self) -> None:
        if self._alike:
            alike, self._alike, self._alike_nbytes = self._alike, [], 0
            self._passage.post(messages.Alike(tuple(alike)))

    def _forget_templates(self) -> None:
        """Begin anew, with other numbers: shapes are as many as clients like."""
        self._say_alike()
        self._passage.post(messages.ForgetTemplates())
        self._templates.clear()

    def _post(self, pending: RemoteRequest, request: InferRequest) -> None:
        inputs = tuple([(one.name, one.datatype, one.shape, self._told(one.data)) for one in request.inputs])
        self._passage.post(
            messages.Infer(
                pending.ticket,
                request.model_name,
                request.model_version,
                request.id,
                request.parameters,
                inputs,
                request.outputs,
                request.timeout_s,
                request.priority,
                request.empty_final,
                tuple([(name, _place(one)) for name, one in request.placements.items()]),
                request.sequence,
                self._client(request),
                self._received(request) if self.tracing else None,
                pending.on_response is not None,
            )
        )

    def take_back(self, pending: RemoteRequest) -> None:
        if self._pending.pop(pending.ticket, None) is not None:
            self._say_alike()
            self._passage.post(messages.TakenBack((pending.ticket,)))

    def _told(self, data: Any) -> Any:
        """Where the front finds a tensor. A large one that is not in the arena yet is copied there."""
        if type(data) is bytes and len(data) <= INLINE_NBYTES:
            return data
        if isinstance(data, RegionSlice):
            return _place(data)
        if not isinstance(data, Block):
            if len(data) <= INLINE_NBYTES:
                return bytes(data)
            try:
                block = self.arena.allocate(len(data))
            except OutOfMemory:
                return bytes(data)
            block.view[:] = data
            data = block
        self._blocks[data.segment, data.offset] = data
        return data.segment, data.offset, data.nbytes

    def _client(self, request: InferRequest) -> tuple[str | bytes, messages.Headers] | None:
        """Whom a fair queue takes a request to be of; None where none asks."""
        sender, names = request.sender, self.fair_by
        if not names or sender is None:
            return None
        return sender.ends.source, tuple([one for one in sender.head.headers if one[0] in names])

    def _received(self, request: InferRequest) -> tuple[int, bool, messages.Headers]:
        head = request.sender.head
        headers = tuple([one for one in head.headers if one[0] in _TRACE_HEADERS])
        return time.monotonic_ns(), head.is_grpc, headers

    def _on_segment(self, segment: int, fd: int, nbytes: int) -> None:
        self._passage.send(messages.Segment(segment, nbytes), [fd])

    def _on_drop(self, segment: int) -> None:
        self._passage.post(messages.DropSegment(segment))

    # ---- from the front -------------------------------------------------------------------

    def _on_outputs(self, message: messages.Outputs) -> None:
        tickets, rows, version, told, lease = message
        waiting = [self._pending.pop(ticket, None) if ticket else None for ticket in tickets]
        on_close = _Part(waiting, partial(self._close, lease)).close if lease else None
        tensors = [
            OutputTensor(name, datatype, shape, self._data(data)) for name, datatype, shape, data in told
        ]
        try:
            parts = [tensors] if len(rows) == 1 else cut(tensors, rows)
        except ValueError:  # a worker is not trusted: user code runs in it
            self._give_nonsense(waiting, on_close)
            return
        for pending, outputs in zip(waiting, parts, strict=True):
            if pending is None:
                continue
            request = pending.request
            if request.outputs:
                self._give_chosen(pending, version, outputs, on_close)
            else:
                name = request.model_name
                pending.give(InferResponse(name, version, request.id, {}, outputs, on_close))

    def _give_chosen(
        self,
        pending: RemoteRequest,
        version: str,
        outputs: list[OutputTensor],
        on_close: Callable[[], None] | None,
    ) -> None:
        """Answer a request with those of its outputs that it asks for."""
        request, spec = pending.request, pending.spec
        chosen = requested(spec, request, outputs)
        if isinstance(chosen, list):
            pending.give(InferResponse(spec.name, version, request.id, {}, chosen, on_close))
            return
        pending.give(chosen)
        if on_close is not None:
            on_close()

    def _data(self, data: Any) -> bytes | memoryview:
        return data if type(data) is bytes else self._lent.view(*data)

    def _give_nonsense(
        self, waiting: Sequence[RemoteRequest | None], on_close: Callable[[], None] | None
    ) -> None:
        for pending in waiting:
            if pending is not None:
                pending.give(refusals.nonsense(pending.spec.name))
                if on_close is not None:
                    on_close()

    def _on_result(self, message: messages.Result) -> None:
        ticket, version, parameters, told, lease, final = message
        pending = self._pending.get(ticket)
        if pending is None:  # taken back, and the message crossed ours
            if lease:
                self._close(lease)
            return
        outputs = [
            OutputTensor(name, datatype, shape, data)
            if type(data) is bytes
            else self._output(name, datatype, shape, data)
            for name, datatype, shape, data in told
        ]
        request = pending.request
        on_close = partial(self._close, lease) if lease else None
        response = InferResponse(pending.spec.name, version, request.id, parameters, outputs, on_close)
        if final:
            del self._pending[ticket]
            pending.give(response)
        elif pending.on_response is None:
            response.close()
        else:
            pending.on_response(response)

    def _output(self, name: str, datatype: str, shape: tuple[int, ...], place: Any) -> OutputTensor:
        if place is None:
            return OutputTensor(name, datatype, shape, b"", True)
        return OutputTensor(name, datatype, shape, self._lent.view(*place))

    def _on_refused(self, message: messages.Refused) -> None:
        pending = self._pending.pop(message.ticket, None)
        if pending is None:
            return
        error = request_error(message.code, message.text)
        if message.untried and self.draining and isinstance(error, Unavailable):
            error = Stopping(message.text)
        error.untried = message.untried
        pending.give(error)

    def _on_ended(self, message: messages.Ended) -> None:
        pending = self._pending.pop(message.ticket, None)
        if pending is not None:
            pending.give(None)

    def _on_freed(self, message: messages.Freed) -> None:
        for place in message.blocks:
            self._blocks.pop(place).free()

    def attach(self, message: messages.Lend, fds: list[int]) -> None:
        """Map a segment that is lent; its descriptor stays the caller's."""
        self._lent.attach(message.segment, fds[0], message.nbytes)

    def _close(self, lease: int) -> None:
        if not self._closed:
            self._passage.call_at_end(self._say_closed)
        self._closed.append(lease)

    def _say_closed(self) -> None:
        closed, self._closed = self._closed, []
        self._passage.post(messages.Closed(tuple(closed)))

    def close(self) -> None:
        """The front is gone, or the door ends."""
        for pending in list(self._pending.values()):
            pending.give(Unavailable("the server is stopping"))
        self._pending.clear()
        self._lent.close()
        self.arena.close()


class _Part:
    """The lease of a batch's outputs, as long as some of this door's responses are not closed."""

    __slots__ = ("_left", "_release")

    def __init__(self, waiting: Sequence[RemoteRequest | None], release: Callable[[], None]) -> None:
        self._left = sum([one is not None for one in waiting])
        self._release = release
        if not self._left:
            release()

    def close(self) -> None:
        self._left -= 1
        if not self._left:
            self._release()


class RemoteDriver(Driver):
    """One version of a model, as a door knows it."""

    def __init__(self, spec: ModelSpec, was_ready: bool, requests: RemoteRequests) -> None:
        self.spec = spec
        self.arena = requests.arena
        self._requests = requests
        self._was_ready = was_ready

    @property
    def ready(self) -> bool:
        return self._was_ready

    @property
    def was_ready(self) -> bool:
        return self._was_ready

    @property
    def tracer(self) -> ModelTracer | None:
        return None

    @tracer.setter
    def tracer(self, tracer: ModelTracer | None) -> None:
        """The front traces."""

    def statistics(self) -> SchedulerStatistics:
        raise NotImplementedError("the front has the counts of a model")

    def submit(
        self,
        request: InferRequest,
        on_response: OnResponse | None = None,
        on_answer: OnAnswer | None = None,
    ) -> PendingRequest:
        pending = RemoteRequest(self, request, _UNCHECKED, (), False, on_response, on_answer)
        self._requests.submit(pending)
        return pending

    def take_back(self, pending: PendingRequest) -> None:
        assert isinstance(pending, RemoteRequest)
        if pending.give_up():
            self._requests.take_back(pending)

    def stop_accepting(self) -> None:
        """The front refuses what comes."""

    def close(self) -> None:
        """The front has what was begun."""


class Unpinned:
    """The regions of a door, which has none: the front keeps those that a request names while it runs."""

    def pin(self, request: InferRequest) -> None: ...

    def unpin(self, request: InferRequest) -> None: ...


def _place(one: RegionSlice) -> tuple[str, int, int]:
    return one.region, one.offset, one.nbytes
