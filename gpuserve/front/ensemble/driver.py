"""An ensemble as a model of the front: it takes requests as a model with workers does, and has none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gpuserve.errors import InvalidArgument, RequestError
from gpuserve.front.driver import Driver
from gpuserve.front.endpoint.limits import shown
from gpuserve.front.endpoint.v2 import InferRequest, InferResponse
from gpuserve.front.endpoint.validation import ModelCheck
from gpuserve.front.ensemble.members import Members
from gpuserve.front.ensemble.plan import Plan, Plans
from gpuserve.front.ensemble.run import EnsembleRun, Outcome
from gpuserve.front.ensemble.running import Running
from gpuserve.front.metrics import ModelMetrics
from gpuserve.front.plane.blocks import bring_home, free_body
from gpuserve.front.plane.device_inputs import DeviceInputs
from gpuserve.front.plane.output_memory import OutputMemory
from gpuserve.front.plane.regions import RegionTable
from gpuserve.front.scheduler import refusals
from gpuserve.front.scheduler.answers import Answers
from gpuserve.front.scheduler.instances import Instances
from gpuserve.front.scheduler.pending import OnAnswer, OnResponse, PendingRequest
from gpuserve.front.statistics import FailureReason
from gpuserve.front.tracing.reception import Reception, inside
from gpuserve.spec import ModelSpec
from gpuserve_worker.memory import Arena, Block, OutOfMemory
from gpuserve_worker.tensor import BYTES

if TYPE_CHECKING:
    from gpuserve.front.tracing.model_tracer import ModelTracer


class EnsembleDriver:
    """The requests of an ensemble under way, and the arena of their inputs, which is lent to the workers of
    whatever models read them. ``models`` finds the driver of a model's version.
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_arena_nbytes: int,
        metrics: ModelMetrics,
        models: Callable[[str, str], Driver],
        regions: RegionTable,
    ) -> None:
        self.spec = spec
        self.metrics = metrics
        metrics.device_nbytes = metrics.device_nbytes or 0
        #: There is nothing to wait for: what its models still load is seen by ``ready``.
        self.was_ready = True
        #: Only while requests of this model may be traced.
        self.tracer: ModelTracer | None = None
        self.scheduler = Running()
        #: It has none of its own.
        self.instances = Instances({})
        self.device_inputs = DeviceInputs(spec)
        self._memory = OutputMemory()
        self.arena = Arena(max_arena_nbytes, self._memory.attach, self._memory.detach)
        self._check = ModelCheck(spec)
        self._plans = Plans(spec)
        self._members = Members(models, regions)
        self._regions = regions
        self._answers = Answers(spec, metrics, None)
        self._is_asking = False

    @property
    def ready(self) -> bool:
        """Whether the models of all its steps are; never where they lead back to it."""
        if self._is_asking:
            return False
        self._is_asking = True
        try:
            return self._members.are_ready(self.spec.steps)
        finally:
            self._is_asking = False

    @property
    def unfinished(self) -> int:
        """Requests that run."""
        return len(self.scheduler.runs)

    def allocate(self, nbytes: int) -> Block | None:
        """Memory for one large input, to be filled while its bytes arrive; None when there is none."""
        try:
            return self.arena.allocate(nbytes)
        except OutOfMemory:
            return None

    def free(self, blocks: Iterable[Block]) -> None:
        """Take that memory back, of a request that was not submitted."""
        for block in blocks:
            block.free()

    def submit(
        self,
        request: InferRequest,
        on_response: OnResponse | None = None,
        on_answer: OnAnswer | None = None,
    ) -> PendingRequest:
        """Run one request; ``on_answer`` takes what became of it, or else its ``answer`` is awaited, and
        ``take_back()`` gives it up.

        Its blocks become the driver's to free. ``on_response`` is not called: there is one response.

        Raises:
            RequestError: the request is wrong or refused.
        """
        bring_home(request, self.arena)
        try:
            checked = self._check.check(request)
            plan = self._plans.plan(request.outputs)
            if request.placements:
                self._check_placements(request, plan)
            if self.scheduler.draining and not request.depth:
                raise refusals.stopping()
        except RequestError as error:
            free_body(request)
            self.metrics.refused(error)
            raise
        pending = PendingRequest(self, request, checked, (), retriable=False, on_answer=on_answer)
        pending.enqueued_at = time.monotonic()
        self._answers.expect(pending)
        run = EnsembleRun(pending, plan, self._members, self._memory, self._on_end, self._trace(pending))
        self.scheduler.runs[pending] = run
        run.begin()
        return pending

    def _trace(self, pending: PendingRequest) -> Reception | None:
        """Begin its trace, if it is to have one; what its steps are traced under."""
        if self.tracer is None:
            return None
        self.tracer.begin(pending)
        return inside(getattr(pending, "trace", None))

    def _check_placements(self, request: InferRequest, plan: Plan) -> None:
        """Refuse what a step would have to find in a client's region without knowing how long it is."""
        for output in self.spec.outputs:
            if output.name in request.placements and output.datatype == BYTES and plan.readers[output.name]:
                raise InvalidArgument(
                    f"output '{shown(output.name)}' of ensemble '{self.spec.name}' is BYTES and a step reads "
                    "it: it cannot be written to shared memory, expected it in the response"
                )

    def take_back(self, pending: PendingRequest) -> None:
        """Its client went away: its steps are taken back, or its result is dropped."""
        if not pending.give_up():
            return
        run = self.scheduler.runs.pop(pending, None)
        if run is not None:
            self._answers.take_back(pending)
            run.end()
            self._settle(pending)

    def _on_end(self, pending: PendingRequest, outcome: Outcome) -> None:
        run = self.scheduler.runs.pop(pending)
        self.metrics.device_nbytes = (self.metrics.device_nbytes or 0) + run.device_nbytes
        self._settle(pending)
        if isinstance(outcome, InferResponse):
            pending.counted = True
            self.metrics.answered(pending.rows, time.monotonic() - pending.enqueued_at)
        self._answers.give(pending, outcome, FailureReason.OTHER)

    def _settle(self, pending: PendingRequest) -> None:
        """A request that is through lets go of its inputs and regions."""
        request = pending.request
        request.inputs.clear()
        if request.regions:
            self._regions.unpin(request)
            request.regions = ()

    # ---- ending ---------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        """Refuse new requests; those accepted are still run."""
        self.scheduler.draining = True

    def retire(self) -> None:
        """Another driver gets the requests from now on."""

    def close(self) -> None:
        """Give the arena up; whoever still waits is told."""
        while self.scheduler.runs:
            pending, run = next(iter(self.scheduler.runs.items()))
            run.end()
            self._on_end(pending, refusals.ended(self.spec.name, stops=self.scheduler.draining))
        self.arena.close()
