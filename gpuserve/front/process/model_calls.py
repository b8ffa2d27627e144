"""Calls of inference callables to other models of the server: a worker asks on its link, as a client would by
a request, and gets its answers on it. What is asked and answered stays in the arenas of the workers where it
is large: the front lends the memory of one to the other. What a worker says is checked like a client's word.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, Final

from gpuserve.core.errors import RequestError, Unavailable
from gpuserve.front.links.worker_link import WorkerLink
from gpuserve.front.memory.blocks import free_body
from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.pending import PendingRequest
from gpuserve.front.process.model_commands import ModelCommands, end_call
from gpuserve.front.process.ports import Spawn
from gpuserve.front.service.service import InferenceService
from gpuserve.front.v2.sequence_parameters import sequence_of
from gpuserve.front.v2.types import (
    Data,
    InferRequest,
    InferResponse,
    InputTensor,
    OutputTensor,
)
from gpuserve_worker.protocol import wire

#: A worker may return late what an earlier front lent it: the numbers of that are not given out again.
_LEASES_OF_A_FRONT: Final = 1 << 32


class _CallingWorker:
    """One worker: its calls under way, and answers lent to it, by lease. It waits for its ``stuck`` calls."""

    def __init__(self, link: WorkerLink, driver: ModelDriver) -> None:
        self.link = link
        self.driver = driver
        self.stuck: set[int] = set()
        self.pending: dict[int, PendingRequest] = {}
        self.lent: dict[int, InferResponse] = {}
        self._leases = itertools.count(link.epoch * _LEASES_OF_A_FRONT + 1)

    def lend(self, response: InferResponse) -> int:
        """Keep a response until it is returned; the number of that lease."""
        lease = next(self._leases)
        self.lent[lease] = response
        return lease

    def close(self) -> None:
        """Take back the calls of a worker that is gone, and free the memory that it was lent."""
        for pending in list(self.pending.values()):
            pending.take_back()
        self.pending.clear()
        while self.lent:
            self.lent.popitem()[1].close()


class ModelCalls:
    """Answers the calls of all workers of one front."""

    def __init__(self, service: InferenceService, spawn: Spawn) -> None:
        self._service = service
        self._commands = ModelCommands(service, spawn)
        self._callers: dict[WorkerLink, _CallingWorker] = {}

    def add(self, link: WorkerLink, driver: ModelDriver) -> None:
        """Answer the calls of a worker of a model until its link is closed."""
        self._callers[link] = _CallingWorker(link, driver)
        link.on_close.append(self._forget)

    def take(self, link: WorkerLink, message: wire.Call | wire.CallOff | wire.Return | wire.Command) -> None:
        """Answer, call off, take back, or obey, as a worker says; WireError, ValueError, TypeError: it may
        not.
        """
        caller = self._callers[link]
        match message:
            case wire.Call():
                self._ask(caller, message)
            case wire.CallOff(call_id):
                self._call_off(caller, call_id)
            case wire.Command():
                self._commands.take(link, caller.driver.spec.name, message)
            case wire.Return(leases):
                for lease in leases:
                    if (response := caller.lent.pop(lease, None)) is not None:
                        response.close()

    def _forget(self, link: WorkerLink) -> None:
        self._callers.pop(link).close()

    def _ask(self, caller: _CallingWorker, call: wire.Call) -> None:
        try:
            request = _request(caller.link, call)
        except RequestError as error:
            end_call(caller.link, call.call_id, error)
            return
        # What a model accepted before a drain is finished and may ask; not so a thread that only goes on.
        request.depth = int(caller.driver.unfinished > 0)
        # Responses of a stream are held to the end of their leases, so that streams have credit.
        pass_on = partial(_answer, caller, call.call_id, final=False, held=True) if call.stream else None
        try:
            if call.waits and self._is_of_itself(caller, call):
                self._check_not_stuck(caller, call, request)
            pending = self._service.inference.submit(request, pass_on)
        except RequestError as error:
            caller.stuck.discard(call.call_id)
            end_call(caller.link, call.call_id, error)
            return
        caller.pending[call.call_id] = pending
        pending.answer.add_done_callback(lambda _: self._answered(caller, call, pending))

    def _is_of_itself(self, caller: _CallingWorker, call: wire.Call) -> bool:
        if call.model != caller.driver.spec.name:
            return False
        try:
            return self._service.models.find(call.model, call.version) is caller.driver
        except RequestError:  # it will be told so
            return False

    def _check_not_stuck(self, caller: _CallingWorker, call: wire.Call, request: InferRequest) -> None:
        """Raise Unavailable for a request of a model to itself that no instance is left to answer."""
        caller.stuck.add(call.call_id)
        instances = self._in_rotation(caller.driver)
        if all(one.stuck for one in instances):
            free_body(request)
            raise _all_stuck(call.model, len(instances))

    def can_spare(self, driver: ModelDriver, instance: str) -> bool:
        """Whether a model has another instance that does not wait for an answer of the model itself."""
        others = [one for one in self._in_rotation(driver) if one.link.instance != instance]
        return any(not one.stuck for one in others)

    def refuse_stuck(self, driver: ModelDriver) -> None:
        """Refuse the calls of a model to itself where all instances that are left wait for such calls."""
        callers = self._in_rotation(driver)
        if not all(one.stuck for one in callers):
            return
        for caller in callers:
            for call_id in list(caller.stuck):
                if (pending := caller.pending.pop(call_id, None)) is not None:
                    pending.take_back()
                caller.stuck.discard(call_id)
                end_call(caller.link, call_id, _all_stuck(driver.spec.name, len(callers)))

    def _in_rotation(self, driver: ModelDriver) -> list[_CallingWorker]:
        names = driver.workers.instances.in_rotation()
        return [one for one in self._callers.values() if one.driver is driver and one.link.instance in names]

    def _call_off(self, caller: _CallingWorker, call_id: int) -> None:
        pending = caller.pending.pop(call_id, None)
        caller.stuck.discard(call_id)
        if pending is not None:
            pending.take_back()
            # The thread that waited for it may still be waiting for a message.
            end_call(caller.link, call_id)

    def _answered(self, caller: _CallingWorker, call: wire.Call, pending: PendingRequest) -> None:
        caller.stuck.discard(call.call_id)
        if caller.pending.pop(call.call_id, None) is None:  # called off, or its worker is gone
            is_there = not pending.answer.cancelled() and pending.answer.exception() is None
            if is_there and (response := pending.answer.result()) is not None:
                response.close()
            return
        error = pending.answer.exception()
        if isinstance(error, RequestError):
            end_call(caller.link, call.call_id, error)
        elif error is not None:
            raise error
        elif (response := pending.answer.result()) is None:
            end_call(caller.link, call.call_id)
        else:
            _answer(caller, call.call_id, response, final=True, held=False)


def _all_stuck(model: str, count: int) -> Unavailable:
    return Unavailable(
        f"model {model!r} asks itself, but all of its instances ({count}) wait for such an answer: expected "
        "one that is free"
    )


def _answer(
    caller: _CallingWorker, call_id: int, response: InferResponse, *, final: bool, held: bool
) -> None:
    tensors, lends = _tensors(caller.link, response)
    lease = caller.lend(response) if lends or held else 0
    caller.link.send(wire.Answer(call_id, lease, tensors, dict(response.parameters), None, final))
    if not lease:
        response.close()


def _tensors(borrower: WorkerLink, response: InferResponse) -> tuple[tuple[wire.WireTensor, ...], bool]:
    """The outputs of a response for another worker, and whether any of them is lent."""
    tensors = [
        wire.WireTensor(one.name, one.datatype, one.shape, _payload(borrower, response, one))
        for one in response.outputs
    ]
    return tuple(tensors), any(isinstance(one.payload, wire.Loan) for one in tensors)


def _payload(borrower: WorkerLink, response: InferResponse, output: OutputTensor) -> wire.Payload:
    data, memory = output.data, response.memory
    if memory is not None and isinstance(data, memoryview) and len(data) > wire.INLINE_NBYTES:
        place = memory.locate(data)
        if place is not None:
            loan: wire.Loan = place.memory.lend(place.segment, place.offset, len(data), borrower)
            return loan
    return bytes(data)


def _request(link: WorkerLink, call: wire.Call) -> InferRequest:
    sequence = (
        sequence_of(call.sequence[0], start=call.sequence[1], end=call.sequence[2]) if call.sequence else None
    )
    inputs = [
        InputTensor(name, datatype, tuple(shape), _data(link, payload))
        for name, datatype, shape, payload in wire.tensors(call.inputs)
    ]
    parameters: dict[str, Any] = dict(call.parameters)
    outputs = tuple(call.requested_outputs)
    timeout_s = call.timeout_s or None
    return InferRequest(
        call.model,
        call.version,
        call.request_id,
        parameters,
        inputs,
        outputs,
        timeout_s,
        sequence=sequence,
    )


def _data(link: WorkerLink, payload: wire.Payload) -> Data:
    if isinstance(payload, bytes):
        return payload
    if not isinstance(payload, wire.Ref):
        raise wire.WireError("a call with an input that is not in the worker's own memory")
    segment, offset, nbytes = payload
    free = wire.Free(((segment, offset),))
    return link.outputs.lent(segment, offset, nbytes, lambda: link.send(free))
