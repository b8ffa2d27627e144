"""One model at work in the front: takes its requests, queues them, and takes them back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from gpuserve.core.errors import RequestError
from gpuserve.front.batching import refusals
from gpuserve.front.batching.interface import SchedulerStatistics
from gpuserve.front.batching.rate_limited import RateLimits
from gpuserve.front.batching.rate_limiter import SharedResources
from gpuserve.front.batching.scheduler_factory import scheduler_of
from gpuserve.front.links.worker_link import WorkerLink, no_such_message
from gpuserve.front.memory.batch_messages import BatchMessages
from gpuserve.front.memory.blocks import bring_home
from gpuserve.front.memory.regions import RegionTable
from gpuserve.front.models.answers import ModelAnswers
from gpuserve.front.models.batch_runner import BatchRunner, Queueing
from gpuserve.front.models.instances import Instances
from gpuserve.front.models.interface import Driver
from gpuserve.front.models.model_workers import ModelWorkers
from gpuserve.front.models.overdue_calls import OverdueCalls
from gpuserve.front.models.pending import OnAnswer, OnResponse, PendingRequest
from gpuserve.front.models.response_cache import ResponseCache
from gpuserve.front.observability.access_log import id_for_worker
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.inference import InferRequest
from gpuserve.front.requests.statistics import FailureReason as Reason
from gpuserve.front.requests.validation import model_check_for
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Arena, Block
from gpuserve_worker.protocol import wire

#: What is handed over to another driver in one turn of the loop: milliseconds of copying.
_HANDED_NBYTES: Final = 16 << 20


class ModelDriver(Driver):
    """A model's queue, workers that are up, and input arena. All parts of the model at work meet here."""

    workers: ModelWorkers

    def __init__(
        self,
        spec: ModelSpec,
        max_arena_nbytes: int,
        metrics: ModelMetrics,
        cache: ResponseCache | None = None,
        regions: RegionTable | None = None,
        limiter: SharedResources | None = None,
        on_other: Callable[[WorkerLink, wire.Message], None] = no_such_message,
        front_lost_at: float = -math.inf,
    ) -> None:
        self.spec = spec
        self.metrics = metrics
        self._check = model_check_for(spec)
        instances = Instances({one.name: one.device for one in spec.instances})
        self._device_check = DeviceCheck(spec, instances)
        self.arena = Arena(max_arena_nbytes, instances.announce_segment, instances.announce_drop)
        self._messages = messages = BatchMessages(spec, self.arena)
        self._answers = answers = ModelAnswers(spec, metrics, cache, regions)
        self._scheduler = scheduler = scheduler_of(spec, front_lost_at)
        limits = None
        if limiter is not None:
            limits = RateLimits(scheduler, spec.instances, limiter, self._pump_soon)
        queueing = Queueing(scheduler, limits or scheduler, limits)
        self._runner = runner = BatchRunner(spec, queueing, messages, instances, answers, metrics, on_other)
        inputs = messages.device_inputs
        self.workers = ModelWorkers(spec, queueing, instances, inputs, self.arena, answers, runner, metrics)
        self.overdue = OverdueCalls(spec, queueing, runner, self.workers, answers, metrics)

    @property
    def ready(self) -> bool:
        return bool(self.workers.instances) and not self.is_starved

    def statistics(self) -> SchedulerStatistics:
        return self._scheduler.statistics()

    def name_requests(self) -> None:
        """Tell workers how requests are known in the access log."""
        self._messages.request_id = id_for_worker

    # ---- requests -------------------------------------------------------------------------

    def submit(
        self,
        request: InferRequest,
        on_response: OnResponse | None = None,
        on_answer: OnAnswer | None = None,
    ) -> PendingRequest:
        blocks: Sequence[Block] = ()
        for one in request.inputs:
            if isinstance(one.data, Block):
                blocks = bring_home(request, self.arena)
                break
        answers, runner = self._answers, self._runner
        try:
            if self.spec.decoupled and on_response is None:
                raise refusals.no_stream(self.spec.name)
            checked = self._check.check(request)
            if request.regions:
                self._device_check.check(request)
            if self.workers.refusal is not None:
                raise self.workers.refusal()
            retriable = not blocks or self._messages.is_repeatable(request)
            pending = PendingRequest(self, request, checked, blocks, retriable, on_response, on_answer)
            if answers.tracer is not None:
                answers.tracer.begin(pending)
            if answers.recalls and answers.recall(pending):
                answers.settle(pending)
                return pending
            now = time.monotonic()
            if pending.timeout_s is not None:
                pending.deadline = now + pending.timeout_s
            self._scheduler.submit(pending, now)
            if answers.in_order:
                answers.expect(pending)
        except RequestError as error:
            self.free(blocks)
            self.metrics.refused(error)
            raise
        if not runner.pump_due:
            runner.pump_soon()
        return pending

    def _pump_soon(self) -> None:
        self._runner.pump_soon()

    def take_back(self, pending: PendingRequest) -> None:
        if not pending.give_up() or not self._answers.take_back(pending):
            return
        if self._scheduler.cancel(pending):
            self._answers.settle(pending)
        else:
            self._runner.call_off(pending)
        self._runner.pump_soon()  # others of its sequence may have gone with it

    # ---- ending ---------------------------------------------------------------------------

    def hand_over(self, successor: ModelDriver) -> bool:
        """Give what was not begun to the driver that replaces this one, for one turn;
        whether more is left.
        """
        fits = successor.spec.takes_requests_of(self.spec) and not self._scheduler.draining
        taken = self._scheduler.hand_over(successor._scheduler, _HANDED_NBYTES if fits else 0)
        for pending in taken:
            assert isinstance(pending, PendingRequest)
            self._answers.drop(pending)
            successor._take_over(pending)
        return bool(taken)

    def _take_over(self, pending: PendingRequest) -> None:
        """Queue a request that waits for another driver; it is as old as it was."""
        request = pending.request
        pending.move(self, bring_home(request, self.arena))
        pending.retriable = not pending.blocks or self._messages.is_repeatable(request)
        try:
            if request.regions:
                self._device_check.check(request)
            if self.workers.refusal is not None:
                raise self.workers.refusal()
            self._scheduler.submit(pending, pending.enqueued_at)
        except RequestError as error:
            self._answers.finish(pending, error, Reason.REJECTED)
            return
        self._answers.expect(pending)
        self._pump_soon()

    def resize(self, spec: ModelSpec) -> None:
        super().resize(spec)
        self.workers.resize(spec)

    def stop_accepting(self) -> None:
        self._scheduler.draining = True

    def close(self) -> None:
        self.workers.close()
        self.overdue.close()
        self._runner.close()
        self.arena.close()


class DeviceCheck:
    """Whether a model can run a request that names a device's memory: an instance must be on that one."""

    def __init__(self, spec: ModelSpec, instances: Instances) -> None:
        self._name = spec.name
        self._devices = sorted({one.device for one in spec.instances})
        self._stays = spec.in_sequences and len(self._devices) > 1
        self._instances = instances

    def check(self, request: InferRequest) -> None:
        """Raise InvalidArgument or Unavailable where no instance can run a request that names regions."""
        named = sorted({one.device for one in request.regions if one.device})
        if not named:
            return
        device = named[0]
        if len(named) > 1:
            raise refusals.several_devices(named)
        if device not in self._devices:
            raise refusals.other_device(self._name, device, self._devices)
        if self._stays:  # a sequence stays at the instance that it began at, whichever that is
            raise refusals.device_in_sequences(self._name, device, self._devices)
        if self._instances.none_is_due(device):
            raise refusals.none_on_device(self._name, device)
