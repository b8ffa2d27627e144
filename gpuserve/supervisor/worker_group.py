"""The workers of one model, one for each of its instances. What happens to a worker is told to the
``WorkerEvents``; nothing is decided here.

::

    add ──► coming ──join──► workers ──leave──► leaving ──forget──► gone
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from gpuserve.errors import StartupError
from gpuserve.spec import InstanceSpec, ModelSpec
from gpuserve.supervisor.life import InstanceState
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.worker_keeper import WorkerEvents, WorkerKeeper

#: After its Stop a worker that its model has no use for may take this long to end, then it is killed.
STOP_TIMEOUT_S: Final = 10.0


class WorkerGroup:
    """Owner of the workers: after ``discard()``, or ``kill()`` and ``close()``, none is left.

    ``workers`` are those of the instances that the model has; ``coming`` ones are still being loaded for it,
    and ``leaving`` ones are on their way out.
    """

    def __init__(
        self,
        spec: ModelSpec,
        reactor: Reactor,
        events: WorkerEvents,
        *,
        relay_output: bool,
        load_timeout_s: Callable[[], float],
        generation: int = 0,
        check_start: Callable[[ModelSpec], None] = lambda spec: None,
        why_lost: Callable[[str], str] = lambda uuid: "",
    ) -> None:
        self._spec = spec
        self._check_start = check_start

        def new_worker(instance: InstanceSpec) -> WorkerKeeper:
            return WorkerKeeper(
                spec,
                instance,
                reactor,
                events,
                relay_output=relay_output,
                load_timeout_s=load_timeout_s,
                generation=generation,
                why_lost=why_lost,
            )

        self._new_worker = new_worker
        self.workers = [new_worker(instance) for instance in spec.instances]
        self.coming: list[WorkerKeeper] = []
        self.leaving: list[WorkerKeeper] = []

    def start(self) -> None:
        """Start every worker.

        Raises:
            StartupError: there is no process to be had; those before it are started. Or the model cannot be
                started as it is, or all of its GPUs are lost.
        """
        self._check_start(self._spec)
        lost = [one.why_lost() for one in self.workers]
        if lost and all(lost):
            raise StartupError(lost[0])
        for worker in self.workers:
            worker.start()

    # ---- instances that come and go -------------------------------------------------------

    @property
    def all(self) -> list[WorkerKeeper]:
        """Every worker, whatever it is on its way to."""
        return [*self.workers, *self.coming, *self.leaving]

    def add(self, instances: Iterable[InstanceSpec]) -> list[WorkerKeeper]:
        """Workers for more instances; they are to be started, and join when they are ready."""
        new = [self._new_worker(one) for one in instances]
        self.coming += new
        return new

    def join(self, worker: WorkerKeeper) -> None:
        """One that was coming is one of the model's now."""
        self.coming.remove(worker)
        self.workers.append(worker)

    def leave(self, worker: WorkerKeeper) -> None:
        """One of the model's is on its way out."""
        self.workers.remove(worker)
        self.leaving.append(worker)

    def forget(self, worker: WorkerKeeper) -> None:
        """One that was on its way out has stopped."""
        self.leaving.remove(worker)

    def discard_coming(self) -> None:
        """End and reap every worker that was coming, here and now."""
        coming, self.coming = self.coming, []
        _discard(coming)

    # ---- all of them ----------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """Whether every instance is ready, or all but some whose GPU is lost."""
        states = {one.life.state for one in self.workers}
        return states <= {InstanceState.READY, InstanceState.FENCED} and states != {InstanceState.FENCED}

    def down(self) -> set[str]:
        """The names of the instances that are not ready."""
        return {one.instance.name for one in self.workers if one.life.state is not InstanceState.READY}

    @property
    def is_fenced(self) -> bool:
        """Whether no instance can run, because the GPUs of all of them are lost."""
        return all(one.life.state is InstanceState.FENCED for one in self.workers)

    @property
    def is_stopped(self) -> bool:
        """Whether no worker runs, and none will."""
        return all(one.life.state is InstanceState.STOPPED for one in self.all)

    def stop(self) -> None:
        """Let every worker finish its batch and exit."""
        for worker in self.all:
            worker.stop()

    def kill(self) -> None:
        """End every worker now."""
        for worker in self.all:
            worker.kill()

    def close(self) -> None:
        """Reap workers that were killed, and close all that belongs to them."""
        for worker in self.all:
            worker.close()

    def discard(self) -> None:
        """End and reap every worker, here and now: a second attempt may use the same names at once."""
        _discard(self.all)


def _discard(workers: Iterable[WorkerKeeper]) -> None:
    for worker in workers:
        worker.stop()
        worker.kill()
        worker.close()
