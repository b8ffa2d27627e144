"""An ensemble request: its steps are requests to models of this front, and tensors are not copied."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from gpuserve.core.errors import Internal, NotFound, RequestError, Unavailable, Unimplemented, request_error
from gpuserve.front.ipc.gather import free_body
from gpuserve.front.ipc.shared_memory import RegionTable
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.ipc.worker_memory import (
    KeptTensor,
    LentBlock,
    LentExport,
    Memories,
    OutputMemory,
    all_can_read,
)
from gpuserve.front.models.ensemble_plan import EnsemblePlan, PlannedStep, RunProgress, RunState
from gpuserve.front.models.model_driver import Driver
from gpuserve.front.models.model_workers import ModelWorkers
from gpuserve.front.models.pending_request import OnAnswer, OnResponse, PendingRequest
from gpuserve.front.observability.tracing.request_trace import Reception
from gpuserve.front.requests.inference import (
    Data,
    InferRequest,
    InferResponse,
    InputTensor,
    OutputTensor,
    RegionSlice,
)
from gpuserve.front.scheduling import refusals
from gpuserve.model.spec import StepSpec
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol.tensor import BYTES, ITEMSIZE, element_count
from gpuserve_worker.protocol.wire import INLINE_NBYTES

#: The outcome of a request; None is the end of a stream.
Outcome: TypeAlias = InferResponse | RequestError | None


class EnsembleRun:
    """A running ensemble request, with blocks in ``memory``. ``on_end`` gets its outcome, unless ended."""

    def __init__(
        self,
        pending: PendingRequest,
        plan: EnsemblePlan,
        members: EnsembleMembers,
        memory: OutputMemory,
        on_end: Callable[[PendingRequest, Outcome], None],
        reception: Reception | None,
    ) -> None:
        self._pending = pending
        self._plan = plan
        self._members = members
        self._memory = memory
        self._on_end = on_end
        self._reception = reception
        self._progress = RunProgress(plan)
        #: By step: its available inputs, and its request while it runs.
        self._inputs: dict[int, list[InputTensor]] = {step.number: [] for step in plan.steps}
        self._running: dict[int, PendingRequest] = {}
        #: The outputs of the answer.
        self._outputs: dict[str, OutputTensor] = {}
        self._kept: list[tuple[InferResponse, ReferenceCount]] = []
        #: The bytes that steps kept on their devices for other steps.
        self.device_nbytes = 0

    def start(self) -> None:
        for tensor in self._pending.request.inputs:
            data = lend_input(tensor.data, self._memory, self._plan.readers[tensor.name])
            self._distribute(tensor.name, tensor.datatype, tensor.shape, data)
        self._send_ready_steps()

    def end(self) -> None:
        self._progress.end()
        running, self._running = self._running, {}
        for pending in running.values():
            pending.cancel()
        for tensors in self._inputs.values():
            for one in tensors:
                if isinstance(one.data, Block):
                    one.data.free()
        self._inputs.clear()
        for _, references in self._kept:
            references.release()

    # ---- steps out ------------------------------------------------------------------------

    def _send_ready_steps(self) -> None:
        for step in self._progress.next_steps():
            if self._progress.state is RunState.RUNNING:  # otherwise a step before it could not be sent
                self._send(step)

    def _send(self, step: PlannedStep) -> None:
        try:
            driver = self._members.find(step)
            request = self._step_request(step, driver)
            on_response = partial(self._respond, step) if self._is_streamed(step) else None
            pending = self._members.submit(driver, request, on_response, partial(self._answered, step))
        except RequestError as error:
            self._fail(error)
            return
        if not pending.is_over:  # a cached answer has been received already
            self._running[step.number] = pending

    def _step_request(self, step: PlannedStep, driver: Driver) -> InferRequest:
        """Return the request of a step, which owns its inputs. Raises DeadlineExceeded if no time is left."""
        whole = self._pending.request
        timeout_s = self._time_left_s()
        inputs = self._inputs.pop(step.number)
        placements = {}
        if whole.placements:
            placements = {
                theirs: whole.placements[ours] for theirs, ours in step.writes if ours in whole.placements
            }
        in_regions, on_device = [], []
        for one in inputs:
            if isinstance(one.data, RegionSlice):
                in_regions.append(one.data)
            elif isinstance(one.data, LentExport):
                on_device.append(one.data)
        request = InferRequest(
            step.model,
            step.version,
            whole.id,
            whole.parameters,
            inputs,
            requested_outputs(driver, step),
            timeout_s,
            whole.priority,
            placements=placements,
            sequence=whole.sequence,
            regions=(*in_regions, *placements.values()),
        )
        request.depth = whole.depth + 1
        request.reception, request.sender = self._reception, whole.sender
        request.kept = self._members.kept_outputs(driver, step, self._plan)
        if on_device:
            request.near = max(on_device, key=lambda one: one.nbytes).device
        return request

    def _time_left_s(self) -> float | None:
        limit_s = self._pending.request.timeout_s
        if limit_s is None:
            return None
        left_s = self._pending.enqueued_at + limit_s - time.monotonic()
        if left_s <= 0:
            raise refusals.too_late(self._pending.spec.name, limit_s, was_queued=False)
        return left_s

    def _is_streamed(self, step: PlannedStep) -> bool:
        """Return whether each response of a step is one of the request: the step makes all outputs, and no
        step reads them.
        """
        if self._pending.on_response is None:
            return False
        made = {ours for _, ours in step.writes}
        return made >= {*self._plan.outputs} and not any(self._plan.readers[ours] for ours in made)

    # ---- answers in -----------------------------------------------------------------------

    def _respond(self, step: PlannedStep, response: InferResponse) -> None:
        """Pass on a response of a decoupled last step that is not its last response."""
        if (absent := self._missing_output(step, response)) is not None:
            response.close()
            self._fail(absent)
            return
        outputs = {one.name: one for one in response.outputs}
        self._outputs = {
            ours: OutputTensor(ours, one.datatype, one.shape, one.data, one.placed)
            for theirs, ours in step.writes
            if (one := outputs.get(theirs)) is not None
        }
        assert self._pending.on_response is not None, "the step is streamed"
        self._pending.on_response(self._response([response], response.close))

    def _answered(self, step: PlannedStep, _: PendingRequest, answer: Outcome) -> None:
        self._running.pop(step.number, None)
        if isinstance(answer, RequestError):
            self._fail(answer)
        elif answer is None:
            self._progress.done(step)
            self._on_end(self._pending, None)
        elif (absent := self._missing_output(step, answer)) is not None:
            answer.close()
            self._fail(absent)
        else:
            self._accept_response(step, answer)

    def _missing_output(self, step: PlannedStep, response: InferResponse) -> RequestError | None:
        """Return the error if a step left out an output that the client named; later steps may lack it."""
        asked = self._pending.request.outputs
        if not asked:
            return None
        there = {one.name for one in response.outputs}
        for theirs, ours in step.writes:
            if theirs not in there and ours in asked:
                return Internal(f"model {step.model!r} gave no output {theirs!r}, which is {ours!r} here")
        return None

    def _accept_response(self, step: PlannedStep, response: InferResponse) -> None:
        references = ReferenceCount(response.close)
        outputs = {one.name: one for one in response.outputs}
        is_kept = False
        for theirs, ours in step.writes:
            output = outputs.get(theirs)
            if output is None:
                continue
            if isinstance(output, KeptTensor):
                self.device_nbytes += output.nbytes
            data = lend_output(
                output,
                response,
                references,
                self._plan.readers[ours],
                shared=self._plan.is_shared(ours),
                placement=self._pending.request.placements.get(ours),
            )
            self._distribute(ours, output.datatype, output.shape, data)
            if ours in self._plan.outputs:
                is_kept = True
                self._outputs[ours] = OutputTensor(
                    ours, output.datatype, output.shape, output.data, output.placed
                )
        if is_kept:
            self._kept.append((response, references))
        else:
            references.release()
        self._progress.done(step)
        self._send_ready_steps()
        if self._progress.state is RunState.COMPLETE:
            kept = self._kept

            def close() -> None:
                for _, references in kept:
                    references.release()

            self._on_end(self._pending, self._response([response for response, _ in kept], close))

    def _distribute(self, tensor: str, datatype: str, shape: tuple[int, ...], data: list[Any]) -> None:
        left = iter(data)
        for step in self._plan.steps:
            for theirs, ours in step.reads:
                if ours == tensor:
                    self._inputs[step.number].append(InputTensor(theirs, datatype, shape, next(left)))

    def _response(self, made: Sequence[InferResponse], close: Callable[[], None]) -> InferResponse:
        """Return the response with the outputs in ``_outputs``, which are those of the responses ``made``."""
        spec = self._pending.spec
        parameters: dict[str, Any] = {}
        for response in made:
            parameters |= response.parameters
        memories = [response.memory for response in made if response.memory is not None]
        return InferResponse(
            spec.name,
            str(spec.version),
            self._pending.request.id,
            parameters,
            [self._outputs[name] for name in self._plan.outputs if name in self._outputs],
            close,
            Memories(memories),
        )

    def _fail(self, error: RequestError) -> None:
        self.end()
        text = f"in ensemble '{self._pending.spec.name}', {error}"
        self._on_end(self._pending, request_error(error.code.value, text))


#: The depth of nested ensembles, which ends recursion through replaced models.
MAX_DEPTH: Final = 16
#: The front or host code checks elements of these datatypes before use.
_ON_HOST: Final = frozenset({BYTES, "BOOL"})


class EnsembleMembers:
    """The models of an ensemble, looked up at each step because they change. ``models`` returns the driver of
    a model's version, "" for the latest. It also decides which tensors between steps stay on a device.
    """

    def __init__(self, models: Callable[[str, str], Driver], regions: RegionTable) -> None:
        self._models = models
        self._regions = regions

    def are_ready(self, steps: Iterable[StepSpec]) -> bool:
        try:
            return all(self._models(one.model, str(one.version or "")).ready for one in steps)
        except (NotFound, Unavailable):
            return False

    def find(self, step: PlannedStep) -> Driver:
        """Return the driver of a step's model. Raises Unavailable if there is none."""
        try:
            return self._models(step.model, step.version)
        except NotFound as error:  # not the client's fault
            raise Unavailable(str(error)) from None

    def submit(
        self, driver: Driver, request: InferRequest, on_response: OnResponse | None, on_answer: OnAnswer
    ) -> PendingRequest:
        """Submit a step, regions pinned until its end. If refused, free its body and raise RequestError."""
        try:
            if request.depth > MAX_DEPTH:
                raise Unimplemented(f"there are more than {MAX_DEPTH} ensembles within one another")
            check_readable(driver, request)
            if driver.spec.decoupled and on_response is None:
                raise Unimplemented(
                    f"model {driver.spec.name!r} is decoupled, and a step needs one response to each request"
                )
        except RequestError:
            free_body(request)
            raise
        if not driver.spec.decoupled:
            on_response = None
        if not request.regions:
            return driver.submit(request, on_response, on_answer)
        self._regions.pin_for_step(request)
        try:
            return driver.submit(request, on_response, on_answer)
        except BaseException:
            self._regions.unpin(request)
            raise

    # ---- on devices -----------------------------------------------------------------------

    def kept_outputs(self, owner: Driver, step: PlannedStep, plan: EnsemblePlan) -> tuple[str, ...]:
        """Return the outputs that a step's worker should keep on its device, by their names in its model."""
        if owner.workers is None or owner.spec.response_cache:
            return ()  # a cache needs the bytes
        if not owner.workers.device_inputs.instances:
            return ()
        on_host = {one.name for one in owner.spec.outputs if one.datatype in _ON_HOST}
        return tuple(
            [
                theirs
                for theirs, ours in step.writes
                if ours not in plan.outputs
                and theirs not in on_host
                and self._is_read(owner.workers, ours, plan)
            ]
        )

    def _is_read(self, owner: ModelWorkers, tensor: str, plan: EnsemblePlan) -> bool:
        """Return whether all readers of a tensor can read it on the owner's devices."""
        readers: list[WorkerLink] = []
        for step in plan.steps:
            for theirs, ours in step.reads:
                if ours != tensor:
                    continue
                driver = self._driver(step)
                if driver is None or driver.workers is None or not can_read(driver, theirs):
                    return False
                if not driver.workers.instances:
                    return False
                readers += driver.workers.instances.up.values()
        on_device = owner.device_inputs.instances
        owners = [link for link in owner.instances.up.values() if link.instance in on_device]
        return all_can_read(owners, readers)

    def _driver(self, step: PlannedStep) -> Driver | None:
        try:
            return self._models(step.model, step.version)
        except RequestError:  # reported when the step is sent
            return None


