"""The models that this program serves through another one's server: their workers, and who waits for one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from gpuserve.config.settings.server import ServerSettings
from gpuserve.control.attach import BindModel, UnbindModel, WorkerDown, WorkerUp
from gpuserve.control.reactor import Reactor
from gpuserve.errors import GpuserveError, ModelUnrecoverable, StartupError
from gpuserve.model.spec import RESTART_WORKER, ModelSpec
from gpuserve.supervisor.core.life import InstanceState
from gpuserve.supervisor.core.server_life import SettingsInForce
from gpuserve.supervisor.workers.hang import Hang
from gpuserve.supervisor.workers.load_watch import SlowLoad
from gpuserve.supervisor.workers.worker_group import WorkerGroup
from gpuserve.supervisor.workers.worker_keeper import WorkerCare, WorkerKeeper

if TYPE_CHECKING:
    from gpuserve.supervisor.attach.attachment import Attachment


class BoundModels:
    """Models by name. Owner of their workers: ``kill()`` leaves none. It hears of the workers itself."""

    def __init__(self, reactor: Reactor, models: Sequence[ModelSpec], server: Attachment) -> None:
        self.specs = {spec.name: spec for spec in models}
        self._server = server
        settings = SettingsInForce(ServerSettings())
        self._care = WorkerCare(reactor, self, settings, relay_output=False, lost_gpus={})
        self._groups: dict[str, WorkerGroup] = {}
        self._waiting: dict[str, Future[None]] = {}
        self._bound: set[str] = set()
        self._is_stopping = False

    # ---- from a model to its service ------------------------------------------------------

    def add(self, spec: ModelSpec, served: Future[None]) -> None:
        """Add a model that is to be bound; ``served`` is resolved when the server serves it."""
        self.specs[spec.name] = spec
        self._waiting[spec.name] = served

    def bind(self, *models: str) -> None:
        for model in models:
            spec = self.specs[model]
            self._server.tell(BindModel(spec.to_wire()))
            group = self._groups[model] = WorkerGroup(spec, self._care)
            try:
                group.start()
            except StartupError as error:
                self._server.tell(UnbindModel(model))
                self.give_up(model, error)

    def bound(self, model: str) -> None:
        if model in self.specs:
            self._bound.add(model)
            if (served := self._waiting.pop(model, None)) is not None:
                served.set_result(None)
            self._server.check_started()

    @property
    def are_bound(self) -> bool:
        return self.specs.keys() <= self._bound

    def give_up(self, model: str, failure: GpuserveError) -> None:
        """Drop a model that is not served. One of the start takes all along, as with a server."""
        if model not in self.specs:
            return
        if model not in self._waiting:
            self._server.fail(failure)
        else:
            self.drop(model, failure)

    def drop(self, model: str, failure: GpuserveError) -> None:
        del self.specs[model]
        self._bound.discard(model)
        if (group := self._groups.pop(model, None)) is not None:
            group.discard()
        if (served := self._waiting.pop(model, None)) is not None:
            served.set_exception(failure)
        self._server.check_started()

    def execution_hung(self, model: str, hang: Hang) -> None:
        group = self._groups.get(model)
        for worker in () if group is None else group.all:
            if worker.instance.name == hang.instance:
                worker.hung(hang)

    # ---- ending ---------------------------------------------------------------------------

    def stop(self) -> None:
        self._is_stopping = True
        for group in self._groups.values():
            group.stop()

    def are_stopped(self) -> bool:
        return all(group.is_stopped for group in self._groups.values())

    def kill(self) -> None:
        for group in self._groups.values():
            group.kill()
        for group in self._groups.values():
            group.close()

    def fail_waiting(self, error: BaseException) -> None:
        for served in self._waiting.values():
            if not served.done():
                served.set_exception(error)

    # ---- what the workers tell ------------------------------------------------------------

    def instance_changed(self, worker: WorkerKeeper, phase: str) -> None: ...

    def load_slow(self, worker: WorkerKeeper, slow: SlowLoad) -> None: ...

    def instance_ready(self, worker: WorkerKeeper) -> None:
        live = worker.live()
        assert live is not None
        self._server.tell(WorkerUp(worker.spec.name, *live[:4]), [live.link_fd, live.pidfd])

    def instance_lost(self, worker: WorkerKeeper, reason: str) -> None:
        """Tell the server of a dead worker; a model that was never served is given up."""
        if self._is_stopping:
            self._server.check_stopped()
            return
        model, instance = worker.spec.name, worker.instance.name
        self._server.tell(WorkerDown(model, instance, reason, worker.life.restart_in_s(time.monotonic())))
        if not worker.life.was_ready and worker.life.state is not InstanceState.STOPPED:
            self._server.tell(UnbindModel(model))
            text = f"model {model!r}: instance {instance} could not be started: {reason}"
            self.give_up(model, StartupError(text))

    def instance_unrecoverable(self, worker: WorkerKeeper, text: str) -> None:
        """Start that worker afresh, or end this attachment, as the model wants it. The server goes on."""
        if worker.spec.on_unrecoverable == RESTART_WORKER:
            worker.kill()
        elif not self._is_stopping:
            self._server.fail(ModelUnrecoverable(f"model {worker.spec.name!r} cannot go on: {text}"))

    def instance_imported(self, worker: WorkerKeeper, files: Sequence[str]) -> None:
        """Nothing follows the files of a program."""
