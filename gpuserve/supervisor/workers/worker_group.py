"""The workers of one model, one for each of its instances. What happens to a worker is told to the
``WorkerEvents``; nothing is decided here.

::

    add ──► coming ──join──► workers ──leave──► leaving ──forget──► gone
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gpuserve.errors import StartupError
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve.supervisor.core.life import InstanceState
from gpuserve.supervisor.workers.worker_keeper import WorkerCare, WorkerKeeper

#: After its Stop a worker that its model has no use for may take this long to end, then it is killed.
STOP_TIMEOUT_S: Final = 10.0
#: In place of that where it runs something that was given up: nobody waits for the answer.
HURRIED_STOP_TIMEOUT_S: Final = 1.0


def stop_timeout_s(*, hurried: bool) -> float:
    return HURRIED_STOP_TIMEOUT_S if hurried else STOP_TIMEOUT_S


class WorkerGroup:
    """Owner of the workers: after ``discard()``, or ``kill()`` and ``close()``, none is left. ``workers`` are
    those of the instances that the model has; ``coming`` ones are still being loaded for it, and ``leaving``
    ones are on their way out.
    """

    def __init__(self, spec: ModelSpec, care: WorkerCare, generation: int = 0) -> None:
        self._spec = spec
        self._care = care
        self._generation = generation
        self.workers = self._new(spec.instances)
        self.coming: list[WorkerKeeper] = []
        self.leaving: list[WorkerKeeper] = []

    def _new(self, instances: Iterable[InstanceSpec]) -> list[WorkerKeeper]:
        return [WorkerKeeper(self._spec, one, self._care, self._generation) for one in instances]

    def start(self) -> None:
        """Start every worker; ``StartupError`` where one cannot be started, or all GPUs are lost."""
        lost = [one.why_lost() for one in self.workers]
        if lost and all(lost):
            raise StartupError(lost[0])
        for worker in self.workers:
            worker.start()

    # ---- instances that come and go -------------------------------------------------------

    @property
    def all(self) -> list[WorkerKeeper]:
        return [*self.workers, *self.coming, *self.leaving]

    def add(self, instances: Iterable[InstanceSpec]) -> None:
        """Make workers for more instances; they are to be started, and join when they are ready."""
        self.coming += self._new(instances)

    def join(self, worker: WorkerKeeper) -> None:
        self.coming.remove(worker)
        self.workers.append(worker)

    def leave(self, worker: WorkerKeeper) -> None:
        self.workers.remove(worker)
        self.leaving.append(worker)

    def forget(self, worker: WorkerKeeper) -> None:
        self.leaving.remove(worker)

    def discard_coming(self) -> None:
        """End and reap every worker that was coming, here and now."""
        coming, self.coming = self.coming, []
        for worker in coming:
            worker.discard()

    # ---- all of them ----------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """Whether every instance is ready, or all but some whose GPU is lost."""
        states = {one.life.state for one in self.workers}
        return states <= {InstanceState.READY, InstanceState.FENCED} and states != {InstanceState.FENCED}

    def down(self) -> set[str]:
        return {one.instance.name for one in self.workers if one.life.state is not InstanceState.READY}

    @property
    def is_fenced(self) -> bool:
        """Whether no instance can run, because the GPUs of all of them are lost."""
        return all(one.life.state is InstanceState.FENCED for one in self.workers)

    @property
    def is_stopped(self) -> bool:
        return all(one.life.state is InstanceState.STOPPED for one in self.all)

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
        """End and reap every worker, here and now: a second attempt may use the same names at once."""
        for worker in self.all:
            worker.discard()
