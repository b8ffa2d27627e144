"""The workers of one model: their starts and deaths, the requests of dead workers, and overdue calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from gpuserve.core.errors import RequestError
from gpuserve.front.ipc.gather import DeviceInputs
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.models.batch_runner import BatchRunner, ModelScheduling
from gpuserve.front.models.in_flight import RunningCall
from gpuserve.front.models.instances import PATIENCE_S, ModelInstances
from gpuserve.front.models.model_answers import ModelAnswers
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.scheduling import refusals
from gpuserve.front.scheduling.suspects import DEATHS, FORGIVEN_AFTER_S
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.protocol import wire

logger = logging.getLogger(__name__)


#: The delay after which an instance that went down is checked again.
_RECHECK_S: Final = PATIENCE_S + 0.01


class ModelWorkers:
    """A model's workers; ``runner`` processes their messages. ``refusal`` if no instance can be expected."""

    def __init__(
        self,
        spec: ModelSpec,
        scheduling: ModelScheduling,
        instances: ModelInstances,
        device_inputs: DeviceInputs,
        arena: Arena,
        answers: ModelAnswers,
        runner: BatchRunner,
        metrics: ModelMetrics,
    ) -> None:
        self._name = spec.name
        self._on_demand = spec.on_demand
        self._scheduling = scheduling
        self.instances = instances
        self.device_inputs = device_inputs
        self._arena = arena
        self._answers = answers
        self.runner = runner
        self._metrics = metrics
        self.refusal: Callable[[], RequestError] | None = None
        #: The fault of the machine because of which no instance can run.
        self.fault = ""
        #: Whether an instance was ever up, or starts on demand.
        self.were_up = spec.on_demand
        self._closed = False
        #: Called with the link of a worker that died while it ran an isolated request of a suspect.
        self.on_isolated_death: Callable[[WorkerLink], None] = lambda _: None

    def instance_up(self, link: WorkerLink) -> None:
        self.refusal, self.fault = None, ""
        self.were_up = True
        if link is not self.instances.parked.pop(link.instance, None):
            link.open()
            for segment, fd, nbytes in self._arena.segments():
                link.send(wire.Segment(segment, nbytes), [fd])
        self.instances.add(link)
        self._metrics.instance(link.instance).set_up(True)
        device = self.instances.device_of(link.instance)
        self._scheduling.scheduler.instance_up(link.instance, link.slots, device)
        self.runner.pump_soon()

    def parked(self, instance: str, pid: int) -> WorkerLink | None:
        """Return the link of a worker that has slept. The link of a predecessor, which is dead, is closed."""
        link = self.instances.parked.get(instance)
        if link is None or link.pid == pid:
            return link
        self._close_parked(instance)
        return None

    def _close_parked(self, instance: str) -> bool:
        link = self.instances.parked.pop(instance, None)
        if link is not None:
            self.runner.in_flight.remove_worker(link)
            link.close()
        return link is not None

    def instance_down(self, instance: str, reason: str, restart_in_s: float | None = None) -> None:
        if self._close_parked(instance) or instance not in self.instances:  # it was released meanwhile
            return
        link = self.instances.remove(instance, restart_in_s)
        if link is not None:
            self._remove_link(link, reason, self.refusal if self._closed else None)
            self.recheck_later(instance)
        elif self._on_demand and restart_in_s and not self.instances:
            # Its first two tries to load have failed.
            self._refuse_all(lambda: refusals.no_instance(self._name, reason))
        self._refuse_if_none_expected(instance)

    def recheck_later(self, instance: str) -> None:
        """Check later whether an instance that went down is still down: no event may follow."""
        asyncio.get_running_loop().call_later(_RECHECK_S, self._refuse_if_none_expected, instance)

    def _refuse_if_none_expected(self, instance: str) -> None:
        """Refuse the queued requests that cannot run soon, because instances are down."""
        if instance not in self.instances:
            return
        if not (self.instances or self._closed) and self.instances.none_expected():
            self._refuse_all(lambda: refusals.no_instance(self._name, self.fault))
        device = self.instances.device_of(instance)
        if self.instances.none_expected(device):
            bound = self._scheduling.scheduler.remove_all(device)
            self._answers.refuse(bound, refusals.none_on_device(self._name, device))

    def resize(self, spec: ModelSpec) -> None:
        self.instances.resize({one.name: one.first_device for one in spec.instances})
        self.device_inputs.resize(spec)
        if self._scheduling.limits is not None:
            self._scheduling.limits.resize(spec.instances)

    def retire_instance(self, instance: str) -> None:
        self.instances.retire(instance)
        self._scheduling.source.retire(instance)
        self._refuse_if_none_expected(instance)
        self.runner.pump_soon()

    def is_idle(self, instance: str) -> bool:
        """Return whether a retired instance has finished, and no reader needs the tensors on its device."""
        return self._scheduling.scheduler.is_idle(instance) and not self.instances.has_unread_exports(
            instance
        )

    def release_instance(self, instance: str) -> None:
        """Release a retired instance. Its unfinished requests run once more elsewhere, or are lost."""
        link = self.instances.forget(instance)
        if link is not None:
            self._remove_link(link, "it is retired", lambda: refusals.retired(self._name))
        self._scheduling.source.instance_down(instance)

    def retire_all(self) -> None:
        """Give the instances no new batches. Requests that have not begun wait for later instances."""
        self.instances.sleep()
        for instance in self.instances.up:
            self.instances.retire(instance)
            self._scheduling.source.retire(instance)

    def all_idle(self) -> bool:
        return all(map(self.is_idle, self.instances.up))

    def sleep(self, *, keeps_processes: bool = False) -> None:
        """Remove all instances, which are idle. Requests wait for later ones, for as long as they may."""
        for link in list(self.instances.up.values()):
            self.instances.remove(link.instance, None)
            if keeps_processes:
                self._metrics.instance(link.instance).set_up(False)
                self._scheduling.source.instance_down(link.instance, None)
                self.instances.parked[link.instance] = link
            else:
                self._remove_link(link, "it is not needed now", lambda: refusals.retired(self._name))
        self.instances.sleep()
        self.refusal, self.fault = None, ""

    def release_all(self) -> None:
        """Release all instances that have not finished. Requests that were not begun are queued again."""
        for instance in list(self.instances.up):
            self.release_instance(instance)

    def _remove_link(self, link: WorkerLink, reason: str, ended: Callable[[], RequestError] | None) -> None:
        instance = self._metrics.instance(link.instance)
        instance.set_up(False)
        instance.restarts += ended is None
        running = self.runner.in_flight.remove_worker(link)
        logger.debug("model %s: instance %s is down: %s", self._name, link.instance, reason)
        died_at = time.monotonic() if ended is None else None
        lost = self._scheduling.source.instance_down(link.instance, died_at)
        self.report_blame(link)
        link.close()
        for pending in lost:
            self._answers.fail_lost(pending, ended)
        for pending in running:
            if pending.cancelled:  # cancelled, but its body is not released yet
                self._answers.release_inputs(pending)
        self.runner.pump_soon()

    def report_blame(self, link: WorkerLink) -> None:
        """Report the client whose request killed the worker that has just died, if known."""
        blame = self._scheduling.scheduler.blame
        if blame is None:
            return
        if blame.is_new:
            header = isinstance(blame.client, tuple)  # the header's value may be a secret
            logger.warning(
                "model %s: isolated the requests of client %s until none has killed a worker for %g s: %d "
                "workers died under them",
                *(self._name, "(named by a header)" if header else blame.client, FORGIVEN_AFTER_S, DEATHS),
            )
        elif blame.was_isolated:
            self.on_isolated_death(link)

    def _refuse_all(self, refusal: Callable[[], RequestError]) -> None:
        self.refusal = refusal
        self._answers.refuse(self._scheduling.scheduler.remove_all(), refusal())

    def close(self) -> None:
        self._closed = True
        self.refusal = lambda: refusals.ended(self._name, stops=self._scheduling.scheduler.draining)
        for instance in [*self.instances.up, *self.instances.parked]:
            self.instance_down(instance, "the model is removed")
        self._refuse_all(self.refusal)
        if self._scheduling.limits is not None:
            self._scheduling.limits.close()


