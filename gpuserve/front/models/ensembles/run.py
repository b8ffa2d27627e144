"""One request of an ensemble: sends steps to their models, hands tensors on, and makes the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from gpuserve.core.errors import Internal, RequestError, request_error
from gpuserve.front.batching import refusals
from gpuserve.front.links.export_memory import KeptTensor
from gpuserve.front.links.output_memory import Memories, OutputMemory
from gpuserve.front.models.ensembles.members import Members
from gpuserve.front.models.ensembles.plan import EnsemblePlan, PlannedStep, RunProgress, RunState
from gpuserve.front.models.ensembles.tensors import Holders, of_request, of_response
from gpuserve.front.models.pending import PendingRequest
from gpuserve.front.observability.tracing.request_trace import Reception
from gpuserve.front.requests.inference import (
    InferRequest,
    InferResponse,
    InputTensor,
    OutputTensor,
    RegionSlice,
)
from gpuserve_worker.memory.arena import Block

#: What became of a request.
Outcome: TypeAlias = InferResponse | RequestError


class EnsembleRun:
    """One request of an ensemble under way, which frees its blocks in ``memory``. ``on_end`` is told what
    became of it, once, unless it was ended from outside.
    """

    def __init__(
        self,
        pending: PendingRequest,
        plan: EnsemblePlan,
        members: Members,
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
        #: By step: what it reads, as far as it is there; and its request, while it runs.
        self._inputs: dict[int, list[InputTensor]] = {step.number: [] for step in plan.steps}
        self._running: dict[int, PendingRequest] = {}
        #: What the answer is made of.
        self._outputs: dict[str, OutputTensor] = {}
        self._kept: list[tuple[InferResponse, Holders]] = []
        #: Bytes that steps kept on their devices for others.
        self.device_nbytes = 0

    def begin(self) -> None:
        for tensor in self._pending.request.inputs:
            data = of_request(tensor.data, self._memory, self._plan.readers[tensor.name])
            self._hand_over(tensor.name, tensor.datatype, tensor.shape, data)
        self._go_on()

    def end(self) -> None:
        self._progress.end()
        running, self._running = self._running, {}
        for pending in running.values():
            pending.take_back()
        for tensors in self._inputs.values():
            for one in tensors:
                if isinstance(one.data, Block):
                    one.data.free()
        self._inputs.clear()
        for _, holders in self._kept:
            holders.let_go()

    # ---- steps out ------------------------------------------------------------------------

    def _go_on(self) -> None:
        for step in self._progress.next_steps():
            if self._progress.state is RunState.RUNNING:  # or one before it could not be sent
                self._send(step)

    def _send(self, step: PlannedStep) -> None:
        try:
            request = self._step_request(step)
            pending = self._members.submit(request)
        except RequestError as error:
            self._fail(error)
            return
        self._running[step.number] = pending
        pending.answer.add_done_callback(partial(self._answered, step))

    def _step_request(self, step: PlannedStep) -> InferRequest:
        """The request of a step, to which its inputs belong; DeadlineExceeded where the time is over."""
        whole = self._pending.request
        timeout_s = self._time_left_s()
        inputs = self._inputs.pop(step.number)
        placements = {
            theirs: whole.placements[ours] for theirs, ours in step.writes if ours in whole.placements
        }
        in_regions = [one.data for one in inputs if isinstance(one.data, RegionSlice)]
        request = InferRequest(
            step.model,
            step.version,
            whole.id,
            whole.parameters,
            inputs,
            self._members.asked(step),
            timeout_s,
            whole.priority,
            placements=placements,
            sequence=whole.sequence,
            regions=(*in_regions, *placements.values()),
        )
        request.depth = whole.depth + 1
        request.reception, request.sender = self._reception, whole.sender
        request.kept = self._members.kept(step, self._plan)
        return request

    def _time_left_s(self) -> float | None:
        limit_s = self._pending.request.timeout_s
        if limit_s is None:
            return None
        left_s = self._pending.enqueued_at + limit_s - time.monotonic()
        if left_s <= 0:
            raise refusals.too_late(self._pending.spec.name, limit_s, was_queued=False)
        return left_s

    # ---- answers in -----------------------------------------------------------------------

    def _answered(self, step: PlannedStep, answer: asyncio.Future[Any]) -> None:
        if self._running.pop(step.number, None) is None:  # it was taken back
            if not answer.cancelled() and answer.exception() is None:
                answer.result().close()
            return
        error = answer.exception()
        if isinstance(error, RequestError):
            self._fail(error)
        elif error is not None:
            raise error
        elif (absent := self._absent(step, answer.result())) is not None:
            answer.result().close()
            self._fail(absent)
        else:
            self._take(step, answer.result())

    def _absent(self, step: PlannedStep, response: InferResponse) -> RequestError | None:
        """Say that a step left an output out that the client asked for by name. Nobody misses any other but
        the steps that read it, and those may do without.
        """
        there = {one.name for one in response.outputs}
        asked = self._pending.request.outputs
        for theirs, ours in step.writes:
            if theirs not in there and ours in asked:
                return Internal(f"model {step.model!r} gave no output {theirs!r}, which is {ours!r} here")
        return None

    def _take(self, step: PlannedStep, response: InferResponse) -> None:
        holders = Holders(response.close)
        outputs = {one.name: one for one in response.outputs}
        is_kept = False
        for theirs, ours in step.writes:
            output = outputs.get(theirs)
            if output is None:
                continue
            if isinstance(output, KeptTensor):
                self.device_nbytes += output.nbytes
            data = of_response(
                output,
                response,
                holders,
                self._plan.readers[ours],
                shared=self._plan.is_shared(ours),
                placement=self._pending.request.placements.get(ours),
            )
            self._hand_over(ours, output.datatype, output.shape, data)
            if ours in self._plan.outputs:
                is_kept = True
                self._outputs[ours] = OutputTensor(
                    ours, output.datatype, output.shape, output.data, output.placed
                )
        if is_kept:
            self._kept.append((response, holders))
        else:
            holders.let_go()
        self._progress.done(step)
        self._go_on()
        if self._progress.state is RunState.COMPLETE:
            self._on_end(self._pending, self._response())

    def _hand_over(self, tensor: str, datatype: str, shape: tuple[int, ...], data: list[Any]) -> None:
        left = iter(data)
        for step in self._plan.steps:
            for theirs, ours in step.reads:
                if ours == tensor:
                    self._inputs[step.number].append(InputTensor(theirs, datatype, shape, next(left)))

    def _response(self) -> InferResponse:
        spec = self._pending.spec
        kept = self._kept

        def close() -> None:
            for _, holders in kept:
                holders.let_go()

        parameters: dict[str, Any] = {}
        for response, _ in kept:
            parameters |= response.parameters
        memories = [response.memory for response, _ in kept if response.memory is not None]
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
