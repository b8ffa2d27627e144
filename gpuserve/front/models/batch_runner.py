"""The running batches of one model: formed, sent to workers, and their answers delivered."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from gpuserve.config.settings.logs import RateLimitedLog
from gpuserve.core.errors import RequestError, request_error
from gpuserve.front.ipc.batch_messages import BatchMessages
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.models.in_flight import InFlightBatch, InFlightBatches
from gpuserve.front.models.instances import ModelInstances
from gpuserve.front.models.model_answers import ModelAnswers, phases_of
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.observability.access_log import id_for_worker
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.inference import InferResponse
from gpuserve.front.requests.statistics import FailureReason
from gpuserve.front.scheduling import refusals
from gpuserve.front.scheduling.rate_limiter import RateLimitedSource
from gpuserve.front.scheduling.request_queue import QueuedRequest
from gpuserve.front.scheduling.scheduler import BatchSource, Scheduler
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import OutOfMemory
from gpuserve_worker.protocol import wire

logger = logging.getLogger(__name__)

#: The answers of a busy model that are delivered in one turn of the event loop, and their bytes: the system
#: call that sends a MiB takes about 0.5 ms.
_PORTION: Final = 16
_PORTION_NBYTES: Final = 512 << 10
#: The same number while clients use several models, and the time for which two models count as used together.
_SHARED_PORTION: Final = 4
_TOGETHER_S: Final = 0.1


class ModelScheduling(NamedTuple):
    """The scheduler of a model and the source of its batches: the scheduler, or ``limits`` around it."""

    scheduler: Scheduler
    source: BatchSource
    limits: RateLimitedSource | None = None


class AnswerTurns:
    """The number of answers that one turn of the event loop delivers, for all models of a front: fewer while
    clients use several models, so that a flood of one model holds up the requests for another less.
    """

    def __init__(self) -> None:
        self._model = ""
        self._changed_at = -math.inf

    def portion(self, model: str, sent_at: float) -> int:
        """Return the number for a batch of a model that was sent at this time."""
        if model != self._model:
            if self._model:
                self._changed_at = sent_at
            self._model = model
        return _PORTION if sent_at - self._changed_at > _TOGETHER_S else _SHARED_PORTION


class BatchRunner:
    """Sends batches of one model to its instances. ``on_other`` gets workers' messages about other things.

    The bodies of a large batch are copied over several turns of the event loop. Later batches for the same
    instance wait behind the large batch, because an instance runs its batches in the order of dispatch.
    """

    def __init__(
        self,
        spec: ModelSpec,
        scheduling: ModelScheduling,
        messages: BatchMessages,
        instances: ModelInstances,
        answers: ModelAnswers,
        metrics: ModelMetrics,
        on_other: Callable[[WorkerLink, wire.Message], None],
        turns: AnswerTurns,
    ) -> None:
        self._spec = spec
        self._turns = turns
        self._scheduling = scheduling
        self._messages = messages
        self._instances = instances
        self._answers = answers
        self._metrics = metrics
        self._on_other = on_other
        self.in_flight = InFlightBatches()
        self._is_ragged = any(one.ragged for one in spec.inputs)
        self._no_memory = RateLimitedLog(logger)
        #: Batches that are not sent yet, with their messages and the copies to make first.
        self._unsent: deque[tuple[InFlightBatch, wire.Run, Iterator[None]]] = deque()
        #: Answers for later turns of the event loop, so that requests for other models are read in between.
        self._undelivered: deque[tuple[PendingRequest, Answer]] = deque()
        self._most_answers = _PORTION
        self._loop = asyncio.get_running_loop()
        self.pump_due = False
        self._wakeup: asyncio.TimerHandle | None = None
        self._wakeup_at: float | None = None

    # ---- batches out ----------------------------------------------------------------------

    def pump_soon(self) -> None:
        """Form batches at the end of this turn of the loop: requests that arrived together run together."""
        if not self.pump_due:
            self.pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self.pump_due = False
        if self._undelivered:  # the batch becomes larger by the requests that follow these answers
            return
        now = time.monotonic()
        scheduler, source, _ = self._scheduling
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
        if scheduler.shapes_report:
            text, scheduler.shapes_report = scheduler.shapes_report, ""
            advice = "see ragged inputs in docs/how-to/batching.md"
            logger.warning("model %s: %s: requests differ in shape; %s", self._spec.name, text, advice)
        wakeup = source.next_wakeup(now)
        if wakeup != self._wakeup_at:
            if self._wakeup is not None:
                self._wakeup.cancel()
            self._wakeup_at = wakeup
            self._wakeup = None if wakeup is None else self._loop.call_later(wakeup - now, self._wake)

    def _wake(self) -> None:
        self._wakeup = self._wakeup_at = None
        self._pump()

    def _dispatch(self, batch: Batch, now: float) -> WorkerLink | None:
        """Post a batch to its worker, to leave at the end of this turn. Returns None without memory."""
        link = self._instances.up[batch.instance]
        try:
            tracer = self._answers.tracer
            traced_id = id_for_worker if tracer is not None and tracer.live else None
            gathered, run = self._messages.pack(batch, link, traced_id)
        except OutOfMemory as error:
            self._refuse(batch, error, now)
            return None
        flight = InFlightBatch(batch, batch.requests, link, gathered.blocks, gathered.in_place, now)
        if self._spec.max_active:
            flight.open_window()
        self.in_flight.add(flight)
        for request in batch.requests:
            if request.deadline is not None:
                self._set_deadline_timer(flight)
                break
        if self._is_ragged:
            self._metrics.count_elements(batch.requests, batch.rows)
        if tracer is not None:
            tracer.on_dispatched(batch)
        if gathered.with_regions:
            self._answers.announce_regions(link, gathered.with_regions)
        if gathered.joins or (self._unsent and any(one.link is link for one, *_ in self._unsent)):
            flight.is_sent = False
            self._unsent.append((flight, run, self._messages.copies(gathered)))
            if len(self._unsent) == 1:
                self._loop.call_soon(self._copy)
        else:
            link.post(run)
        return link

    def _refuse(self, batch: Batch, error: OutOfMemory, now: float) -> None:
        self._no_memory.say("model %s: %s", self._spec.name, error)
        self._scheduling.source.complete(batch.batch_id, None, now)
        self._answers.refuse(batch.requests, refusals.no_memory(self._spec.name))

    def _copy(self) -> None:
        """Copy one part of the oldest unsent batch, or send the batch if all parts are copied."""
        flight, run, copies = self._unsent[0]
        batch, link = flight.batch, flight.link
        if self.in_flight.find(batch.batch_id) is not flight:  # its worker has died
            self._unsent.popleft()
        else:
            try:
                if next(copies, self) is self:
                    self._unsent.popleft()
                    self._send(flight, run)
            except OutOfMemory as error:
                self._unsent.popleft()
                self.in_flight.complete(link, batch.batch_id, inputs_free=True)
                self._refuse(batch, error, time.monotonic())
                self.pump_soon()
        if self._unsent:
            self._loop.call_soon(self._copy)

    def _send(self, flight: InFlightBatch, run: wire.Run) -> None:
        flight.is_sent, flight.sent_at = True, time.monotonic()
        flight.link.post(run)
        for pending in flight.requests:
            if pending.is_over:  # it was cancelled, or too late, while the batch was copied
                self.in_flight.cancel_at_worker(pending)
        flight.link.flush()

    def _set_deadline_timer(self, flight: InFlightBatch) -> None:
        """Set a timer for the next deadline of the batch's requests."""
        due = [one.deadline for one in flight.requests if one.deadline is not None and not one.is_over]
        flight.timer = self._loop.call_at(min(due), self._fail_late, flight) if due else None

    def _fail_late(self, flight: InFlightBatch) -> None:
        now = self._loop.time()
        for pending in flight.requests:
            if pending.deadline is not None and pending.deadline <= now and not pending.is_over:
                self._scheduling.scheduler.cancel(pending)
                late = refusals.too_late(self._spec.name, pending.request.timeout_s, was_queued=False)
                self._answers.fail_now(pending, late, FailureReason.OTHER)
                self.in_flight.cancel_at_worker(pending)
        self._set_deadline_timer(flight)

    # ---- answers in -----------------------------------------------------------------------

    def on_messages(self, link: WorkerLink, messages: Sequence[wire.Message]) -> bool:
        """Process a worker's messages. Workers get their next batches before any request is answered. Returns
        True for a stream's first response and the end of batches, whose effects should be sent first.
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
                    is_urgent |= self._on_other_message(link, message)
                    continue
                flight = self.in_flight.complete(link, message.batch_id, message.inputs_free)
                self._scheduling.source.complete(message.batch_id, took_s, now)
                ended.append((flight, end))
        finally:  # a malformed message must not affect earlier answers
            if ended:
                self._pump()
            for flight, end in ended:
                if isinstance(end, wire.Done):
                    self._answer(link, flight, end)
                    is_urgent = True
                else:
                    self._fail(link, flight, end)
        return is_urgent

    def _on_other_message(self, link: WorkerLink, message: wire.Message) -> bool:
        match message:
            case wire.Yield():
                return self._on_yield(link, message)
            case wire.Stepped():
                return self._on_stepped(link, message)
            case wire.Requeue():
                self._on_returned(link, message)
            case wire.Computed(batch_ids):
                for batch_id in batch_ids:
                    self._scheduling.scheduler.computed(self.in_flight.batch_at(link, batch_id).batch)
                self._pump()
            case wire.Split(batch_id):
                self._scheduling.scheduler.exceeded_memory(self.in_flight.batch_at(link, batch_id).batch)
                self._metrics.instance(link.instance).oom_splits += 1
            case wire.Released(batch_ids):
                self.in_flight.free_lent(link, batch_ids)
            case wire.Call():
                self._on_other(link, message)
                return message.waits  # nothing more comes from this worker before the answer
            case _:
                self._on_other(link, message)
        return False

    def _answer(self, link: WorkerLink, flight: InFlightBatch, done: wire.Done) -> None:
        if self._answers.tracer is not None:
            self._answers.tracer.on_computed(flight.batch, done)
        answers: Sequence[Answer]
        if self._spec.decoupled:
            answers = [None] * len(flight.requests)
            self._answers.end_streams(flight, failed=False)
        elif readers := self._answers.readers_of(flight.requests):
            whole = self._messages.whole_outputs(link, flight.batch, done, len(readers))
            if whole is not None:
                self._count(flight, done, flight.requests)
                self._answers.deliver_whole(flight.requests, readers, whole)
                return
            answers = self._messages.unpack(link, flight.batch, done)
        else:
            answers = self._messages.unpack(link, flight.batch, done)
        # An instance without a batch waits for the requests that follow these answers.
        is_inner = flight.requests[0].request.depth > 0  # of an ensemble or a callable
        self._most_answers = _PORTION if is_inner else self._turns.portion(self._spec.name, flight.sent_at)
        portion = self._portion_of(answers[0]) if len(answers) > 1 else _PORTION
        if self._undelivered or (len(answers) > portion and (link.in_flight or portion < _PORTION)):
            if not self._undelivered:
                self._loop.call_soon(self._deliver_portion)
            self._undelivered.extend(zip(flight.requests, answers, strict=True))
        else:
            release_inputs, deliver = self._answers.release_inputs, self._answers.deliver
            for pending, answer in zip(flight.requests, answers, strict=True):
                release_inputs(pending)
                deliver(pending, answer)
        self._count(flight, done, answers)  # last, while a worker reads the answer to its call

    def _deliver_portion(self, most: int = 0) -> None:
        """Deliver ``most`` answers, 0 for as many as one turn of the event loop has time for."""
        undelivered = self._undelivered
        try:
            for _ in range(min(most or self._portion_of(undelivered[0][1]), len(undelivered))):
                pending, answer = undelivered.popleft()
                self._answers.release_inputs(pending)
                self._answers.deliver(pending, answer)
        finally:  # a defect must not affect later answers
            if undelivered:
                self._loop.call_soon(self._deliver_portion)
            else:
                self.pump_soon()

    def _portion_of(self, answer: Answer) -> int:
        """Return the number of answers of this size that are delivered in one turn of the event loop."""
        most = self._most_answers
        nbytes = sum([len(one.data) for one in answer.outputs]) if isinstance(answer, InferResponse) else 0
        return most if nbytes * most <= _PORTION_NBYTES else max(1, _PORTION_NBYTES // nbytes)

    def _count(self, flight: InFlightBatch, done: wire.Done, answers: Sequence[object]) -> None:
        """Count the requests of a batch, in the turn of the event loop that delivers their answers."""
        batch = flight.batch
        phases = done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns
        self._metrics.executed(batch.instance, batch.rows, flight.sent_at, phases, batch.requests, answers)

    def _on_yield(self, link: WorkerLink, message: wire.Yield) -> bool:
        flight = self.in_flight.batch_at(link, message.batch_id)
        answers = self._messages.unpack(link, flight.batch, message, flight.on_yield_sent)
        for pending in self._answers.deliver_responses(flight, answers, message.last):
            self.in_flight.cancel_at_worker(pending)  # it has failed, so further responses are useless
        if self._spec.max_active:
            self._metrics.stepped(0, 0, 0, 1)
        if flight.count_yield() > 1:
            return False
        if self._spec.max_active:
            self._on_first_response(flight)
            return True
        # The responses are sent at the end of the next turn of the event loop.
        self._loop.call_soon(self._loop.call_soon, self.in_flight.grant_window, flight)
        return True

    def _on_stepped(self, link: WorkerLink, message: wire.Stepped) -> bool:
        """Deliver the responses of a step. Returns True for the first response of a request."""
        link.n_steps += 1
        self._metrics.stepped(message.steps, message.busy_ns, message.active, len(message.batch_ids))
        flights = [self.in_flight.batch_at(link, batch_id) for batch_id in message.batch_ids]
        if not flights:
            return False
        requests = [flight.requests[0] for flight in flights]
        on_gone = [flight.on_yield_sent for flight in flights]
        answers = self._messages.unpack_step(link, requests, message, on_gone)
        last, is_first = set(message.last), False
        for position, (flight, answer) in enumerate(zip(flights, answers, strict=True)):
            ends = (0,) if position in last else ()
            for pending in self._answers.deliver_responses(flight, (answer,), ends):
                self.in_flight.cancel_at_worker(pending)
            if flight.count_yield() == 1:
                self._on_first_response(flight)
                is_first = True
        return is_first

    def _on_first_response(self, flight: InFlightBatch) -> None:
        """Let other requests join one that ran alone, which cannot run again from now on."""
        for pending in flight.requests:
            pending.retriable = False
        if flight.batch.slots > 1:
            self._scheduling.scheduler.share(flight.batch)
            self.pump_soon()

    def _on_returned(self, link: WorkerLink, message: wire.Requeue) -> None:
        """Queue the request of a batch that its worker has returned once more."""
        batch_id, failure, inputs_free = message
        flight = self.in_flight.batch_at(link, batch_id)
        if not inputs_free and flight.in_place:  # the body belongs to arrays that the callable keeps
            for pending in flight.requests:
                pending.retriable = False
            failure = failure or wire.WireFailure("INTERNAL", refusals.KEPT_INPUTS)
        self.in_flight.complete(link, batch_id, inputs_free)
        lost = self._scheduling.source.return_batch(batch_id, begun=failure is not None)
        for pending in flight.requests:
            if pending in lost:
                assert failure is not None, "only a failure is final"
                self._answers.finish(pending, request_error(*failure))
            elif pending.cancelled:
                self._answers.release_inputs(pending)
        self.pump_soon()

    def _fail(self, link: WorkerLink, flight: InFlightBatch, error: RequestError) -> None:
        compute_s = time.monotonic() - flight.sent_at
        self._metrics.instance(link.instance).batch_failed(flight.batch.rows, compute_s)
        self._answers.end_streams(flight, failed=True)
        for pending in flight.requests:
            self._answers.finish(pending, error)

    # ---- ends -----------------------------------------------------------------------------

    def close(self) -> None:
        if self._undelivered:
            self._deliver_portion(len(self._undelivered))
        if self._wakeup is not None:
            self._wakeup.cancel()