class OverdueCalls:
    """A model's calls over their time limit: their instances get no batches; the caller polls and kills."""

    def __init__(
        self,
        spec: ModelSpec,
        scheduling: ModelScheduling,
        runner: BatchRunner,
        workers: ModelWorkers,
        answers: ModelAnswers,
        metrics: ModelMetrics,
    ) -> None:
        self._name = spec.name
        self._scheduling = scheduling
        self._runner = runner
        self._workers = workers
        self._answers = answers
        self._metrics = metrics
        self._is_stepped = spec.max_active > 0
        self._watch = CallWatch(spec.execution_timeout_s)

    def poll(self, now: float, next_poll_at: float) -> list[OverdueCall]:
        """Return the calls that are overdue now, each once."""
        running = self._runner.in_flight.running(self._scheduling.scheduler.began_at)
        return self._watch.poll(running, now, next_poll_at)

    def terminate(self, overdue: OverdueCall, grace_s: float) -> bool:
        """Abandon an instance whose call is overdue. Returns False if the call has just ended.

        The requests of the batch fail. Of a step with several requests, those without a response run once
        more, each alone. Other batches that the instance ran run once more elsewhere, as if
        their worker had died; batches that it only held have not been tried. Memory that the worker may still
        write to is free when it is dead, which must be within the grace period.
        """
        flights, instances = self._runner.in_flight, self._workers.instances
        flight = flights.find(overdue.call.batch_id)
        if flight is None or instances.up.get(flight.link.instance) is not flight.link:
            return False
        link = flight.link
        link.drain()
        if flights.find(overdue.call.batch_id) is not flight:
            return False
        # A worker that has not attached to this front still runs batches of the previous one.
        hung: list[PendingRequest] = flight.requests if link.attached else []
        if self._is_stepped and link.attached:  # all requests of the step, one of which may be the cause
            hung = flights.requests_at(link)
        if len(hung) == 1 or not self._is_stepped:
            for pending in hung:
                pending.retriable = False
        instances.remove(link.instance, None)
        counts = self._metrics.instance(link.instance)
        counts.set_up(False)
        counts.restarts += 1
        counts.timeouts += 1
        self._answer(link, hung, overdue.limit_s)
        link.abandon(f"its callable was not back within {overdue.limit_s:g} s", grace_s)
        self._workers.recheck_later(link.instance)
        self._runner.pump_soon()
        return True

    def reap(self, link: WorkerLink) -> bool:
        """Free the memory of a dead worker. Returns False if it was not abandoned before."""
        if link not in self._runner.in_flight.abandoned:
            return False
        self._runner.in_flight.remove_worker(link)
        link.close()
        return True

    def close(self) -> None:
        for link in tuple(self._runner.in_flight.abandoned):
            self.reap(link)

    def _answer(self, link: WorkerLink, hung: Collection[PendingRequest], limit_s: float) -> None:
        flights = self._runner.in_flight
        abandoned = flights.abandon_worker(link)
        lost = self._scheduling.source.instance_down(link.instance, time.monotonic())
        self._workers.report_blame(link)
        too_late = partial(refusals.not_back, self._name, link.instance, limit_s)
        for pending in abandoned:
            if pending.cancelled or pending in lost:
                flights.keep_body(link, pending)
            if pending.cancelled:
                self._answers.release_inputs(pending)
        for request in lost:
            self._answers.fail_lost(request, too_late if request in hung else None)


