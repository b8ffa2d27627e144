"""Requests of inference callables to models of their server: inference, loading, unloading and readiness.

A worker sends a call on its link, as a client sends a request, and receives the answers on the link. Large
tensors stay in the arenas of the workers: the front lends the memory of one worker to the other. A worker's
messages are checked like a client's. Models are loaded and unloaded under the same rules as for clients.
"""

from __future__ import annotations

import itertools
import logging
from functools import partial
from typing import Any, Final

from gpuserve.core.errors import RequestError, Unavailable
from gpuserve.front.ipc.gather import free_body
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.process.listeners import Spawn
from gpuserve.front.requests.inference import Data, InferRequest, InferResponse, InputTensor, OutputTensor
from gpuserve.front.requests.parameters import sequence_of
from gpuserve.front.service.inference_service import InferenceService
from gpuserve_worker.inference.model_calls import LOAD, READY, UNLOAD
from gpuserve_worker.protocol import wire

logger = logging.getLogger(__name__)

#: A worker may return leases of an earlier front late, so lease numbers of an earlier front are not reused.
_LEASES_OF_A_FRONT: Final = 1 << 32


class _CallingWorker:
    """A calling worker: its calls in flight and lent responses. ``stuck`` calls wait for its own model."""

    def __init__(self, link: WorkerLink, driver: ModelDriver) -> None:
        self.link = link
        self.driver = driver
        self.stuck: set[int] = set()
        self.pending: dict[int, PendingRequest] = {}
        self.lent: dict[int, InferResponse] = {}
        self._leases = itertools.count(link.epoch * _LEASES_OF_A_FRONT + 1)

    def lend(self, response: InferResponse) -> int:
        """Keep a response until the worker returns it, and return the lease number."""
        lease = next(self._leases)
        self.lent[lease] = response
        return lease

    def close(self) -> None:
        """Cancel the calls of a worker that is gone, and free the memory that it was lent."""
        for pending in list(self.pending.values()):
            pending.cancel()
        self.pending.clear()
        while self.lent:
            self.lent.popitem()[1].close()


class CallableRequests:
    """The inference calls of all workers of one front."""

    def __init__(self, service: InferenceService, spawn: Spawn) -> None:
        self._service = service
        self._commands = CallableCommands(service, spawn)
        self._callers: dict[WorkerLink, _CallingWorker] = {}

    def add(self, link: WorkerLink, driver: ModelDriver) -> None:
        """Answer the calls of a model's worker until its link is closed."""
        self._callers[link] = _CallingWorker(link, driver)
        link.on_close.append(lambda closed: self._callers.pop(closed).close())

    def handle(
        self, link: WorkerLink, message: wire.Call | wire.CancelCall | wire.Return | wire.Command
    ) -> None:
        """Handle a worker's message. Raise WireError, ValueError or TypeError if it is invalid."""
        caller = self._callers[link]
        match message:
            case wire.Call():
                self._start_call(caller, message)
            case wire.CancelCall(call_id):
                pending = caller.pending.pop(call_id, None)
                caller.stuck.discard(call_id)
                if pending is not None:
                    pending.cancel()
                    # The calling thread may still be waiting for a message.
                    end_call(caller.link, call_id)
            case wire.Command():
                self._commands.handle(link, caller.driver.spec.name, message)
            case wire.Return(leases):
                for lease in leases:
                    if (response := caller.lent.pop(lease, None)) is not None:
                        response.close()

    def _start_call(self, caller: _CallingWorker, call: wire.Call) -> None:
        try:
            request = _build_request(caller.link, call)
        except RequestError as error:
            end_call(caller.link, call.call_id, error)
            return
        # A batch that a worker received before a drain is finished and may call models; a thread that merely
        # goes on may not.
        request.depth = int(caller.link.in_flight > 0)
        # Responses of a stream are held to the end of their leases, so that streams have credit.
        pass_on = partial(_send_answer, caller, call.call_id, final=False, held=True) if call.stream else None
        try:
            if call.waits and self._calls_own_model(caller, call):
                self._check_not_stuck(caller, call, request)
            on_answer = partial(self._on_answer, caller, call.call_id)
            pending = self._service.inference.submit(request, pass_on, on_answer)
        except RequestError as error:
            caller.stuck.discard(call.call_id)
            end_call(caller.link, call.call_id, error)
            return
        if not pending.is_over:  # a cached answer has been sent already
            caller.pending[call.call_id] = pending

    def _calls_own_model(self, caller: _CallingWorker, call: wire.Call) -> bool:
        if call.model != caller.driver.spec.name:
            return False
        try:
            return self._service.models.find(call.model, call.version) is caller.driver
        except RequestError:  # the submission raises the same error
            return False

    def _check_not_stuck(self, caller: _CallingWorker, call: wire.Call, request: InferRequest) -> None:
        """Raise Unavailable for a call of a model to itself if no instance is left to answer it."""
        caller.stuck.add(call.call_id)
        instances = self._in_rotation(caller.driver)
        if all(one.stuck for one in instances):
            free_body(request)
            raise _all_stuck_error(call.model, len(instances))

    def can_spare(self, driver: ModelDriver, instance: str) -> bool:
        """Return whether another instance of a model waits for no answer of the model itself."""
        others = [one for one in self._in_rotation(driver) if one.link.instance != instance]
        return any(not one.stuck for one in others)

    def refuse_stuck(self, driver: ModelDriver) -> None:
        """Refuse the calls of a model to itself if all remaining instances wait for such calls."""
        callers = self._in_rotation(driver)
        if not all(one.stuck for one in callers):
            return
        for caller in callers:
            for call_id in list(caller.stuck):
                if (pending := caller.pending.pop(call_id, None)) is not None:
                    pending.cancel()
                caller.stuck.discard(call_id)
                end_call(caller.link, call_id, _all_stuck_error(driver.spec.name, len(callers)))

    def _in_rotation(self, driver: ModelDriver) -> list[_CallingWorker]:
        names = driver.workers.instances.in_rotation()
        return [one for one in self._callers.values() if one.driver is driver and one.link.instance in names]

    def _on_answer(
        self, caller: _CallingWorker, call_id: int, pending: PendingRequest, answer: Answer
    ) -> None:
        caller.stuck.discard(call_id)
        caller.pending.pop(call_id, None)
        if isinstance(answer, InferResponse):
            _send_answer(caller, call_id, answer, final=True, held=False)
        else:
            end_call(caller.link, call_id, answer)


