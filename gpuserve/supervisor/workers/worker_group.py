"""The workers of one model, and the events about them. In a ``WorkerGroup``::

add ──► coming ──join──► workers ──leave──► leaving ──forget──► gone
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final

from gpuserve.core.errors import StartupError
from gpuserve.core.event_log import EventKind, EventLog
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve.supervisor.processes.lifecycle import InstanceState
from gpuserve.supervisor.workers.worker_monitor import STARTING, WorkerContext, WorkerMonitor
from gpuserve.supervisor.workers.worker_watchdogs import SlowLoad

#: Time between ``Stop`` and the kill of a worker that its model does not need any more.
STOP_TIMEOUT_S: Final = 10.0
#: The same for a worker that runs an aborted request: nobody waits for the answer.
HURRIED_STOP_TIMEOUT_S: Final = 1.0


def stop_timeout_s(*, hurried: bool) -> float:
    return HURRIED_STOP_TIMEOUT_S if hurried else STOP_TIMEOUT_S


class WorkerGroup:
    """The monitors of one model's instances. Owner of the workers: after ``discard()``, or ``kill()`` and
    ``close()``, none is left. ``coming`` workers still load; ``leaving`` workers are being retired.
    """

    def __init__(self, spec: ModelSpec, context: WorkerContext, generation: int = 0) -> None:
        self._spec = spec
        self._context = context
        self._generation = generation
        self.workers = self._new(spec.instances)
        self.coming: list[WorkerMonitor] = []
        self.leaving: list[WorkerMonitor] = []

    def _new(self, instances: Iterable[InstanceSpec]) -> list[WorkerMonitor]:
        return [WorkerMonitor(self._spec, one, self._context, self._generation) for one in instances]

    def start(self) -> None:
        """Start every worker. Raise ``StartupError`` if one cannot be started, or if all GPUs are lost."""
        lost = [one.lost_gpu_reason() for one in self.workers]
        if lost and all(lost):
            raise StartupError(lost[0])
        for worker in self.workers:
            worker.start()

    def start_or_retry(self) -> None:
        """Start every worker; those that cannot be started now are started later."""
        for worker in self.workers:
            worker.start_or_retry()

    @property
    def can_sleep(self) -> bool:
        return all(one.can_sleep for one in self.workers)

    def renew(self, spec: ModelSpec) -> None:
        """Replace the workers, which have all ended or were never started, by new ones of a spec."""
        self._spec = spec
        self.workers = self._new(spec.instances)

    # ---- resizes --------------------------------------------------------------------------

    @property
    def all(self) -> list[WorkerMonitor]:
        return [*self.workers, *self.coming, *self.leaving]

    def add(self, instances: Iterable[InstanceSpec]) -> None:
        """Add workers for more instances. The caller starts them, and they join when they are ready."""
        self.coming += self._new(instances)

    def join(self, worker: WorkerMonitor) -> None:
        self.coming.remove(worker)
        self.workers.append(worker)

    def leave(self, worker: WorkerMonitor) -> None:
        self.workers.remove(worker)
        self.leaving.append(worker)

    def forget(self, worker: WorkerMonitor) -> None:
        self.leaving.remove(worker)

    def discard_coming(self) -> None:
        """Kill and reap every coming worker at once."""
        coming, self.coming = self.coming, []
        for worker in coming:
            worker.discard()

    # ---- all workers ----------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """True if every instance is ready, or fenced beside others that are ready."""
        states = {one.lifecycle.state for one in self.workers}
        return states <= {InstanceState.READY, InstanceState.FENCED} and states != {InstanceState.FENCED}

    def down(self) -> set[str]:
        return {one.instance.name for one in self.workers if one.lifecycle.state is not InstanceState.READY}

    @property
    def is_fenced(self) -> bool:
        """True if no instance can run, because their GPUs are lost."""
        return all(one.lifecycle.state is InstanceState.FENCED for one in self.workers)

    @property
    def is_stopped(self) -> bool:
        return all(one.lifecycle.state is InstanceState.STOPPED for one in self.all)

    def stop(self) -> None:
        for worker in self.all:
            worker.stop()

    def kill(self) -> None:
        for worker in self.all:
            worker.kill()

    def close(self) -> None:
        for worker in self.all:
            worker.close()

    def discard(self) -> None:
        """Kill and reap every worker at once."""
        for worker in self.all:
            worker.discard()


def record_instance_state(events: EventLog, worker: WorkerMonitor, phase: str) -> None:
    """Record the state of an instance, or its phase of loading."""
    lifecycle, process = worker.lifecycle, worker.process
    pid = None if process is None else process.pid
    if lifecycle.state is InstanceState.LOADING and phase == STARTING and lifecycle.restarts:
        _record(events, EventKind.INSTANCE_RESTART, worker, pid=pid, restarts=lifecycle.restarts)
    _record(events, EventKind.INSTANCE_STATE, worker, state=lifecycle.state.value, phase=phase, pid=pid)


def record_instance_death(events: EventLog, worker: WorkerMonitor, reason: str) -> None:
    """Record the death of a worker, unless the worker was stopped on purpose."""
    if worker.lifecycle.state is InstanceState.WAITING:
        restart_in_s = round(worker.lifecycle.restart_in_s(time.monotonic()), 3)
        restarts = {"restart_in_s": restart_in_s, "restarts": worker.lifecycle.restarts}
        _record(events, EventKind.INSTANCE_DIED, worker, reason=reason, **restarts)


def record_slow_load(events: EventLog, worker: WorkerMonitor, slow: SlowLoad) -> None:
    """Record that an instance still loads."""
    loading_s, phase, place = slow
    pid = None if worker.process is None else worker.process.pid
    facts = {"loading_s": round(loading_s, 3), "phase": phase, "place": place, "pid": pid}
    _record(events, EventKind.LOAD_SLOW, worker, **facts)


def _record(events: EventLog, kind: EventKind, worker: WorkerMonitor, **facts: Any) -> None:
    spec, instance = worker.spec, worker.instance
    about = {"model": spec.name, "instance": instance.name, "device": instance.device}
    events.record(kind, version=spec.version, **about, **facts)