#: Without a limit, a call that takes this long is reported once.
REPORT_AFTER_S: Final = 60.0
#: The shortest time between two such reports of one instance.
REPORT_AGAIN_AFTER_S: Final = 60.0
#: A poll that is this late means that this process or its machine was suspended. The worker may have been as
#: well, so the time does not count.
_LATE_S: Final = 1.0


class OverdueCall(NamedTuple):
    """A call over its limit, which ends its instance. Each response of a stream counts as a call."""

    call: RunningCall
    ran_s: float
    limit_s: float


@dataclass(eq=False, slots=True)
class _WatchedCall:
    """One batch since the first poll that saw it, or since its last response."""

    n_responses: int
    since: float
    reported: bool = False


class CallWatch:
    """The running calls of one model. Pure: times and batches are arguments. With ``limit_s`` 0 no call is
    terminated, but very long ones are reported. A poll is the only cost: running batches do nothing for it.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: dict[int, _WatchedCall] = {}
        self._reported_at: dict[str, float] = {}
        self._poll_due_at = 0.0

    def poll(self, calls: Iterable[RunningCall], now: float, next_poll_at: float) -> list[OverdueCall]:
        """Return the calls that are overdue now, each once."""
        late_s = now - self._poll_due_at if self._poll_due_at else 0.0
        stood_s = late_s if late_s > _LATE_S else 0.0
        self._poll_due_at = next_poll_at
        before, self._seen = self._seen, {}
        overdue = []
        for call in calls:
            seen = before.get(call.batch_id)
            if seen is None:
                seen = _WatchedCall(call.n_responses, min(now, call.began_at + stood_s))
            elif call.is_held_back or call.n_responses != seen.n_responses:
                seen.n_responses, seen.since = call.n_responses, now
            else:
                seen.since += stood_s
            self._seen[call.batch_id] = seen
            if not seen.reported and self._is_overdue(call, seen, now):
                seen.reported = True
                overdue.append(OverdueCall(call, now - seen.since, self._limit_s))
        return overdue

    def _is_overdue(self, call: RunningCall, seen: _WatchedCall, now: float) -> bool:
        ran_s = now - seen.since
        if self._limit_s:
            return ran_s >= self._limit_s
        if (
            ran_s < REPORT_AFTER_S
            or now < self._reported_at.get(call.instance, -REPORT_AGAIN_AFTER_S) + REPORT_AGAIN_AFTER_S
        ):
            return False
        self._reported_at[call.instance] = now
        return True
