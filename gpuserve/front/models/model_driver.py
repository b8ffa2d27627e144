"""Drivers: the interface of a model in the front, and the driver of a model with workers."""

from __future__ import annotations

import gc
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gpuserve.core.errors import RequestError, ResourceExhausted
from gpuserve.front.ipc.batch_messages import BatchMessages
from gpuserve.front.ipc.gather import adopt_blocks
from gpuserve.front.ipc.shared_memory import RegionTable
from gpuserve.front.ipc.worker_link import WorkerLink, reject_message
from gpuserve.front.models.batch_runner import AnswerTurns, BatchRunner, ModelScheduling
from gpuserve.front.models.instances import ModelInstances
from gpuserve.front.models.model_answers import ModelAnswers
from gpuserve.front.models.model_workers import ModelWorkers, OverdueCalls
from gpuserve.front.models.pending_request import (
    OnAnswer,
    OnResponse,
    PendingRequest,
    RequestObserver,
    RequestOwner,
)
from gpuserve.front.models.response_cache import ResponseCache
from gpuserve.front.observability.access_log import id_for_worker
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.inference import InferRequest
from gpuserve.front.requests.statistics import FailureReason as Reason
from gpuserve.front.requests.validation import check_claim, model_check_for
from gpuserve.front.scheduling import refusals
from gpuserve.front.scheduling.device_scheduler import LinkBetween, link_by_name, make_scheduler
from gpuserve.front.scheduling.rate_limiter import RateLimitedSource, SharedResources
from gpuserve.front.scheduling.scheduler import SchedulerStatistics
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Arena, Block, OutOfMemory
from gpuserve_worker.protocol import wire

logger = logging.getLogger(__name__)

#: A model whose memory for inputs is full for this time is not ready, if no request is queued or running.
STARVED_S: Final = 10.0
#: Before that, objects in reference cycles are collected, because they may own the memory.
_COLLECTED_S: Final = STARVED_S / 2
STARVED: Final = (
    f"its memory for inputs (max_arena_nbytes) has been full for over {STARVED_S:g} s, while no request for "
    "it is queued or running"
)


