"""The attachment of this program to the server of another program, and its models (``BoundModels``)."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import AttachError, BindError, GpuserveError, ModelUnrecoverable, StartupError
from gpuserve.core.states import StepTable
from gpuserve.devices.placement import n_processors
from gpuserve.model.placement import n_threads
from gpuserve.model.spec import RESTART_WORKER, InstanceSpec, ModelSpec
from gpuserve.supervisor.control import attach_protocol as attach
from gpuserve.supervisor.control.attach_protocol import (
    AttachConnection,
    BindModel,
    UnbindModel,
    WorkerDown,
    WorkerUp,
)
from gpuserve.supervisor.control.reactor import SEND_TIMEOUT_S, Reactor
from gpuserve.supervisor.processes.lifecycle import InstanceState, LiveSettings
from gpuserve.supervisor.workers.worker_group import STOP_TIMEOUT_S, WorkerGroup
from gpuserve.supervisor.workers.worker_monitor import WorkerContext, WorkerEvents, WorkerMonitor
from gpuserve.supervisor.workers.worker_watchdogs import Hang
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.wire import WireError

logger = logging.getLogger(__name__)

#: Interval between two attempts to connect to a server that is not up yet.
RETRY_S: Final = 0.05


class AttachmentState(enum.Enum):
    """The states of an attachment."""

    CONNECTING = "CONNECTING"
    GREETING = "GREETING"
    ATTACHED = "ATTACHED"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


ATTACHMENT_STEPS: Final = StepTable(
    "an attachment",
    {
        AttachmentState.CONNECTING: {AttachmentState.GREETING, AttachmentState.STOPPED},
        AttachmentState.GREETING: {
            AttachmentState.CONNECTING,
            AttachmentState.ATTACHED,
            AttachmentState.STOPPED,
        },
        AttachmentState.ATTACHED: {AttachmentState.STOPPING, AttachmentState.STOPPED},
        AttachmentState.STOPPING: {AttachmentState.STOPPED},
        AttachmentState.STOPPED: {AttachmentState.CONNECTING},
    },
)


class Attachment:
    """One attachment. ``started`` resolves with the server's addresses once every model is served.
    ``on_replaced`` is called with the name of a model that another program has taken over.
    """

    def __init__(
        self, port: int, models: Sequence[ModelSpec], timeout_s: float, on_replaced: Callable[[str], None]
    ) -> None:
        self.started: Future[dict[str, str]] = Future()
        self.state = AttachmentState.STOPPED
        self._port = port
        self._timeout_s = timeout_s
        self._on_replaced = on_replaced
        self._reactor = Reactor()
        self._models = BoundModels(self._reactor, models, self)
        self._addresses: dict[str, str] = {}
        self._server: AttachConnection | None = None
        self._failure: GpuserveError | None = None
        self._refusal = ""

    # ---- for any thread -------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self.state is AttachmentState.ATTACHED

    def request_stop(self, fast: bool = False, terminated: bool = False) -> None:
        """Withdraw the models and end, after the present batches, or at once with ``fast``."""
        self._reactor.call_soon_threadsafe(self._reactor.stop if fast else self._start_stop)

    def add_model(self, spec: ModelSpec) -> Future[None]:
        """Serve one more model. The future resolves when the server serves it. It fails with ``StartupError``
        if an instance fails to load, and with ``BindError`` if the server refuses the name.
        """
        served: Future[None] = Future()
        if not self._reactor.call_soon_threadsafe(lambda: self._add_model(spec, served)):
            served.set_exception(self._failure or _ended())
        return served

    def remove_model(self, model: str) -> Future[None]:
        """Withdraw a model. The future resolves when the server is notified and the workers have ended."""
        removed: Future[None] = Future()
        if not self._reactor.call_soon_threadsafe(lambda: self._remove_model(model, removed)):
            removed.set_exception(self._failure or _ended())
        return removed

    # ---- the run of an attachment ---------------------------------------------------------

    def run(self) -> None:
        """Run until stopped; raise AttachError, BindError, StartupError or ModelUnrecoverable."""
        end: BaseException = _ended()
        try:
            self._serve()
            if self._failure is not None:
                raise self._failure
        except BaseException as error:
            end = error
            raise
        finally:
            if not self.started.done():
                self.started.set_exception(end)
            self._models.fail_waiting(end)

    def _serve(self) -> None:
        try:
            self._move(AttachmentState.CONNECTING)
            self._reactor.call_later(self._timeout_s, self._on_timeout)
            self._connect()
            self._reactor.run()
        finally:
            self._disconnect()
            self._models.kill()
            self._move(AttachmentState.STOPPED)
            self._reactor.close()

    # ---- the connection -------------------------------------------------------------------

    def _connect(self) -> None:
        if self.state is not AttachmentState.CONNECTING:
            return
        try:
            sock = attach.connect(self._port)
        except OSError as error:
            self._refusal = str(error) if isinstance(error, PermissionError) else ""
            self._reactor.call_later(RETRY_S, self._connect)  # the server may still start
            return
        self._move(AttachmentState.GREETING)
        on_message, on_lost = self.on_message, self.on_lost
        self._server = AttachConnection(sock, self._reactor, on_message, on_lost, SEND_TIMEOUT_S)
        self._server.open()
        self.send(attach.Hello(attach.PROTOCOL, wire.PROTOCOL))

    def _on_timeout(self) -> None:
        if self.state in {AttachmentState.CONNECTING, AttachmentState.GREETING}:
            problem = f"no server to attach to at port {self._port} of this machine in {self._timeout_s:g} s"
            advice = (
                "check that it runs, as the same user and not in another container, that this is its HTTP or "
                "gRPC port, and that its setting 'attachable' is on"
            )
            self.fail(AttachError(f"{problem}: {self._refusal or advice}"))

    # ---- messages of the server -----------------------------------------------------------

    def on_message(self, message: Any, fds: list[int]) -> None:
        match message:
            case attach.Ended(str(reason)):
                self.fail(AttachError(f"the server at port {self._port} ended the attachment: {reason}"))
            case attach.Welcome(str(), dict(addresses)) if self.state is AttachmentState.GREETING:
                self._move(AttachmentState.ATTACHED)
                self._addresses = addresses
                self._models.bind(*self._models.specs)
                self.check_started()
            case attach.Bound(str(model)) if self.is_connected:
                self._models.bound(model)
            case attach.BindRefused(str(model), str(text)) if self.is_connected:
                self._models.reject(model, BindError(text))
            case attach.WorkerHung(str(model), str(), int(), float(), float()) if self.is_connected:
                self._models.execution_hung(model, Hang(*message[1:]))
            case attach.Replaced(str(model)) if self.is_connected:
                if model in self._models.specs:
                    text = "another program serves model %s now; it is not bound here any more"
                    logger.warning(text, model)
                    # First, so that whoever sees the workers end can bind the model again.
                    self._on_replaced(model)
                    self._models.drop(model, BindError(f"another program serves model {model!r} now"))
            case other:
                raise WireError(f"{type(other).__name__} in state {self.state.name}")

    def on_lost(self, reason: str) -> None:
        self._server = None
        if self.state is AttachmentState.GREETING:  # the server was about to end; another may follow
            self._move(AttachmentState.CONNECTING)
            self._reactor.call_later(RETRY_S, self._connect)
            return
        self.fail(AttachError(f"the server at port {self._port} is gone: {reason}"))

    # ---- binding --------------------------------------------------------------------------

    def _add_model(self, spec: ModelSpec, served: Future[None]) -> None:
        if self.state in {AttachmentState.STOPPING, AttachmentState.STOPPED}:
            served.set_exception(self._failure or _ended())
            return
        self._models.add(spec, served)
        if self.state is AttachmentState.ATTACHED:
            self._models.bind(spec.name)

    def _remove_model(self, model: str, removed: Future[None]) -> None:
        if self.state in {AttachmentState.STOPPING, AttachmentState.STOPPED}:
            removed.set_exception(self._failure or _ended())
            return
        self.send(attach.UnbindModel(model))
        if model in self._models.specs:
            self._models.drop(model, BindError(f"model {model!r} is not bound any more"))
        removed.set_result(None)

    def check_started(self) -> None:
        if not self.started.done() and self._models.specs.keys() <= self._models.bound_names:
            self.started.set_result(self._addresses)

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message to the server, if it is connected. The caller keeps the descriptors."""
        if self._server is not None:
            self._server.send(message, fds)

    # ---- end ------------------------------------------------------------------------------

    def fail(self, failure: GpuserveError) -> None:
        """End with an error. The workers are killed, because nobody waits for their results."""
        self._failure = self._failure or failure
        self._reactor.stop()

    def _start_stop(self) -> None:
        if self.state is not AttachmentState.ATTACHED:
            self._reactor.stop()
            return
        for model in self._models.specs:
            self.send(attach.UnbindModel(model))
        self._move(AttachmentState.STOPPING)
        self._disconnect()
        self._models.stop()
        self._reactor.call_later(STOP_TIMEOUT_S, self._reactor.stop)
        self.check_stopped()

    def check_stopped(self) -> None:
        if all(group.is_stopped for group in self._models.groups.values()):
            self._reactor.stop()

    def _disconnect(self) -> None:
        """Close the connection before the workers end, so that the server does not use them any more."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _move(self, state: AttachmentState) -> None:
        self.state = ATTACHMENT_STEPS.step(self.state, state)


def _ended() -> AttachError:
    return AttachError("the attachment to the server has ended")


class BoundModels(WorkerEvents):
    """The models of an attachment by name. Owner of their workers: after ``kill()`` none is left."""

    def __init__(self, reactor: Reactor, models: Sequence[ModelSpec], server: Attachment) -> None:
        self.specs = {spec.name: spec for spec in models}
        self._server = server
        settings = LiveSettings(ServerSettings())

        def threads_of(instance: InstanceSpec) -> int:  # the program does not know the server's own instances
            instances = [one for spec in self.specs.values() for one in spec.instances]
            return n_threads(instance, instances, n_processors())

        self._context = WorkerContext(reactor, self, threads_of, settings, relay_output=False, lost_gpus={})
        self.groups: dict[str, WorkerGroup] = {}
        self._waiting: dict[str, Future[None]] = {}
        self.bound_names: set[str] = set()
        self._is_stopping = False

    # ---- models ---------------------------------------------------------------------------

    def add(self, spec: ModelSpec, served: Future[None]) -> None:
        self.specs[spec.name] = spec
        self._waiting[spec.name] = served

    def bind(self, *models: str) -> None:
        for model in models:
            spec = self.specs[model]
            self._server.send(BindModel(spec.to_wire()))
            group = self.groups[model] = WorkerGroup(spec, self._context)
            try:
                group.start()
            except StartupError as error:
                self._server.send(UnbindModel(model))
                self.reject(model, error)

    def bound(self, model: str) -> None:
        if model in self.specs:
            self.bound_names.add(model)
            if (served := self._waiting.pop(model, None)) is not None:
                served.set_result(None)
            self._server.check_started()

    def reject(self, model: str, failure: GpuserveError) -> None:
        """Drop a model that cannot be served. A model of the start ends the attachment."""
        if model not in self.specs:
            return
        if model not in self._waiting:
            self._server.fail(failure)
        else:
            self.drop(model, failure)

    def drop(self, model: str, failure: GpuserveError) -> None:
        del self.specs[model]
        self.bound_names.discard(model)
        if (group := self.groups.pop(model, None)) is not None:
            group.discard()
        if (served := self._waiting.pop(model, None)) is not None:
            served.set_exception(failure)
        self._server.check_started()

    def execution_hung(self, model: str, hang: Hang) -> None:
        group = self.groups.get(model)
        for worker in () if group is None else group.all:
            if worker.instance.name == hang.instance:
                worker.report_hang(hang)

    # ---- end ------------------------------------------------------------------------------

    def stop(self) -> None:
        self._is_stopping = True
        for group in self.groups.values():
            group.stop()

    def kill(self) -> None:
        for group in self.groups.values():
            group.kill()
        for group in self.groups.values():
            group.close()

    def fail_waiting(self, error: BaseException) -> None:
        for served in self._waiting.values():
            if not served.done():
                served.set_exception(error)

    # ---- events of workers ----------------------------------------------------------------

    def instance_ready(self, worker: WorkerMonitor) -> None:
        live = worker.live_instance()
        assert live is not None
        self._server.send(WorkerUp(worker.spec.name, *live[:4]), [live.link_fd, live.pidfd])

    def instance_lost(self, worker: WorkerMonitor, reason: str) -> None:
        """Notify the server of a dead worker, and drop the model if it was never served."""
        if self._is_stopping:
            self._server.check_stopped()
            return
        model, instance = worker.spec.name, worker.instance.name
        restart_in_s = worker.lifecycle.restart_in_s(time.monotonic())
        self._server.send(WorkerDown(model, instance, reason, restart_in_s))
        if not worker.lifecycle.was_ready and worker.lifecycle.state is not InstanceState.STOPPED:
            self._server.send(UnbindModel(model))
            text = f"model {model!r}: instance {instance} could not be started: {reason}"
            self.reject(model, StartupError(text))

    def instance_unrecoverable(self, worker: WorkerMonitor, text: str) -> None:
        """Restart the worker, or end this attachment, by the policy of the model. The server goes on."""
        if worker.spec.on_unrecoverable == RESTART_WORKER:
            worker.kill()
        elif not self._is_stopping:
            self._server.fail(ModelUnrecoverable(f"model {worker.spec.name!r} cannot go on: {text}"))
