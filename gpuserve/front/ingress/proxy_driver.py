"""Proxy drivers: an ingress process's models, whose queues and workers are in the front."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from gpuserve.core.errors import RequestError, Stopping, Unavailable, inner_code, request_error
from gpuserve.front.ingress import channel_messages as messages
from gpuserve.front.ingress.ingress_memory import IngressMemory, place_of
from gpuserve.front.ingress.ipc_channel import FrontOutage, IpcChannel, front_died
from gpuserve.front.ipc.gather import ONE_TURN_NBYTES, Join, copy_in_parts, free_body
from gpuserve.front.ipc.scatter import select_outputs, split_outputs
from gpuserve.front.models.model_driver import Driver
from gpuserve.front.models.pending_request import AnswerState, OnAnswer, OnResponse, PendingRequest
from gpuserve.front.net.exchange import Exchange, Head
from gpuserve.front.observability.tracing.request_trace import Reception
from gpuserve.front.requests.inference import InferRequest, InferResponse, OutputTensor
from gpuserve.front.scheduling import refusals
from gpuserve.front.scheduling.scheduler import SchedulerStatistics
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import ORPHANS, OUTPUT_LEASE, OutOfMemory

#: The headers that identify a trace.
_TRACE_HEADERS: Final = frozenset({b"traceparent", b"tracestate"})
#: Looked up once: a look-up on an Enum class costs ten times a look-up of a global.
_WAITING: Final = AnswerState.WAITING
_ON_HEAP: Final = frozenset({bytes, memoryview})


class ProxyRequest(PendingRequest):
    """A request that the front runs, known to both sides by its ``ticket``. ``timeout_s`` and ``enqueued_at``
    are set if it has a time limit of its own, ``attempts`` if a front died that had it.
    """

    __slots__ = ("ticket",)

    ticket: int

    def __init__(
        self,
        driver: Driver,
        request: InferRequest,
        on_response: OnResponse | None,
        on_answer: OnAnswer | None,
    ) -> None:
        self._driver = driver
        self._state = _WAITING
        self.request = request
        if request.timeout_s is not None:
            self.timeout_s, self.enqueued_at = request.timeout_s, time.monotonic()
        self.on_response = on_response
        self.on_answer = on_answer
        if on_answer is None:
            self.answer = asyncio.get_running_loop().create_future()


class ProxyRequests:
    """The requests of one ingress process at the front, and the memory of their inputs."""

    def __init__(self, channel: IpcChannel, max_arena_nbytes: int, outage: FrontOutage) -> None:
        self._channel = channel
        self._outage = outage
        self._tickets = itertools.count(1)
        self._pending: dict[int, ProxyRequest] = {}
        self._templated = TemplatedSender(channel)
        self.memory = IngressMemory(channel, max_arena_nbytes)
        self.tracing = False
        #: The front refuses new requests.
        self.draining = False
        #: The headers by which models distinguish clients, "" for addresses; empty if no model is fair.
        self.fairness_headers: frozenset[bytes] = frozenset()
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            messages.BatchOutputs: self._on_outputs,
            messages.RequestResult: self._on_result,
            messages.FailedRequest: self._on_refused,
            messages.StreamEnded: self._on_ended,
            **self.memory.handlers,
        }

    # ---- to the front ---------------------------------------------------------------------

    def submit(self, pending: ProxyRequest) -> None:
        """Have the front run a request, which owns its body then. During an outage the request waits."""
        if self._outage.is_active:
            self._hold(pending)
            return
        ticket = pending.ticket = next(self._tickets)
        self._pending[ticket] = pending
        request, memory = pending.request, self.memory
        for one in request.inputs:
            if type(one.data) in _ON_HEAP and len(one.data) > ONE_TURN_NBYTES:
                self._copy_first(pending)
                return
        memory.has_references = False
        if (
            request.parameters
            or request.regions
            or request.priority
            or request.sequence is not None
            or pending.on_response is not None
            or self.fairness_headers
            or self.tracing
        ):
            self._post(pending, request)
        else:  # a template describes all but its data
            describe = memory.describe
            self._templated.add(ticket, request, [describe(one.data, one.problem) for one in request.inputs])
        if memory.has_references:  # small data is kept for another front
            request.inputs.clear()

    def _copy_first(self, pending: ProxyRequest) -> None:
        """Copy large tensors from the heap into the arena, over several turns of the loop, then submit."""
        arena, ticket, joins, loop = (
            self.memory.arena,
            pending.ticket,
            list[Join](),
            asyncio.get_running_loop(),
        )
        on_heap = [one for one in pending.request.inputs if type(one.data) in _ON_HEAP]
        large = [one for one in on_heap if len(one.data) > ONE_TURN_NBYTES]

        def copies() -> Iterator[None]:
            joins.extend([Join(arena.sparse(len(one.data)), (one.data,)) for one in large])
            yield from copy_in_parts(joins, arena)

        def copy_part() -> None:
            try:
                if self._pending.get(ticket) is pending and next(parts, self) is not self:
                    loop.call_soon(copy_part)
                    return
            except OutOfMemory:
                del self._pending[ticket]
                pending.deliver(refusals.no_memory(pending.spec.name))
            if self._pending.pop(ticket, None) is pending:
                for one, (block, _) in zip(large, joins, strict=True):
                    one.data = block
                self.submit(pending)
            else:  # the request was cancelled or refused, or the front has died
                for block, _ in joins:
                    block.free()

        parts = copies()
        copy_part()

    def _post(self, pending: ProxyRequest, request: InferRequest) -> None:
        describe = self.memory.describe
        inputs = tuple(
            [(one.name, one.datatype, one.shape, describe(one.data, one.problem)) for one in request.inputs]
        )
        self._channel.post(
            messages.SubmitRequest(
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
                tuple([(name, place_of(one)) for name, one in request.placements.items()]),
                request.sequence,
                self._client(request),
                self._received(request) if self.tracing else None,
                pending.on_response is not None,
            )
        )

    def _hold(self, pending: ProxyRequest) -> None:
        """Hold a request until a front is connected, but not beyond its time limit."""
        pending.ticket = 0
        request, timers = pending.request, list[asyncio.TimerHandle]()
        limit_s = None if request.timeout_s is None else pending.timeout_s

        def refuse(error: RequestError) -> None:
            free_body(request)
            pending.deliver(error)

        def resume() -> None:
            for timer in timers:
                timer.cancel()
            if pending.is_over:
                free_body(request)
                return
            if limit_s is not None:
                request.timeout_s = max(0.0, left_s())
            self.submit(pending)

        def left_s() -> float:
            assert limit_s is not None
            return limit_s - (time.monotonic() - pending.enqueued_at)

        if limit_s is not None:
            late = refusals.too_late(pending.spec.name, limit_s, was_queued=True)
            timers.append(asyncio.get_running_loop().call_later(left_s(), refuse, late))
        self._outage.hold(resume, refuse)

    def cancel(self, pending: ProxyRequest) -> None:
        if self._pending.pop(pending.ticket, None) is not None:
            self._templated.send_pending()
            self._channel.post(messages.CancelRequests((pending.ticket,)))

    def _client(self, request: InferRequest) -> tuple[str | bytes, messages.Headers] | None:
        """Return the identity of the client for fair queues; None if no queue needs it."""
        sender, names = request.sender, self.fairness_headers
        if not names or sender is None:
            return None
        return sender.endpoints.source, tuple([one for one in sender.head.headers if one[0] in names])

    def _received(self, request: InferRequest) -> tuple[int, bool, messages.Headers]:
        head = request.sender.head
        return time.monotonic_ns(), head.is_grpc, _trace_headers(head)

    def relay_unread(self, name: str, error: RequestError, exchange: Exchange, reception: Reception) -> None:
        """Have the front trace a call that no model receives."""
        head, began_ns = exchange.head, reception.began_ns
        code, text, headers = inner_code(error), str(error), _trace_headers(head)
        self._channel.post(messages.UnreadRequest(name, code, text, began_ns, head.is_grpc, headers))

    # ---- from the front -------------------------------------------------------------------

    def _on_outputs(self, message: messages.BatchOutputs) -> None:
        tickets, rows, version, described, lease = message
        waiting = [self._pending.pop(ticket, None) if ticket else None for ticket in tickets]
        holders = len(waiting) - waiting.count(None)
        on_close = _SharedLease(holders, self._release(lease)).close if lease else None
        view = self.memory.view
        tensors = [OutputTensor(name, kind, shape, view(data)) for name, kind, shape, data in described]
        try:
            parts = [tensors] if len(rows) == 1 else split_outputs(tensors, rows)
        except ValueError:  # workers are not trusted, because user code runs in them
            for one in waiting:
                if one is not None:
                    one.deliver(refusals.nonsense(one.spec.name))
                    if on_close is not None:
                        on_close()
            return
        for pending, outputs in zip(waiting, parts, strict=True):
            if pending is None:
                continue
            request = pending.request
            name, chosen = request.model_name, outputs
            if request.outputs:
                selected = select_outputs(pending.spec, request, outputs)
                if not isinstance(selected, list):
                    pending.deliver(selected)
                    if on_close is not None:
                        on_close()
                    continue
                name, chosen = pending.spec.name, selected
            pending.deliver(InferResponse(name, version, request.id, {}, chosen, on_close))

    def _release(self, lease: int) -> Callable[[], None]:
        return partial(self.memory.close_lease, self.memory.epoch, lease)

    def _on_result(self, message: messages.RequestResult) -> None:
        ticket, version, parameters, described, lease, final = message
        pending = self._pending.get(ticket)
        if pending is None:  # cancelled while the message was on its way
            if lease:
                self.memory.close_lease(self.memory.epoch, lease)
            return
        outputs = []
        for name, datatype, shape, data in described:
            placed = data is None  # the output is in the client's region
            outputs.append(
                OutputTensor(name, datatype, shape, b"" if placed else self.memory.view(data), placed)
            )
        request = pending.request
        on_close = _SharedLease(1, self._release(lease)).close if lease else None
        response = InferResponse(pending.spec.name, version, request.id, parameters, outputs, on_close)
        if final:
            del self._pending[ticket]
            pending.deliver(response)
        elif pending.on_response is None:
            response.close()
        else:
            pending.on_response(response)

    def _on_refused(self, message: messages.FailedRequest) -> None:
        pending = self._pending.pop(message.ticket, None)
        if pending is None:
            return
        error = request_error(message.code, message.text)
        if message.untried and self.draining and isinstance(error, Unavailable):
            error = Stopping(message.text)
        error.untried = message.untried
        pending.deliver(error)

    def _on_ended(self, message: messages.StreamEnded) -> None:
        pending = self._pending.pop(message.ticket, None)
        if pending is not None:
            pending.deliver(None)

    def on_front_died(self) -> None:
        """Forget the dead front and its memory. Requests that may run twice wait for the next, once."""
        pending, self._pending = self._pending, {}
        self._templated.forget_all()
        self.memory.on_front_died()
        for one in pending.values():
            if _may_run_again(one):
                one.attempts = 1
                self._hold(one)
            else:
                one.deliver(front_died())

    def close(self) -> None:
        """Fail all requests, because the ingress process ends."""
        for pending in list(self._pending.values()):
            pending.deliver(Unavailable("the server is stopping"))
        self._pending.clear()
        self.memory.close()


def _may_run_again(pending: ProxyRequest) -> bool:
    """Return whether the next front may run a dead one's request: by the rules for a dead worker, without
    state that only the front knew, and without a large body, which is not kept here.
    """
    spec, request = pending.spec, pending.request
    return (
        spec.retry_on_worker_death
        and not spec.is_ensemble
        and bool(request.inputs)
        and not request.regions
        and request.sequence is None
        and pending.on_response is None
        and not hasattr(pending, "attempts")
        and not pending.is_over
    )


class _SharedLease:
    """The lease of a batch's outputs, held until all responses of this process are closed."""

    __slots__ = ("_left", "_release")

    memory_kind = OUTPUT_LEASE

    def __init__(self, holders: int, release: Callable[[], None]) -> None:
        self._left = holders
        self._release = release
        if not holders:
            release()

    def __del__(self) -> None:
        if self._left > 0:
            ORPHANS.add(self)

    def reclaim(self) -> None:
        self._left = 1
        self.close()

    def close(self) -> None:
        self._left -= 1
        if not self._left:
            self._release()