class Driver(RequestOwner):
    """One version of a model. Large inputs lie in its ``arena``; an ensemble has no ``workers``."""

    metrics: ModelMetrics
    arena: Arena
    workers: ModelWorkers | None = None
    #: Whether the model is not ready because its memory for inputs stays full, as of the last ``shrink``.
    is_starved = False
    _full_since: float | None = None
    _answers: ModelAnswers

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Return whether the model accepts requests and can answer them."""

    @property
    def was_ready(self) -> bool:
        """Return whether the model was ever ready. For an ensemble, ``ready`` covers loading models."""
        return self.workers is None or self.workers.were_up

    @property
    def tracer(self) -> RequestObserver | None:
        """Return the observer of requests, None while none is traced or noted for the access log."""
        return self._answers.tracer

    @tracer.setter
    def tracer(self, tracer: RequestObserver | None) -> None:
        self._answers.tracer = tracer

    @abstractmethod
    def statistics(self) -> SchedulerStatistics:
        """Return the current statistics of its requests and batches."""

    @property
    def unfinished(self) -> int:
        counts = self.statistics()
        return counts.queued + counts.running_requests

    def claim(self, nbytes: int) -> Block | None:
        """Return memory for one large input, to be filled after ``reserve``; None if the input belongs on the
        heap. Raises InvalidArgument if no input is so large, ResourceExhausted or NoMemory if there is no
        memory.
        """
        check_claim(self.spec, nbytes)
        most = self.arena.limit_nbytes
        if nbytes > most:
            raise ResourceExhausted(
                f"an input of {nbytes} bytes for model {self.spec.name!r} is larger than its memory for "
                f"inputs, expected at most {most} bytes (max_arena_nbytes)"
            )
        try:
            return self.arena.claim(nbytes)
        except OutOfMemory as error:
            raise refusals.no_memory(self.spec.name) from error

    def free(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.free()

    @abstractmethod
    def submit(
        self, request: InferRequest, on_response: OnResponse | None = None, on_answer: OnAnswer | None = None
    ) -> PendingRequest:
        """Submit a request, and take over its blocks. ``on_answer`` gets the outcome, else the future
        ``answer`` does; ``on_response`` gets a stream's responses. Raises ``RequestError`` if the request is
        refused.
        """

    def shrink(self) -> None:
        """Release arena memory that a burst allocated and that has been unused since. Called periodically."""
        self._check_starvation(time.monotonic())
        self.arena.shrink()
        for link in () if self.workers is None else self.workers.instances.open_links():
            link.shrink()

    def _check_starvation(self, now: float) -> None:
        if not self.arena.is_full:
            if self.is_starved:
                logger.warning(
                    "model %s has recovered: its memory for inputs (max_arena_nbytes) is no longer full",
                    self.spec.name,
                )
            self.is_starved, self._full_since = False, None
            return
        if self._full_since is None:
            self._full_since = now
        full_s = now - self._full_since
        if not self.is_starved and full_s > _COLLECTED_S and not self.unfinished:
            gc.collect()
            self.is_starved = full_s > STARVED_S
            if self.is_starved:
                logger.error("model %s is not ready: %s", self.spec.name, STARVED)

    def resize(self, spec: ModelSpec) -> None:
        self.spec = spec

    @abstractmethod
    def stop_accepting(self) -> None:
        """Refuse new requests. Accepted requests still run."""

    def retire(self) -> None:
        """Stop caching answers, because another driver replaces this one."""
        self._answers.stop_caching()

    @abstractmethod
    def close(self) -> None:
        """Release everything, and fail all remaining requests."""


#: The bytes transferred to another driver per turn of the event loop: milliseconds of copying.
_TRANSFER_NBYTES: Final = 16 << 20


class ModelDriver(Driver):
    """A model with workers: its queue, workers and input arena."""

    workers: ModelWorkers

    def __init__(
        self,
        spec: ModelSpec,
        max_arena_nbytes: int,
        metrics: ModelMetrics,
        cache: ResponseCache | None = None,
        regions: RegionTable | None = None,
        limiter: SharedResources | None = None,
        on_other: Callable[[WorkerLink, wire.Message], None] = reject_message,
        front_lost_at: float = -math.inf,
        link_between: LinkBetween = link_by_name,
        turns: AnswerTurns | None = None,
    ) -> None:
        self.spec = spec
        self.metrics = metrics
        self._check = model_check_for(spec)
        instances = ModelInstances({one.name: one.first_device for one in spec.instances})
        self._device_check = DeviceCheck(spec, instances)
        self.arena = Arena(max_arena_nbytes, instances.announce_segment, instances.announce_drop)
        self._messages = messages = BatchMessages(spec, self.arena)
        self._answers = answers = ModelAnswers(spec, metrics, cache, regions)
        self._scheduler = scheduler = make_scheduler(spec, front_lost_at, link_between)
        limits = None
        if limiter is not None:
            limits = RateLimitedSource(scheduler, spec.instances, limiter, self._pump_soon)
        scheduling = ModelScheduling(scheduler, limits or scheduler, limits)
        parts = spec, scheduling, messages, instances, answers, metrics, on_other
        self._runner = runner = BatchRunner(*parts, turns or AnswerTurns())
        inputs = messages.device_inputs
        self.workers = ModelWorkers(spec, scheduling, instances, inputs, self.arena, answers, runner, metrics)
        self.overdue = OverdueCalls(spec, scheduling, runner, self.workers, answers, metrics)

    @property
    def ready(self) -> bool:
        instances = self.workers.instances
        return (bool(instances) or instances.asleep) and not self.is_starved

    def statistics(self) -> SchedulerStatistics:
        return self._scheduler.statistics()

    def name_requests(self) -> None:
        """Send workers the request ids of the access log."""
        self._messages.request_id = id_for_worker

    # ---- requests -------------------------------------------------------------------------

    def submit(
        self, request: InferRequest, on_response: OnResponse | None = None, on_answer: OnAnswer | None = None
    ) -> PendingRequest:
        blocks: Sequence[Block] = ()
        for one in request.inputs:
            if isinstance(one.data, Block):
                blocks = adopt_blocks(request, self.arena)
                break
        answers, runner, pending = self._answers, self._runner, None
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
                answers.tracer.on_submitted(pending)
            if answers.has_cache and answers.answer_from_cache(pending):
                answers.release_inputs(pending)
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
            if answers.tracer is not None:
                answers.tracer.on_refused(request, error, pending)
            raise
        if not runner.pump_due:
            runner.pump_soon()
        return pending

    def _pump_soon(self) -> None:
        self._runner.pump_soon()

    def cancel(self, pending: PendingRequest) -> None:
        if not pending.abandon() or not self._answers.cancel(pending):
            return
        if self._scheduler.cancel(pending):
            self._answers.release_inputs(pending)
        else:
            self._runner.in_flight.cancel_at_worker(pending)
        self._runner.pump_soon()  # other requests of its sequence may have been cancelled with it

    # ---- ending ---------------------------------------------------------------------------

    def transfer_queue(self, successor: ModelDriver) -> bool:
        """Transfer requests that were not begun to the driver that replaces this one, for one turn of the
        event loop. Returns whether more are left.
        """
        fits = successor.spec.takes_requests_of(self.spec) and not self._scheduler.draining
        taken = self._scheduler.transfer(successor._scheduler, _TRANSFER_NBYTES if fits else 0)
        for pending in taken:
            assert isinstance(pending, PendingRequest)
            self._answers.drop(pending)
            successor.accept_transferred(pending)
        return bool(taken)

    def accept_transferred(self, pending: PendingRequest) -> None:
        """Queue a request of another driver, with its original age."""
        request = pending.request
        pending.reassign(self, adopt_blocks(request, self.arena))
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
    """Checks whether a model has an instance on the device whose memory a request names."""

    def __init__(self, spec: ModelSpec, instances: ModelInstances) -> None:
        self._name = spec.name
        self._devices = sorted({one.first_device for one in spec.instances})
        self._stays = spec.in_sequences and len(self._devices) > 1
        self._instances = instances

    def check(self, request: InferRequest) -> None:
        """Raise InvalidArgument or Unavailable if no instance can run a request that names regions."""
        named = sorted({one.device for one in request.regions if one.device})
        if not named:
            return
        device = named[0]
        if len(named) > 1:
            raise refusals.several_devices(named)
        if device not in self._devices:
            raise refusals.other_device(self._name, device, self._devices)
        if self._stays:  # a sequence may have begun at an instance elsewhere
            raise refusals.device_in_sequences(self._name, device, self._devices)
        if self._instances.none_expected(device):
            raise refusals.none_on_device(self._name, device)