def requested_outputs(driver: Driver, step: PlannedStep) -> tuple[str, ...]:
    """Return the outputs that a step requests by name: none if its model may leave some out, because a named
    output is required.
    """
    return tuple([theirs for theirs, _ in step.writes]) if driver.spec.strict else ()


def can_read(driver: Driver, name: str) -> bool:
    """Return whether every instance of a model can get this input from another worker's device."""
    if driver.workers is None or driver.spec.response_cache:
        return False
    return name in driver.workers.device_inputs.everywhere


def check_readable(driver: Driver, request: InferRequest) -> None:
    """Raise Unavailable if a model was replaced by one that cannot get the inputs of a step."""
    for one in request.inputs:
        if isinstance(one.data, LentExport) and not can_read(driver, one.name):
            raise Unavailable(
                f"model {driver.spec.name!r} was exchanged while a request for it was under way: its input "
                f"{one.name!r} is on a GPU, where the model cannot read it any more"
            )


class ReferenceCount:
    """A reference count of one resource, which is closed when the last holder releases it. Starts at one."""

    __slots__ = ("_close", "_count")

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._count = 1

    def share(self, readers: int, lent: Callable[[Callable[[], None]], Data]) -> list[Data]:
        """Return the resource for ``readers`` more references. ``lent`` makes it for one holder, from the
        function that releases it.
        """
        self._count += readers
        return [lent(self.release) for _ in range(readers)]

    def release(self) -> None:
        """Release one reference. The last release closes the resource."""
        self._count -= 1
        if not self._count:
            self._close()


