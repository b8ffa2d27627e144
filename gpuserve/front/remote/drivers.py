"""A door's side of inference: drivers of models whose queues and workers are in the front. They are in the
door's table of models as other drivers are in the front's, so that what reads requests and writes answers is
the same. What comes back is taken by ``RemoteRequests``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpuserve.core.errors import RequestError, Stopping, Unavailable, request_error
from gpuserve.front.batching import refusals
from gpuserve.front.batching.interface import SchedulerStatistics
from gpuserve.front.memory.blocks import free_body
from gpuserve.front.memory.scatter import cut, requested
from gpuserve.front.models.interface import Driver
from gpuserve.front.models.pending import AnswerState, OnAnswer, OnResponse, PendingRequest
from gpuserve.front.passage import messages
from gpuserve.front.passage.absence import FrontAbsence, front_died
from gpuserve.front.passage.passage import Passage
from gpuserve.front.remote.alike import AlikeRequests
from gpuserve.front.remote.door_memory import DoorMemory, place_of
from gpuserve.front.requests.inference import InferRequest, InferResponse, OutputTensor
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.orphans import ORPHANS, OUTPUT_LEASE

if TYPE_CHECKING:
    from gpuserve.front.models.watching import RequestWatcher

#: What a trace is found by.
_TRACE_HEADERS: Final = frozenset({b"traceparent", b"tracestate"})
#: Looked up once: on an Enum class that costs ten times a global.
_WAITING: Final = AnswerState.WAITING


class RemoteRequest(PendingRequest):
    """A request that the front runs; a door has no queue, so of what a queue asks it has nothing. ``ticket``
    is what both know it by. ``timeout_s`` and ``enqueued_at`` are there where it has a time limit of its
    own, and ``attempts`` where a front has died that had it.
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


class RemoteRequests:
    """The requests of one door that the front has, and the memory that they lie in."""

    def __init__(self, passage: Passage, max_arena_nbytes: int, absence: FrontAbsence) -> None:
        self._passage = passage
        self._absence = absence
        self._tickets = itertools.count(1)
        self._pending: dict[int, RemoteRequest] = {}
        self._alike = AlikeRequests(passage)
        self.memory = DoorMemory(passage, max_arena_nbytes)
        self.tracing = False
        #: The front takes nothing new.
        self.draining = False
        #: The headers that a model tells its clients apart by, "" for their addresses; none: no model does.
        self.fair_by: frozenset[bytes] = frozenset()
        self.obey: Mapping[type, Callable[[Any], None]] = {
            messages.Outputs: self._on_outputs,
            messages.Result: self._on_result,
            messages.RefusedRequest: self._on_refused,
            messages.StreamEnded: self._on_ended,
            **self.memory.obey,
        }

    # ---- to the front ---------------------------------------------------------------------

    def submit(self, pending: RemoteRequest) -> None:
        """Have the front run a request; its body is with the front then. Without a front it waits for one."""
        if self._absence.is_now:
            self._hold(pending)
            return
        ticket = pending.ticket = next(self._tickets)
        self._pending[ticket] = pending
        request, memory = pending.request, self.memory
        memory.is_used = False
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
            told = memory.told
            self._alike.add(ticket, request, [told(one.data, one.problem) for one in request.inputs])
        if memory.is_used:  # small data stays here, for another front
            request.inputs.clear()

    def _post(self, pending: RemoteRequest, request: InferRequest) -> None:
        told = self.memory.told
        inputs = tuple(
            [(one.name, one.datatype, one.shape, told(one.data, one.problem)) for one in request.inputs]
        )
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
                tuple([(name, place_of(one)) for name, one in request.placements.items()]),
                request.sequence,
                self._client(request),
                self._received(request) if self.tracing else None,
                pending.on_response is not None,
            )
        )

    def _hold(self, pending: RemoteRequest) -> None:
        """Have a request wait until there is a front, for no longer than its own time."""
        pending.ticket = 0
        request, timers = pending.request, list[asyncio.TimerHandle]()
        limit_s = None if request.timeout_s is None else pending.timeout_s

        def refuse(error: RequestError) -> None:
            free_body(request)
            pending.give(error)

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
        self._absence.hold(resume, refuse)

    def take_back(self, pending: RemoteRequest) -> None:
        if self._pending.pop(pending.ticket, None) is not None:
            self._alike.say()
            self._passage.post(messages.TakenBack((pending.ticket,)))

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

    # ---- from the front -------------------------------------------------------------------

    def _on_outputs(self, message: messages.Outputs) -> None:
        tickets, rows, version, told, lease = message
        waiting = [self._pending.pop(ticket, None) if ticket else None for ticket in tickets]
        holders = len(waiting) - waiting.count(None)
        on_close = _SharedLease(holders, self._release(lease)).close if lease else None
        tensors = [
            OutputTensor(name, datatype, shape, self.memory.view(data))
            for name, datatype, shape, data in told
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

    def _release(self, lease: int) -> Callable[[], None]:
        return partial(self.memory.close_lease, self.memory.epoch, lease)

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
                self.memory.close_lease(self.memory.epoch, lease)
            return
        outputs = [
            OutputTensor(name, datatype, shape, data)
            if type(data) is bytes
            else self._output(name, datatype, shape, data)
            for name, datatype, shape, data in told
        ]
        request = pending.request
        on_close = _SharedLease(1, self._release(lease)).close if lease else None
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
        return OutputTensor(name, datatype, shape, self.memory.view(place))

    def _on_refused(self, message: messages.RefusedRequest) -> None:
        pending = self._pending.pop(message.ticket, None)
        if pending is None:
            return
        error = request_error(message.code, message.text)
        if message.untried and self.draining and isinstance(error, Unavailable):
            error = Stopping(message.text)
        error.untried = message.untried
        pending.give(error)

    def _on_ended(self, message: messages.StreamEnded) -> None:
        pending = self._pending.pop(message.ticket, None)
        if pending is not None:
            pending.give(None)

    def lose(self) -> None:
        """Take leave of the front, which has died, and of the memory shared with it. Of the requests that it
        had, those that may run twice wait for the next front, once; the others are answered.
        """
        pending, self._pending = self._pending, {}
        self._alike.forget_all()
        self.memory.lose()
        for one in pending.values():
            if _may_run_again(one):
                one.attempts = 1
                self._hold(one)
            else:
                one.give(front_died())

    def close(self) -> None:
        """The door ends."""
        for pending in list(self._pending.values()):
            pending.give(Unavailable("the server is stopping"))
        self._pending.clear()
        self.memory.close()


def _may_run_again(pending: RemoteRequest) -> bool:
    """Whether a request that was in a front that died may be given to another one: by the rules for a worker
    that died, but that what only the front knew of it is lost. A large body is not kept here.
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
    """The lease of a batch's outputs, as long as some of this door's responses are not closed."""

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


class RemoteDriver(Driver):
    """One version of a model, as a door knows it."""

    def __init__(self, spec: ModelSpec, was_ready: bool, requests: RemoteRequests) -> None:
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

    @property
    def tracer(self) -> RequestWatcher | None:
        return None

    @tracer.setter
    def tracer(self, tracer: RequestWatcher | None) -> None:
        """The front traces, and a door tells it what it needs for that."""

    def statistics(self) -> SchedulerStatistics:
        raise NotImplementedError("the front has the counts of a model")

    def submit(
        self,
        request: InferRequest,
        on_response: OnResponse | None = None,
        on_answer: OnAnswer | None = None,
    ) -> PendingRequest:
        pending = RemoteRequest(self, request, on_response, on_answer)
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
