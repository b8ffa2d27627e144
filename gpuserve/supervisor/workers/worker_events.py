"""What is told of instances: from the life of a worker to events."""

from __future__ import annotations

import time
from typing import Any, Final

from gpuserve.journal.event_journal import EventJournal
from gpuserve.journal.kinds import EventKind
from gpuserve.supervisor.core.life import InstanceState
from gpuserve.supervisor.workers.load_watch import SlowLoad
from gpuserve.supervisor.workers.worker_keeper import WorkerKeeper

#: The first phase of a worker that was just started.
_STARTING: Final = "starting"


def tell_changed(events: EventJournal, worker: WorkerKeeper, phase: str) -> None:
    """Tell that an instance is in a new state, or in a new phase of loading."""
    life, process = worker.life, worker.process
    pid = None if process is None else process.pid
    if life.state is InstanceState.LOADING and phase == _STARTING and life.restarts:
        _tell(events, EventKind.INSTANCE_RESTART, worker, pid=pid, restarts=life.restarts)
    _tell(events, EventKind.INSTANCE_STATE, worker, state=life.state.value, phase=phase, pid=pid)


def tell_lost(events: EventJournal, worker: WorkerKeeper, reason: str) -> None:
    """Tell why an instance has no worker any more, unless that was to end."""
    life = worker.life
    if life.state is InstanceState.WAITING:
        again_s = round(life.restart_in_s(time.monotonic()), 3)
        restarts = {"restart_in_s": again_s, "restarts": life.restarts}
        _tell(events, EventKind.INSTANCE_DIED, worker, reason=reason, **restarts)


def tell_slow(events: EventJournal, worker: WorkerKeeper, slow: SlowLoad) -> None:
    """Tell that an instance still loads."""
    loading_s, phase, place = slow
    pid = None if worker.process is None else worker.process.pid
    about = {"loading_s": round(loading_s, 3), "phase": phase, "place": place, "pid": pid}
    _tell(events, EventKind.LOAD_SLOW, worker, **about)


def _tell(events: EventJournal, kind: EventKind, worker: WorkerKeeper, **facts: Any) -> None:
    spec, instance = worker.spec, worker.instance
    about = {"model": spec.name, "instance": instance.name, "device": instance.device}
    events.tell(kind, version=spec.version, **about, **facts)
