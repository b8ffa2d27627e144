"""The workers of one model, one for each of its instances. What happens to a worker is told to the
``WorkerEvents``; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuserve.errors import StartupError
from gpuserve.spec import ModelSpec
from gpuserve.supervisor.life import InstanceState
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.worker_keeper import WorkerEvents, WorkerKeeper


class WorkerGroup:
    """Owner of the workers: after ``discard()``, or ``kill()`` and ``close()``, none is left."""

    def __init__(
        self,
        spec: ModelSpec,
        reactor: Reactor,
        events: WorkerEvents,
        *,
        relay_output: bool,
        load_timeout_s: float,
        generation: int = 0,
        check_start: Callable[[ModelSpec], None] = lambda spec: None,
        why_lost: Callable[[str], str] = lambda uuid: "",
    ) -> None:
        self._spec = spec
        self._check_start = check_start
        self.workers = [
            WorkerKeeper(
                spec,
                instance,
                reactor,
                events,
                relay_output=relay_output,
                load_timeout_s=load_timeout_s,
                generation=generation,
                why_lost=why_lost,
            )
            for instance in spec.instances
        ]

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

    @property
    def is_loaded(self) -> bool:
        """Whether every instance is ready, or all but some whose GPU is lost."""
        states = {one.life.state for one in self.workers}
        return states <= {InstanceState.READY, InstanceState.FENCED} and states != {InstanceState.FENCED}

    @property
    def is_fenced(self) -> bool:
        """Whether no instance can run, because the GPUs of all of them are lost."""
        return all(one.life.state is InstanceState.FENCED for one in self.workers)

    @property
    def is_stopped(self) -> bool:
        """Whether no worker runs, and none will."""
        return all(one.life.state is InstanceState.STOPPED for one in self.workers)

    def stop(self) -> None:
        """Let every worker finish its batch and exit."""
        for worker in self.workers:
            worker.stop()

    def kill(self) -> None:
        """End every worker now."""
        for worker in self.workers:
            worker.kill()

    def close(self) -> None:
        """Reap workers that were killed, and close all that belongs to them."""
        for worker in self.workers:
            worker.close()

    def discard(self) -> None:
        """End and reap every worker, here and now: a second attempt may use the same names at once."""
        for worker in self.workers:
            worker.stop()
            worker.kill()
            worker.close()