class ProxyDriver(Driver):
    """One version of a model in an ingress process."""

    def __init__(self, spec: ModelSpec, was_ready: bool, requests: ProxyRequests) -> None:
        self.spec = spec
        self.arena = requests.memory.arena
        self._requests = requests
        self._was_ready = was_ready

    @property
    def ready(self) -> bool:
        return self._was_ready

    @property
    def was_ready(self) -> bool:
        return self._was_ready

    def statistics(self) -> SchedulerStatistics:
        raise NotImplementedError("the front has the counts of a model")

    def submit(
        self, request: InferRequest, on_response: OnResponse | None = None, on_answer: OnAnswer | None = None
    ) -> PendingRequest:
        pending = ProxyRequest(self, request, on_response, on_answer)
        self._requests.submit(pending)
        return pending

    def cancel(self, pending: PendingRequest) -> None:
        assert isinstance(pending, ProxyRequest)
        if pending.abandon():
            self._requests.cancel(pending)

    def stop_accepting(self) -> None:
        """Do nothing: the front refuses new requests."""

    def close(self) -> None:
        """Do nothing: the front owns running requests."""


class NoRegionPins:
    """The absent region pins of an ingress process: the front pins the regions of each request."""

    def pin(self, request: InferRequest) -> None: ...

    def unpin(self, request: InferRequest) -> None: ...


