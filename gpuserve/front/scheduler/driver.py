"""One model at work in the front: it drives the pure scheduler with the loop's clock, sends batches to
workers, and resolves what the service awaits. It decides nothing that the scheduler could decide.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from gpuserve.errors import RequestError, request_error
from gpuserve.front.endpoint.sequence_check import SequenceCheck
from gpuserve.front.endpoint.v2 import InferRequest
from gpuserve.front.endpoint.validation import ModelCheck
from gpuserve.front.links import WorkerLink, no_such_message
from gpuserve.front.metrics import ModelMetrics
from gpuserve.front.plane.batch_messages import BatchMessages
from gpuserve.front.plane.blocks import bring_home
from gpuserve.front.plane.run_message import RegionUse, region_numbers
from gpuserve.front.plane.scatter import Answer
from gpuserve.front.scheduler import fates, refusals
from gpuserve.front.scheduler.answers import Answers, phases_of
from gpuserve.front.scheduler.choice import scheduler_of
from gpuserve.front.scheduler.device_check import DeviceCheck
from gpuserve.front.scheduler.flights import Flight, Flights
from gpuserve.front.scheduler.instances import Instances
from gpuserve.front.scheduler.pending import OnAnswer, OnResponse, PendingRequest
from gpuserve.front.scheduler.queue import QueuedRequest
from gpuserve.front.scheduler.rate_limiter import RateLimiter
from gpuserve.front.scheduler.response_cache import ResponseCache
from gpuserve.front.scheduler.slots import Batch
from gpuserve.front.statistics import FailureReason as Reason
from gpuserve.spec import ModelSpec
from gpuserve_worker import wire
from gpuserve_worker.memory import Arena, Block, OutOfMemory

if TYPE_CHECKING:
    from gpuserve.front.tracing.model_tracer import ModelTracer

logger = logging.getLogger(__name__)


class ModelDriver:
    """A model's queue, its instances that are up, and its input arena."""

    def __init__(
        self,
        spec: ModelSpec,
        max_arena_nbytes: int,
        metrics: ModelMetrics,
        cache: ResponseCache | None = None,
        regions: RegionUse | None = None,
        limiter: RateLimiter | None = None,
        on_other: Callable[[WorkerLink, wire.Message], None] = no_such_message,
    ) -> None:
        self._on_other = on_other
        self._regions = regions
        self.spec = spec
        self.metrics = metrics
        self.check = SequenceCheck(spec) if spec.in_sequences else ModelCheck(spec)
        self.scheduler = scheduler_of(spec, limiter, self._pump_soon)
        instances = self.instances = Instances({one.name: one.device for one in spec.instances})
        self.arena = Arena(max_arena_nbytes, instances.announce_segment, instances.announce_drop)
        self._messages = BatchMessages(spec, self.arena)
        self.device_inputs = self._messages.device_inputs
        self._device_check = DeviceCheck(spec, instances)
        self._flights = Flights(self.free)
        self._answers = Answers(spec, metrics, cache)
        self._loop = asyncio.get_running_loop()
        self._pump_due = False
        self._wakeup: asyncio.TimerHandle | None = None
        self._refusal: Callable[[], RequestError] | None = None
        #: Why no instance can run, where it is the machine's fault.
        self.fault = ""
        self._removed = False
        #: Whether an instance was up once.
        self.was_ready = False
        #: Only while requests of this model may be traced.
        self.tracer: ModelTracer | None = None

    # ---- requests -------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether an instance is up."""
        return bool(self.instances)

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        counts = self.scheduler.statistics()
        return counts.queued + counts.running_requests

    def allocate(self, nbytes: int) -> Block | None:
        """Memory for one large input, to be filled while its bytes arrive; None when there is none."""
        try:
            return self.arena.allocate(nbytes)
        except OutOfMemory:
            return None

    def submit(
        self,
        request: InferRequest,
        on_response: OnResponse | None = None,
        on_answer: OnAnswer | None = None,
    ) -> PendingRequest:
        """Queue one request; ``on_answer`` takes what became of it, or else its ``answer`` is awaited, and
        ``take_back()`` gives it up.

        ``on_response`` takes the responses of a decoupled model; any other gives its one as the answer.

        Raises:
            RequestError: the request is wrong or refused.
        """
        blocks: Sequence[Block] = ()
        for one in request.inputs:
            if isinstance(one.data, Block):
                blocks = bring_home(request, self.arena)
                break
        try:
            if self.spec.decoupled and on_response is None:
                raise refusals.no_stream(self.spec.name)
            checked = self.check.check(request)
            if request.regions:
                self._device_check.check(request)
            if self._refusal is not None:
                raise self._refusal()
            retriable = not blocks or self._messages.is_repeatable(request)
            pending = PendingRequest(self, request, checked, blocks, retriable, on_response, on_answer)
            if self.tracer is not None:
                self.tracer.begin(pending)
            answers = self._answers
            if answers.recalls and answers.recall(pending):
                self._settle(pending)
                return pending
            self.scheduler.submit(pending, time.monotonic())
            if answers.in_order:
                answers.expect(pending)
        except RequestError as error:
            self.free(blocks)
            self.metrics.refused(error)
            raise
        if pending.timeout_s is not None:
            pending.timer = self._loop.call_later(pending.timeout_s, self._on_deadline, pending)
        if not self._pump_due:
            self._pump_soon()
        return pending

    def take_back(self, pending: PendingRequest) -> None:
        """Its client went away: out of the queue, or its result is dropped."""
        if not pending.give_up() or not self._answers.take_back(pending):
            return
        if self.scheduler.cancel(pending):
            self._settle(pending)
        else:
            self._flights.call_off(pending)
        self._pump_soon()  # others of its sequence may have gone with it

    def _on_deadline(self, pending: PendingRequest) -> None:
        pending.timer = None
        if pending.is_over:
            return
        was_queued = self.scheduler.cancel(pending)
        late = refusals.too_late(self.spec.name, pending.request.timeout_s, was_queued=was_queued)
        self._answers.fail_now(pending, late, Reason.REJECTED if was_queued else Reason.OTHER)
        if was_queued:
            self._settle(pending)
        else:
            self._flights.call_off(pending)

    def _settle(self, pending: PendingRequest) -> None:
        """A request that is in no batch any more lets go of its body and its timer."""
        if pending.timer is not None:
            pending.timer.cancel()
            pending.timer = None
        if pending.blocks:
            self.free(pending.blocks)
            pending.blocks = ()
        request = pending.request
        # The scheduler may refer to a request for a while after it is through; not to its body.
        request.inputs.clear()
        if request.regions and self._regions is not None:
            self._regions.unpin(request)
            request.regions = ()

    def free(self, blocks: Iterable[Block]) -> None:
        """Take back blocks of the arena that nothing refers to any more."""
        for block in blocks:
            block.free()

    # ---- batches out ----------------------------------------------------------------------

    def _pump_soon(self) -> None:
        # At the end of this turn of the loop: requests that arrived together are batched together.
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        now = time.monotonic()
        for late in self.scheduler.expire(now):
            self._answer(late, fates.taken_out(self.spec, late), fates.reason_taken_out(self.spec, late))
        while (batch := self.scheduler.next_batch(now)) is not None:
            self._dispatch(batch, now)
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None
        wakeup = self.scheduler.next_wakeup(now)
        if wakeup is not None:
            self._wakeup = self._loop.call_later(wakeup - now, self._pump)

    def _dispatch(self, batch: Batch, now: float) -> None:
        link = self.instances[batch.instance]
        try:
            gathered, run = self._messages.pack(batch, link)
        except OutOfMemory as error:
            logger.warning("model %s: %s", self.spec.name, error)
            self.scheduler.complete(batch.batch_id)
            self._refuse(batch.requests, refusals.no_memory(self.spec.name))
            return
        self._flights.depart(Flight(batch, link, gathered.blocks, gathered.in_place, now))
        self.metrics.queued(batch.requests, now)
        if self.tracer is not None:
            self.tracer.dispatched(batch)
        if gathered.with_regions and self._regions is not None:
            self._regions.introduce(link, region_numbers(gathered.with_regions))
        link.send(run)

    # ---- answers in -----------------------------------------------------------------------

    def on_message(self, link: WorkerLink, message: wire.Message) -> bool:
        """What a worker of this model says; anything out of place is a breach of the protocol.

        True: what it led to should go out before more is read. So it is with the first response of a stream,
        and with the end of a batch: that nothing has come behind it would take a system call to find out.
        """
        match message:
            case wire.Done():
                self._on_done(link, message)
                return True
            case wire.Yield():
                return self._on_yield(link, message)
            case wire.Failed(batch_id, failure, inputs_free):
                flight = self._land(link, batch_id, inputs_free)
                error = request_error(*failure)
                compute_s = time.monotonic() - flight.sent_at
                self.metrics.instance(link.instance).batch_failed(flight.batch.rows, compute_s)
                self._answers.end_streams(flight, failed=True)
                self._pump()
                for pending in flight.batch.requests:
                    self._answer(pending, error)
            case wire.Computed(batch_ids):
                for batch_id in batch_ids:
                    self.scheduler.computed(self._flights.at(link, batch_id).batch)
                self._pump()
            case wire.Split():
                self.metrics.instance(link.instance).oom_splits += 1
            case wire.Released(batch_ids):
                self._flights.release(link, batch_ids)
            case _:
                self._on_other(link, message)
        return False

    def _on_done(self, link: WorkerLink, done: wire.Done) -> None:
        phases = phases_of(done)
        flight = self._land(link, done.batch_id, done.inputs_free)
        if self.tracer is not None:
            self.tracer.computed(flight.batch, done)
        # The worker gets its next batch before anybody is answered.
        self._pump()
        answers: Sequence[Answer] = [None] * len(flight.batch.requests)
        if not self.spec.decoupled:
            answers = self._messages.unpack(link, flight.batch, done)
        self._answers.executed(flight, phases, answers)
        settle, give = self._settle, self._answers.give
        for pending, answer in zip(flight.requests, answers, strict=True):
            settle(pending)
            give(pending, answer)

    def _on_yield(self, link: WorkerLink, message: wire.Yield) -> bool:
        flight = self._flights.at(link, message.batch_id)
        answers = self._messages.unpack(link, flight.batch, message, flight.yield_gone)
        for pending in self._answers.pass_on(flight, answers):
            self._flights.call_off(pending)  # nobody waits for more of it
        return flight.count_yield() == 1

    def _land(self, link: WorkerLink, batch_id: int, inputs_free: bool) -> Flight:
        flight = self._flights.land(link, batch_id, inputs_free)
        self.scheduler.complete(batch_id)
        return flight

    def _answer(self, pending: QueuedRequest, answer: Answer, reason: Reason = Reason.BACKEND) -> None:
        assert isinstance(pending, PendingRequest)
        self._settle(pending)
        self._answers.give(pending, answer, reason)

    # ---- instances ------------------------------------------------------------------------

    def instance_up(self, link: WorkerLink) -> None:
        """A worker is there; it may be given batches at once."""
        self._refusal, self.fault = None, ""
        self.was_ready = True
        link.open()
        for segment, fd, nbytes in self.arena.segments():
            link.send(wire.Segment(segment, nbytes), [fd])
        self.instances.add(link)
        self.metrics.instance(link.instance).set_up(True)
        self.scheduler.instance_up(link.instance, link.slots)
        self._pump_soon()

    def instance_down(self, instance: str, reason: str, restart_in_s: float | None = None) -> None:
        """A worker is gone: what it ran runs once more elsewhere, or is lost."""
        if instance not in self.instances:  # it was let go meanwhile
            return
        link = self.instances.remove(instance, restart_in_s)
        if link is not None:
            self._lose(link, reason, self._refusal if self._removed else None)
        self._refuse_hopeless(instance)

    def _refuse_hopeless(self, instance: str) -> None:
        """Nobody waits for what cannot run soon, after an instance went."""
        if not (self.instances or self._removed) and self.instances.none_is_due():
            self._give_up(lambda: refusals.no_instance(self.spec.name, self.fault))
        device = self.instances.device_of(instance)
        if self.instances.none_is_due(device):
            self._refuse(self.scheduler.take_all(device), refusals.none_on_device(self.spec.name, device))

    def resize(self, spec: ModelSpec) -> None:
        """The same model with other instances, which come up later or are going to be retired."""
        self.spec = spec
        self.instances.resize({one.name: one.device for one in spec.instances})
        self.scheduler.resize(spec.instances)
        self.device_inputs.resize(spec)

    def retire_instance(self, instance: str) -> None:
        """It gets nothing new, and is let go once it is idle."""
        self.instances.retire(instance)
        self.scheduler.retire(instance)
        self._refuse_hopeless(instance)
        self._pump_soon()

    def is_idle(self, instance: str) -> bool:
        """Whether one that was retired has finished, and nobody has to read what is on its device."""
        return self.scheduler.is_idle(instance) and not self.instances.owes(instance)

    def let_go(self, instance: str) -> None:
        """One that was retired leaves; what it has not finished runs once more elsewhere, or is lost."""
        link = self.instances.forget(instance)
        if link is not None:
            self._lose(link, "it is retired", lambda: refusals.retired(self.spec.name))
        self.scheduler.instance_down(instance)

    def _lose(self, link: WorkerLink, reason: str, ended: Callable[[], RequestError] | None) -> None:
        instance = self.metrics.instance(link.instance)
        instance.set_up(False)
        instance.restarts += ended is None
        running = self._flights.lose(link)
        logger.debug("model %s: instance %s is down: %s", self.spec.name, link.instance, reason)
        lost = self.scheduler.instance_down(link.instance)
        link.close()
        counted = Reason.BACKEND if ended is None else Reason.OTHER
        for pending in lost:
            self._answer(pending, fates.lost(self.spec, pending, ended), counted)
        for pending in running:
            if pending.cancelled:  # nobody waits for it, but its body is still here
                self._settle(pending)
        self._pump_soon()

    def _give_up(self, refusal: Callable[[], RequestError]) -> None:
        self._refusal = refusal
        self._refuse(self.scheduler.take_all(), refusal())

    def _refuse(self, requests: Iterable[QueuedRequest], error: RequestError) -> None:
        for pending in requests:
            self._answer(pending, error, Reason.OTHER)

    # ---- ending ---------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        """Refuse new requests; those accepted are still run."""
        self.scheduler.stop_accepting()

    def retire(self) -> None:
        """Another driver gets the requests from now on; what this one still answers is not remembered."""
        self._answers.forget()

    def close(self) -> None:
        """Let every worker go and give the arena up; whoever still waits is told."""
        self._removed = True
        self._refusal = lambda: refusals.ended(self.spec.name, stops=self.scheduler.draining)
        for instance in self.instances.names():
            self.instance_down(instance, "the model is removed")
        self._give_up(self._refusal)
        self.scheduler.close()
        if self._wakeup is not None:
            self._wakeup.cancel()
        self.arena.close()
