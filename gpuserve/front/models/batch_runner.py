"""The batches of one model under way: formed, sent to workers, and their answers handed on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpuserve.config.settings.logs import RateLimitedLog
from gpuserve.core.errors import RequestError, request_error
from gpuserve.front.batching import refusals
from gpuserve.front.batching.interface import BatchSource, Scheduler
from gpuserve.front.batching.rate_limited import RateLimits
from gpuserve.front.batching.slots import Batch
from gpuserve.front.links.worker_link import WorkerLink
from gpuserve.front.memory.batch_messages import BatchMessages
from gpuserve.front.memory.scatter import Answer
from gpuserve.front.models.answers import ModelAnswers, phases_of
from gpuserve.front.models.in_flight import InFlightBatch, InFlightBatches
from gpuserve.front.models.instances import Instances
from gpuserve.front.models.pending import PendingRequest
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.queueing.queue import QueuedRequest
from gpuserve.front.requests.statistics import FailureReason
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import OutOfMemory
from gpuserve_worker.protocol import wire

logger = logging.getLogger(__name__)


class Queueing(NamedTuple):
    """The requests of a model and who forms its batches: the scheduler, or ``limits`` around it."""

    scheduler: Scheduler
    source: BatchSource
    limits: RateLimits | None = None


class BatchRunner:
    """Sends batches of one model to its instances; ``on_other`` takes what a worker says of other things."""

    def __init__(
        self,
        spec: ModelSpec,
        queueing: Queueing,
        messages: BatchMessages,
        instances: Instances,
        answers: ModelAnswers,
        metrics: ModelMetrics,
        on_other: Callable[[WorkerLink, wire.Message], None],
    ) -> None:
        self._spec = spec
        self._queueing = queueing
        self._messages = messages
        self._instances = instances
        self._answers = answers
        self._metrics = metrics
        self._on_other = on_other
        self.in_flight = InFlightBatches()
        self._no_memory = RateLimitedLog(logger)
        self._loop = asyncio.get_running_loop()
        self.pump_due = False
        self._wakeup: asyncio.TimerHandle | None = None
        self._wakeup_at: float | None = None

    # ---- batches out ----------------------------------------------------------------------

    def pump_soon(self) -> None:
        """Form batches at the end of this turn of the loop: requests that arrived together go together."""
        if not self.pump_due:
            self.pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self.pump_due = False
        now = time.monotonic()
        scheduler, source, _ = self._queueing
        for late in scheduler.expire(now):
            self._answers.refuse_removed(late)
        links: set[WorkerLink] = set()
        requests: list[QueuedRequest] = []
        while (batch := source.next_batch(now)) is not None:
            if (link := self._dispatch(batch, now)) is not None:
                links.add(link)
                requests += batch.requests
        for link in links:
            link.flush()
        if requests:
            self._metrics.queued(requests, now)
        wakeup = source.next_wakeup(now)
        if wakeup != self._wakeup_at:
            self._set_wakeup(wakeup, now)

    def _set_wakeup(self, wakeup: float | None, now: float) -> None:
        if self._wakeup is not None:
            self._wakeup.cancel()
        self._wakeup_at = wakeup
        self._wakeup = None if wakeup is None else self._loop.call_later(wakeup - now, self._wake)

    def _wake(self) -> None:
        self._wakeup = self._wakeup_at = None
        self._pump()

    def _dispatch(self, batch: Batch, now: float) -> WorkerLink | None:
        """Have a batch leave at the end of this turn, if there is memory for it."""
        link = self._instances.up[batch.instance]
        try:
            gathered, run = self._messages.pack(batch, link)
        except OutOfMemory as error:
            self._no_memory.say("model %s: %s", self._spec.name, error)
            self._queueing.source.complete(batch.batch_id, None, now)
            self._answers.refuse(batch.requests, refusals.no_memory(self._spec.name))
            return None
        flight = InFlightBatch(batch, batch.requests, link, gathered.blocks, gathered.in_place, now)
        self.in_flight.add(flight)
        for request in batch.requests:
            if request.deadline is not None:
                self._watch(flight)
                break
        if self._answers.tracer is not None:
            self._answers.tracer.dispatched(batch)
        if gathered.with_regions:
            self._answers.introduce_regions(link, gathered.with_regions)
        link.post(run)
        return link

    def _watch(self, flight: InFlightBatch) -> None:
        """Be there when the next request of a batch runs out of time."""
        due = [one.deadline for one in flight.requests if one.deadline is not None and not one.is_over]
        flight.timer = self._loop.call_at(min(due), self._end_late, flight) if due else None

    def _end_late(self, flight: InFlightBatch) -> None:
        now = self._loop.time()
        for pending in flight.requests:
            if pending.deadline is not None and pending.deadline <= now and not pending.is_over:
                self._queueing.scheduler.cancel(pending)
                late = refusals.too_late(self._spec.name, pending.request.timeout_s, was_queued=False)
                self._answers.fail_now(pending, late, FailureReason.OTHER)
                self.in_flight.call_off(pending)
        self._watch(flight)

    def call_off(self, pending: PendingRequest) -> None:
        self.in_flight.call_off(pending)

    # ---- answers in -----------------------------------------------------------------------

    def on_messages(self, link: WorkerLink, messages: Sequence[wire.Message]) -> bool:
        """Take what a worker says at once; its workers get their next batches before anybody is answered.
        True for a stream's first response and the end of batches: let them out first.
        """
        ended: list[tuple[InFlightBatch, wire.Done | RequestError]] = []
        is_urgent, now = False, time.monotonic()
        try:
            for message in messages:
                end: wire.Done | RequestError
                took_s: float | None = None
                if isinstance(message, wire.Done):
                    end, took_s = message, sum(phases_of(message)) * 1e-9
                elif isinstance(message, wire.Failed):
                    end = request_error(*message.failure)
                else:
                    is_urgent |= self._on_notice(link, message)
                    continue
                flight = self.in_flight.land(link, message.batch_id, message.inputs_free)
                self._queueing.source.complete(message.batch_id, took_s, now)
                ended.append((flight, end))
        finally:  # one that was nonsense takes no answers from those before it
            if ended:
                self._pump()
            for flight, end in ended:
                if isinstance(end, wire.Done):
                    self._answer(link, flight, end)
                    is_urgent = True
                else:
                    self._fail(link, flight, end)
        return is_urgent

    def _on_notice(self, link: WorkerLink, message: wire.Message) -> bool:
        match message:
            case wire.Yield():
                return self._on_yield(link, message)
            case wire.Computed(batch_ids):
                for batch_id in batch_ids:
                    self._queueing.scheduler.computed(self.in_flight.at(link, batch_id).batch)
                self._pump()
            case wire.Split():
                self._metrics.instance(link.instance).oom_splits += 1
            case wire.Released(batch_ids):
                self.in_flight.release(link, batch_ids)
            case _:
                self._on_other(link, message)
        return False

    def _answer(self, link: WorkerLink, flight: InFlightBatch, done: wire.Done) -> None:
        if self._answers.tracer is not None:
            self._answers.tracer.computed(flight.batch, done)
        answers: Sequence[Answer]
        if self._spec.decoupled:
            answers = [None] * len(flight.requests)
            self._answers.end_streams(flight, failed=False)
        elif readers := self._answers.readers_of(flight.requests):
            whole = self._messages.uncut(link, flight.batch, done, len(readers))
            if whole is not None:
                self._count(flight, done, flight.requests)
                self._answers.give_uncut(flight.requests, readers, whole)
                return
            answers = self._messages.unpack(link, flight.batch, done)
        else:
            answers = self._messages.unpack(link, flight.batch, done)
        self._count(flight, done, answers)
        settle, give = self._answers.settle, self._answers.give
        for pending, answer in zip(flight.requests, answers, strict=True):
            settle(pending)
            give(pending, answer)

    def _count(self, flight: InFlightBatch, done: wire.Done, answers: Sequence[object]) -> None:
        """Count the requests of a batch, before they are given their answers."""
        batch = flight.batch
        phases = done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns
        self._metrics.executed(batch.instance, batch.rows, flight.sent_at, phases, batch.requests, answers)

    def _on_yield(self, link: WorkerLink, message: wire.Yield) -> bool:
        flight = self.in_flight.at(link, message.batch_id)
        answers = self._messages.unpack(link, flight.batch, message, flight.yield_gone)
        for pending in self._answers.pass_on(flight, answers, message.last):
            self.in_flight.call_off(pending)  # nobody waits for more of it
        if flight.count_yield() > 1:
            return False
        # What was put out leaves at the end of the next turn of the loop.
        self._loop.call_soon(self._loop.call_soon, self.in_flight.go_on, flight)
        return True

    def _fail(self, link: WorkerLink, flight: InFlightBatch, error: RequestError) -> None:
        compute_s = time.monotonic() - flight.sent_at
        self._metrics.instance(link.instance).batch_failed(flight.batch.rows, compute_s)
        self._answers.end_streams(flight, failed=True)
        for pending in flight.requests:
            self._answers.finish(pending, error)

    # ---- ends -----------------------------------------------------------------------------

    def lose(self, link: WorkerLink) -> list[PendingRequest]:
        """Forget the batches of a worker that is gone; the requests that were at it, in order."""
        return self.in_flight.lose(link)

    def close(self) -> None:
        if self._wakeup is not None:
            self._wakeup.cancel()