def lend_input(data: Data, memory: OutputMemory, readers: int) -> list[Data]:
    """Return an input of a request for each reader. The last reader frees blocks, in ``memory`` or lent."""
    if not isinstance(data, Block):
        return [data] * readers
    references, shared = ReferenceCount(data.free), readers > 1
    if isinstance(data, LentBlock):
        found = references.share(readers, partial(data.lend_again, shared=shared))
    else:
        place = data.segment, data.offset, data.nbytes
        found = references.share(readers, partial(memory.lend_block, *place, shared=shared))
    references.release()
    return found


def lend_output(
    output: OutputTensor,
    response: InferResponse,
    references: ReferenceCount,
    readers: int,
    *,
    shared: bool,
    placement: RegionSlice | None,
) -> list[Data]:
    """Return an output of a step for each reader. ``placement`` is its place in a client's region, if any."""
    if output.placed:
        assert placement is not None, "an output lies in a region only if the client asked for that"
        return [_written(placement, output)] * readers
    if isinstance(output, KeptTensor):
        return references.share(readers, partial(output.lend_block, shared=shared))
    data = output.data
    place = None
    if isinstance(data, memoryview) and len(data) > INLINE_NBYTES and response.memory is not None:
        place = response.memory.locate(data)  # None if its worker has died since
    if place is None:
        return [bytes(data)] * readers if readers else []
    lend = partial(place.memory.lend_block, place.segment, place.offset, len(data), shared=shared)
    return references.share(readers, lend)


def _written(placement: RegionSlice, output: OutputTensor) -> RegionSlice:
    """Return the written part of the place that a client gave. No element has a length of its own."""
    nbytes = ITEMSIZE[output.datatype] * element_count(output.shape)
    written = RegionSlice(placement.region, placement.offset, nbytes)
    written.number, written.device = placement.number, placement.device
    return written