#: The most templates, which clients can create at will; beyond that all are forgotten.
_MOST_TEMPLATES: Final = 1024
#: The most bytes of requests in one message.
_TOGETHER_NBYTES: Final = 64 << 10


class TemplatedSender:
    """Sends requests by templates, all requests of one turn of the event loop in one message."""

    def __init__(self, channel: IpcChannel) -> None:
        self._channel = channel
        self._templates: dict[Any, int] = {}
        self._numbers = itertools.count(1)
        self._unsent: list[tuple[Any, ...]] = []
        self._nbytes = 0

    def add(self, ticket: int, request: InferRequest, data: Sequence[Any]) -> None:
        """Queue a request, with the ``data`` of its inputs, to be sent with others."""
        described = tuple([(one.name, one.datatype, one.shape) for one in request.inputs])
        key = request.model_name, request.model_version, request.outputs, described
        template = self._templates.get(key) or self._define_template(key)
        if not self._unsent:
            self._channel.call_at_end(self.send_pending)
        self._unsent.append((ticket, template, request.timeout_s, *data))
        self._nbytes += len(data[0]) if len(data) == 1 else sum([len(one) for one in data])
        if self._nbytes > _TOGETHER_NBYTES:
            self.send_pending()

    def send_pending(self) -> None:
        """Send all queued requests now, before a message that refers to them."""
        if self._unsent:
            unsent, self._unsent, self._nbytes = self._unsent, [], 0
            self._channel.post(messages.TemplatedRequests(tuple(unsent)))

    def forget_all(self) -> None:
        """Forget all templates and queued requests, because the next front does not know them."""
        self._templates.clear()
        self._unsent, self._nbytes = [], 0

    def _define_template(self, key: Any) -> int:
        self.send_pending()
        if len(self._templates) >= _MOST_TEMPLATES:
            self._channel.post(messages.ForgetTemplates())
            self._templates.clear()
        template = self._templates[key] = next(self._numbers)
        self._channel.post(messages.RequestTemplate(template, *key))
        return template


def _trace_headers(head: Head) -> messages.Headers:
    return tuple([one for one in head.headers if one[0] in _TRACE_HEADERS])