def _all_stuck_error(model: str, count: int) -> Unavailable:
    return Unavailable(
        f"model {model!r} asks itself, but all of its instances ({count}) wait for such an answer: expected "
        "one that is free"
    )


def _send_answer(
    caller: _CallingWorker, call_id: int, response: InferResponse, *, final: bool, held: bool
) -> None:
    tensors = []
    is_lent = False
    for one in response.outputs:
        payload = one.data if type(one.data) is bytes else _payload(caller.link, response, one)
        is_lent = is_lent or isinstance(payload, wire.Loan)
        tensors.append(wire.WireTensor(one.name, one.datatype, one.shape, payload))
    lease = caller.lend(response) if is_lent or held else 0
    caller.link.send(wire.Answer(call_id, lease, tuple(tensors), dict(response.parameters), None, final))
    if not lease:
        response.close()


def _payload(borrower: WorkerLink, response: InferResponse, output: OutputTensor) -> wire.Payload:
    data, memory = output.data, response.memory
    if memory is not None and isinstance(data, memoryview) and len(data) > wire.INLINE_NBYTES:
        place = memory.locate(data)
        if place is not None:
            loan: wire.Loan = place.memory.lend(place.segment, place.offset, len(data), borrower)
            return loan
    return bytes(data)


def _build_request(link: WorkerLink, call: wire.Call) -> InferRequest:
    sequence = None
    if call.sequence:
        correlation_id, start, end = call.sequence
        sequence = sequence_of(correlation_id, start=start, end=end)
    inputs = [
        InputTensor(name, datatype, tuple(shape), _input_data(link, payload))
        for name, datatype, shape, payload in wire.tensors(call.inputs)
    ]
    parameters: dict[str, Any] = dict(call.parameters)
    outputs = tuple(call.requested_outputs)
    timeout_s = call.timeout_s or None
    return InferRequest(
        call.model, call.version, call.request_id, parameters, inputs, outputs, timeout_s, sequence=sequence
    )


def _input_data(link: WorkerLink, payload: wire.Payload) -> Data:
    if isinstance(payload, bytes):
        return payload
    if not isinstance(payload, wire.Ref):
        raise wire.WireError("a call with an input that is not in the worker's own memory")
    segment, offset, nbytes = payload
    free = wire.Free(((segment, offset),))
    return link.outputs.lend_block(segment, offset, nbytes, lambda: link.send(free))


# ---- loading, unloading, readiness ---------------------------------------------------------------


class CallableCommands:
    """The model commands of all workers of one front."""

    def __init__(self, service: InferenceService, spawn: Spawn) -> None:
        self._service = service
        self._spawn = spawn

    def handle(self, link: WorkerLink, own_model: str, command: wire.Command) -> None:
        """Run and answer a command of a worker of ``own_model``. Raise ``WireError`` if it is unknown."""
        call_id, verb, model, parameters = command
        if not isinstance(model, str) or not isinstance(parameters, dict):
            raise wire.WireError(f"a command about {model!r} with {parameters!r}")
        if verb == READY:
            try:
                ready = self._service.health.model_ready(model, str(parameters.get("version", "")))
            except RequestError as error:
                end_call(link, call_id, error)
            else:
                link.send(wire.Answer(call_id, 0, None, {READY: ready}, None, True))
        elif verb == LOAD:
            self._spawn(self._load(link, call_id, model, parameters))
        elif verb == UNLOAD:
            # A worker that waits for its own end would never reach it.
            waits = own_model not in self._service.control.repository.unloaded_with(model, parameters)
            if not waits:
                end_call(link, call_id)
            self._spawn(self._unload(link, call_id if waits else None, model, parameters))
        else:
            raise wire.WireError(f"no worker may command {verb!r}")

    async def _load(self, link: WorkerLink, call_id: int, model: str, parameters: dict[str, Any]) -> None:
        failure: RequestError | None = None
        try:
            await self._service.control.repository.load(model, parameters)
        except RequestError as error:
            failure = error
        end_call(link, call_id, failure)

    async def _unload(
        self, link: WorkerLink, call_id: int | None, model: str, parameters: dict[str, Any]
    ) -> None:
        failure: RequestError | None = None
        try:
            await self._service.control.repository.unload(model, parameters)
        except RequestError as error:
            failure = error
        if call_id is not None:
            end_call(link, call_id, failure)
        elif failure is not None:
            logger.warning("model %s: failed to unload itself: %s", model, failure)


def end_call(link: WorkerLink, call_id: int, error: RequestError | None = None) -> None:
    """Send the last answer of a call: nothing, or a failure."""
    failure = None if error is None else wire.WireFailure(error.code.value, str(error))
    link.send(wire.Answer(call_id, 0, None, {}, failure, True))
