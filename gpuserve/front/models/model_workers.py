"""The workers of one model as they come and go, and what becomes of the requests of one that is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from gpuserve.core.errors import RequestError
from gpuserve.front.batching import refusals
from gpuserve.front.links.worker_link import WorkerLink
from gpuserve.front.memory.device_inputs import DeviceInputs
from gpuserve.front.models.answers import ModelAnswers
from gpuserve.front.models.batch_runner import BatchRunner, Queueing
from gpuserve.front.models.instances import PATIENCE_S, Instances
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.queueing.suspects import DEATHS, FORGIVEN_AFTER_S
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.protocol import wire

logger = logging.getLogger(__name__)


#: When it is looked whether an instance that went is still gone.
_LOOK_S: Final = PATIENCE_S + 0.01


class ModelWorkers:
    """The workers of one model, whose messages ``runner`` takes; ``refusal``: no instance is to be had."""

    def __init__(
        self,
        spec: ModelSpec,
        queueing: Queueing,
        instances: Instances,
        device_inputs: DeviceInputs,
        arena: Arena,
        answers: ModelAnswers,
        runner: BatchRunner,
        metrics: ModelMetrics,
    ) -> None:
        self._name = spec.name
        self._queueing = queueing
        self.instances = instances
        self.device_inputs = device_inputs
        self._arena = arena
        self._answers = answers
        self.runner = runner
        self._metrics = metrics
        self.refusal: Callable[[], RequestError] | None = None
        #: Why no instance can run, where it is the machine's fault.
        self.fault = ""
        #: Whether an instance was up once.
        self.were_up = False
        self._closed = False
        #: Called with the link of a worker that died under a request of a suspect, which it ran alone.
        self.on_isolated_death: Callable[[WorkerLink], None] = lambda _: None

    def instance_up(self, link: WorkerLink) -> None:
        self.refusal, self.fault = None, ""
        self.were_up = True
        link.open()
        for segment, fd, nbytes in self._arena.segments():
            link.send(wire.Segment(segment, nbytes), [fd])
        self.instances.add(link)
        self._metrics.instance(link.instance).set_up(True)
        device = self.instances.device_of(link.instance)
        self._queueing.scheduler.instance_up(link.instance, link.slots, device)
        self.runner.pump_soon()

    def instance_down(self, instance: str, reason: str, restart_in_s: float | None = None) -> None:
        if instance not in self.instances:  # it was let go meanwhile
            return
        link = self.instances.remove(instance, restart_in_s)
        if link is not None:
            self._lose(link, reason, self.refusal if self._closed else None)
            self.look_later(instance)
        self._refuse_hopeless(instance)

    def look_later(self, instance: str) -> None:
        """See whether one that went is still gone: nobody may tell us more of it."""
        asyncio.get_running_loop().call_later(_LOOK_S, self._refuse_hopeless, instance)

    def _refuse_hopeless(self, instance: str) -> None:
        """Let nobody wait for what cannot run soon, when an instance went and when it is gone for long."""
        if instance not in self.instances:
            return
        if not (self.instances or self._closed) and self.instances.none_is_due():
            self._give_up(lambda: refusals.no_instance(self._name, self.fault))
        device = self.instances.device_of(instance)
        if self.instances.none_is_due(device):
            bound = self._queueing.scheduler.take_all(device)
            self._answers.refuse(bound, refusals.none_on_device(self._name, device))

    def resize(self, spec: ModelSpec) -> None:
        self.instances.resize({one.name: one.device for one in spec.instances})
        self.device_inputs.resize(spec)
        if self._queueing.limits is not None:
            self._queueing.limits.resize(spec.instances)

    def retire_instance(self, instance: str) -> None:
        self.instances.retire(instance)
        self._queueing.source.retire(instance)
        self._refuse_hopeless(instance)
        self.runner.pump_soon()

    def is_idle(self, instance: str) -> bool:
        """Whether one that was retired has finished, and nobody has to read what is on its device."""
        return self._queueing.scheduler.is_idle(instance) and not self.instances.owes(instance)

    def let_go(self, instance: str) -> None:
        """Let a retired instance leave; what it has not finished runs once more elsewhere, or is lost."""
        link = self.instances.forget(instance)
        if link is not None:
            self._lose(link, "it is retired", lambda: refusals.retired(self._name))
        self._queueing.source.instance_down(instance)

    def give_back(self) -> None:
        """Let all instances go that have not finished; what was not begun waits again, for somebody else."""
        for instance in list(self.instances.up):
            self.let_go(instance)

    def _lose(self, link: WorkerLink, reason: str, ended: Callable[[], RequestError] | None) -> None:
        instance = self._metrics.instance(link.instance)
        instance.set_up(False)
        instance.restarts += ended is None
        running = self.runner.lose(link)
        logger.debug("model %s: instance %s is down: %s", self._name, link.instance, reason)
        died_at = time.monotonic() if ended is None else None
        lost = self._queueing.source.instance_down(link.instance, died_at)
        self.tell_of_blame(link)
        link.close()
        for pending in lost:
            self._answers.lose(pending, ended)
        for pending in running:
            if pending.cancelled:  # nobody waits for it, but its body is still here
                self._answers.settle(pending)
        self.runner.pump_soon()

    def tell_of_blame(self, link: WorkerLink) -> None:
        """Report whose request killed the worker that has just gone, if that is known."""
        blame = self._queueing.scheduler.blame
        if blame is None:
            return
        if blame.is_new:
            header = isinstance(blame.client, tuple)  # whose value may be a secret
            logger.warning(
                "model %s: isolated the requests of client %s until none has killed a worker for %g s: %d "
                "workers died under them",
                *(self._name, "(named by a header)" if header else blame.client, FORGIVEN_AFTER_S, DEATHS),
            )
        elif blame.was_isolated:
            self.on_isolated_death(link)

    def _give_up(self, refusal: Callable[[], RequestError]) -> None:
        self.refusal = refusal
        self._answers.refuse(self._queueing.scheduler.take_all(), refusal())

    def close(self) -> None:
        self._closed = True
        self.refusal = lambda: refusals.ended(self._name, stops=self._queueing.scheduler.draining)
        for instance in list(self.instances.up):
            self.instance_down(instance, "the model is removed")
        self._give_up(self.refusal)
        if self._queueing.limits is not None:
            self._queueing.limits.close()
