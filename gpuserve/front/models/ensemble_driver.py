"""An ensemble as a model of the front: its driver has no workers."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpuserve.core.errors import InvalidArgument, RequestError
from gpuserve.front.ipc.gather import adopt_blocks, free_body
from gpuserve.front.ipc.shared_memory import RegionTable
from gpuserve.front.ipc.worker_memory import OutputMemory
from gpuserve.front.models.ensemble_plan import EnsemblePlan, plans_of
from gpuserve.front.models.ensemble_run import EnsembleMembers, EnsembleRun, Outcome
from gpuserve.front.models.model_answers import ModelAnswers
from gpuserve.front.models.model_driver import Driver
from gpuserve.front.models.pending_request import OnAnswer, OnResponse, PendingRequest
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.observability.tracing.request_trace import inside
from gpuserve.front.requests.inference import InferRequest
from gpuserve.front.requests.limits import shown
from gpuserve.front.requests.statistics import FailureReason
from gpuserve.front.requests.validation import ModelCheck
from gpuserve.front.scheduling import refusals
from gpuserve.front.scheduling.scheduler import SchedulerStatistics
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.protocol.tensor import BYTES


class EnsembleDriver(Driver):
    """The running requests of an ensemble, and the arena of their inputs, which is lent to workers."""

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
        self._runs: dict[PendingRequest, EnsembleRun] = {}
        self._draining = False
        self._memory = OutputMemory()
        self.arena = Arena(max_arena_nbytes, self._memory.attach, self._memory.detach)
        self._check = ModelCheck(spec)
        self._plan = plans_of(spec)
        self._members = EnsembleMembers(models, regions)
        self._answers = ModelAnswers(spec, metrics, regions=regions)
        self._is_asking = False

    @property
    def ready(self) -> bool:
        """Return whether the models of all its steps are ready; False if they lead back to this ensemble."""
        if self._is_asking or self.is_starved:
            return False
        self._is_asking = True
        try:
            return self._members.are_ready(self.spec.steps)
        finally:
            self._is_asking = False

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(running_requests=len(self._runs))

    def submit(
        self, request: InferRequest, on_response: OnResponse | None = None, on_answer: OnAnswer | None = None
    ) -> PendingRequest:
        adopt_blocks(request, self.arena)
        try:
            if self.spec.decoupled and on_response is None:
                raise refusals.no_stream(self.spec.name)
            checked = self._check.check(request)
            plan = self._plan(request.outputs)
            if request.placements:
                self._check_placements(request, plan)
            if self._draining and not request.depth:
                raise refusals.stopping()
        except RequestError as error:
            free_body(request)
            self.metrics.refused(error)
            if self.tracer is not None:
                self.tracer.on_refused(request, error, None)
            raise
        pending = PendingRequest(self, request, checked, (), False, on_response, on_answer)
        pending.enqueued_at = time.monotonic()
        self._answers.expect(pending)
        reception = None
        if self.tracer is not None:
            self.tracer.on_submitted(pending)
            reception = inside(getattr(pending, "trace", None))
        run = EnsembleRun(pending, plan, self._members, self._memory, self._on_end, reception)
        self._runs[pending] = run
        run.start()
        return pending

    def _check_placements(self, request: InferRequest, plan: EnsemblePlan) -> None:
        """Refuse an output in a client's region that a step would have to read without its length."""
        for output in self.spec.outputs:
            if output.name in request.placements and output.datatype == BYTES and plan.readers[output.name]:
                raise InvalidArgument(
                    f"output '{shown(output.name)}' of ensemble '{self.spec.name}' is BYTES and a step reads "
                    "it: it cannot be written to shared memory, expected it in the response"
                )

    def cancel(self, pending: PendingRequest) -> None:
        if not pending.abandon():
            return
        run = self._runs.pop(pending, None)
        if run is not None:
            self._answers.cancel(pending)
            run.end()
            self._answers.release_inputs(pending)

    def _on_end(self, pending: PendingRequest, outcome: Outcome) -> None:
        run = self._runs.pop(pending)
        self.metrics.device_nbytes = (self.metrics.device_nbytes or 0) + run.device_nbytes
        self._answers.release_inputs(pending)
        if not isinstance(outcome, RequestError):
            pending.counted = True
            self.metrics.answered(pending)
        self._answers.deliver(pending, outcome, FailureReason.OTHER)

    # ---- ending ---------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        self._draining = True

    def close(self) -> None:
        while self._runs:
            pending, run = next(iter(self._runs.items()))
            run.end()
            self._on_end(pending, refusals.ended(self.spec.name, stops=self._draining))
        self.arena.close()
