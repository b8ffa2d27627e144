"""The models of one program, the workers of each, and who waits for them to be loaded. A server has them,
and so has an attachment to the server of another program.

What happens to a worker is told to the ``WorkerEvents``; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from gpuserve.spec import ModelSpec
from gpuserve.supervisor.life import InstanceState
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.worker_keeper import WorkerEvents, WorkerKeeper


class ModelWorkers:
    """Models by name. Owner of their workers: ``kill()`` leaves none."""

    def __init__(
        self, reactor: Reactor, events: WorkerEvents, *, relay_output: bool, load_timeout_s: float
    ) -> None:
        self.specs: dict[str, ModelSpec] = {}
        self._reactor = reactor
        self._events = events
        self._relay_output = relay_output
        self._load_timeout_s = load_timeout_s
        self._workers: dict[str, list[WorkerKeeper]] = {}
        self._waiting: dict[str, Future[None]] = {}

    def add(self, spec: ModelSpec, loaded: Future[None] | None = None) -> None:
        """A model exists; its workers are not started yet. ``loaded`` is resolved by ``resolve``."""
        self.specs[spec.name] = spec
        if loaded is not None:
            self._waiting[spec.name] = loaded

    def start(self, model: str) -> None:
        """Start the workers of a model.

        Raises:
            StartupError: there is no process to be had.
        """
        spec = self.specs[model]
        workers = self._workers[model] = [
            WorkerKeeper(
                spec,
                instance,
                self._reactor,
                self._events,
                relay_output=self._relay_output,
                load_timeout_s=self._load_timeout_s,
            )
            for instance in spec.instances
        ]
        for worker in workers:
            worker.start()

    def all(self) -> list[WorkerKeeper]:
        """Every worker."""
        return [worker for workers in self._workers.values() for worker in workers]

    def of(self, model: str) -> Sequence[WorkerKeeper]:
        """The workers of a model; none before ``start``."""
        return self._workers.get(model, ())

    def is_loaded(self, model: str) -> bool:
        """Whether every instance of a model is ready."""
        workers = self.of(model)
        return bool(workers) and all(one.life.state is InstanceState.READY for one in workers)

    def all_loaded(self) -> bool:
        """Whether every instance of every model is ready."""
        return all(map(self.is_loaded, self.specs))

    def all_stopped(self) -> bool:
        """Whether no worker runs, and none will."""
        return all(worker.life.state is InstanceState.STOPPED for worker in self.all())

    def is_waited_for(self, model: str) -> bool:
        """Whether somebody waits for it to be loaded."""
        return model in self._waiting

    def resolve(self, model: str) -> None:
        """It is loaded; whoever waits is told."""
        loaded = self._waiting.pop(model, None)
        if loaded is not None:
            loaded.set_result(None)

    def drop(self, model: str, failure: BaseException) -> None:
        """Take a model out; whoever waits for it gets ``failure``."""
        del self.specs[model]
        # Reaped here and now: a second attempt may use the same names at once.
        for worker in self._workers.pop(model, []):
            worker.stop()
            worker.kill()
            worker.close()
        loaded = self._waiting.pop(model, None)
        if loaded is not None:
            loaded.set_exception(failure)

    def stop(self) -> None:
        """Let every worker finish its batch and exit."""
        for worker in self.all():
            worker.stop()

    def kill(self) -> None:
        """Whatever still runs is killed and reaped."""
        for worker in self.all():
            worker.kill()
        for worker in self.all():
            worker.close()

    def fail_waiting(self, error: BaseException) -> None:
        """Nobody waits for what will not come."""
        for loaded in self._waiting.values():
            if not loaded.done():
                loaded.set_exception(error)
