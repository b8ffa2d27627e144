"""The models that an attached program serves, the workers of each, and who waits for them to be loaded.

What happens to a worker is told to the ``WorkerEvents``; nothing is decided here.
"""

from __future__ import annotations

from concurrent.futures import Future

from gpuserve.spec import ModelSpec
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.worker_group import WorkerGroup
from gpuserve.supervisor.worker_keeper import WorkerEvents


class ModelWorkers:
    """Models by name. Owner of their workers: ``kill()`` leaves none."""

    def __init__(self, reactor: Reactor, events: WorkerEvents, *, relay_output: bool) -> None:
        self.specs: dict[str, ModelSpec] = {}
        self._reactor = reactor
        self._events = events
        self._relay_output = relay_output
        self._groups: dict[str, WorkerGroup] = {}
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
        group = self._groups[model] = WorkerGroup(
            self.specs[model],
            self._reactor,
            self._events,
            relay_output=self._relay_output,
            load_timeout_s=lambda: 0.0,
        )
        group.start()

    def all_stopped(self) -> bool:
        """Whether no worker runs, and none will."""
        return all(group.is_stopped for group in self._groups.values())

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
        group = self._groups.pop(model, None)
        if group is not None:
            group.discard()
        loaded = self._waiting.pop(model, None)
        if loaded is not None:
            loaded.set_exception(failure)

    def stop(self) -> None:
        """Let every worker finish its batch and exit."""
        for group in self._groups.values():
            group.stop()

    def kill(self) -> None:
        """Whatever still runs is killed and reaped."""
        for group in self._groups.values():
            group.kill()
        for group in self._groups.values():
            group.close()

    def fail_waiting(self, error: BaseException) -> None:
        """Nobody waits for what will not come."""
        for loaded in self._waiting.values():
            if not loaded.done():
                loaded.set_exception(error)
