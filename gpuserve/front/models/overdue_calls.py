"""The calls of one model that are not back in time: which they are, and what becomes of them and of their
instance. When that is looked at, and who kills the worker, is not known here.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial

from gpuserve.front.batching import refusals
from gpuserve.front.links.worker_link import WorkerLink
from gpuserve.front.models.answers import ModelAnswers
from gpuserve.front.models.batch_runner import BatchRunner, Queueing
from gpuserve.front.models.model_workers import ModelWorkers
from gpuserve.front.models.pending import PendingRequest
from gpuserve.front.models.running_calls import CallWatch, OverdueCall
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.model.spec import ModelSpec


class OverdueCalls:
    """Watches what ``runner`` has under way. An instance whose call is over its limit gets nothing more."""

    def __init__(
        self,
        spec: ModelSpec,
        queueing: Queueing,
        runner: BatchRunner,
        workers: ModelWorkers,
        answers: ModelAnswers,
        metrics: ModelMetrics,
    ) -> None:
        self._name = spec.name
        self._queueing = queueing
        self._runner = runner
        self._workers = workers
        self._answers = answers
        self._metrics = metrics
        self._watch = CallWatch(spec.execution_timeout_s)

    def look(self, now: float, next_look_at: float) -> list[OverdueCall]:
        """Return the calls that are overdue now, each once."""
        running = self._runner.in_flight.running(self._queueing.scheduler.began_at)
        return self._watch.look(running, now, next_look_at)

    def end(self, overdue: OverdueCall, grace_s: float) -> bool:
        """Give an instance up whose call is overdue; False: it has just come back.

        The requests of the batch fail. Others that the instance ran beside it run once more elsewhere, as if
        their worker had died; those that it only held have not been tried. What the worker may still write to
        is free when it is dead, which it is to be within the grace.
        """
        flights, instances = self._runner.in_flight, self._workers.instances
        flight = flights.find(overdue.call.batch_id)
        if flight is None or instances.up.get(flight.link.instance) is not flight.link:
            return False
        link = flight.link
        link.drain()
        if flights.find(overdue.call.batch_id) is not flight:
            return False
        # One that has not taken over from the front before still runs what it had of that one.
        hung: list[PendingRequest] = flight.requests if link.attached else []
        for pending in hung:
            pending.retriable = False
        instances.remove(link.instance, None)
        self._count(link.instance)
        self._answer(link, hung, overdue.limit_s)
        link.give_up(f"its callable was not back within {overdue.limit_s:g} s", grace_s)
        self._workers.look_later(link.instance)
        self._runner.pump_soon()
        return True

    def bury(self, link: WorkerLink) -> bool:
        """Free what a dead worker held; False: it was not given up before."""
        if link not in self._runner.in_flight.dying:
            return False
        self._runner.in_flight.lose(link)
        link.close()
        return True

    def close(self) -> None:
        for link in tuple(self._runner.in_flight.dying):
            self.bury(link)

    def _count(self, instance: str) -> None:
        metrics = self._metrics.instance(instance)
        metrics.set_up(False)
        metrics.restarts += 1
        metrics.timeouts += 1

    def _answer(self, link: WorkerLink, hung: Collection[PendingRequest], limit_s: float) -> None:
        flights = self._runner.in_flight
        given_up = flights.give_up(link)
        lost = self._queueing.source.instance_down(link.instance, time.monotonic())
        self._workers.tell_of_blame(link)
        too_late = partial(refusals.not_back, self._name, link.instance, limit_s)
        for pending in given_up:
            if pending.cancelled or pending in lost:
                flights.keep_body(link, pending)
            if pending.cancelled:  # nobody waits for it
                self._answers.settle(pending)
        for request in lost:
            self._answers.lose(request, too_late if request in hung else None)
