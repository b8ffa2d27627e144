"""This program's side of an attachment to the server of another one: it keeps the workers of its models, as
a supervisor would, and hands their links to the server.

``run()`` is its life: find the server, bind the models, then keep them alive until it is told to stop or the
server is gone. There is no second attempt: who wants one runs it again.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from gpuserve.errors import AttachError, BindError, GpuserveError, ModelUnrecoverable, StartupError
from gpuserve.spec import RESTART_WORKER, ModelSpec
from gpuserve.supervisor import attach_messages, attach_socket
from gpuserve.supervisor.attach_address import may_attach
from gpuserve.supervisor.attach_messages import InstanceDown, InstanceUp
from gpuserve.supervisor.attach_socket import AttachEnd
from gpuserve.supervisor.channel import SEND_TIMEOUT_S
from gpuserve.supervisor.life import InstanceState
from gpuserve.supervisor.model_workers import ModelWorkers
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.worker_keeper import WorkerKeeper
from gpuserve_worker import wire
from gpuserve_worker.wire import WireError

logger = logging.getLogger(__name__)

#: How often a server that is not there yet is looked for.
RETRY_S: Final = 0.05
#: After its Stop a worker may finish its batch this long, then it is killed.
WORKER_STOP_TIMEOUT_S: Final = 10.0


class AttachmentState(enum.Enum):
    """Where an attachment stands."""

    LOOKING = "LOOKING"
    GREETING = "GREETING"
    ATTACHED = "ATTACHED"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


TRANSITIONS: Final[dict[AttachmentState, frozenset[AttachmentState]]] = {
    AttachmentState.LOOKING: frozenset({AttachmentState.GREETING, AttachmentState.STOPPED}),
    AttachmentState.GREETING: frozenset(
        {AttachmentState.LOOKING, AttachmentState.ATTACHED, AttachmentState.STOPPED}
    ),
    AttachmentState.ATTACHED: frozenset({AttachmentState.STOPPING, AttachmentState.STOPPED}),
    AttachmentState.STOPPING: frozenset({AttachmentState.STOPPED}),
    AttachmentState.STOPPED: frozenset({AttachmentState.LOOKING}),
}


class Attachment:
    """One attachment. ``started`` resolves with the server's addresses once every model is served.

    ``on_replaced`` is told the name of a model that another program has taken over.
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
        self._models = ModelWorkers(self._reactor, self, relay_output=False)
        for spec in models:
            self._models.add(spec)
        self._bound: set[str] = set()
        self._addresses: dict[str, str] = {}
        self._server: AttachEnd | None = None
        self._failure: GpuserveError | None = None

    # ---- from any thread ------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether the server has taken this program, and both go on."""
        return self.state is AttachmentState.ATTACHED

    def request_stop(self, fast: bool = False) -> None:
        """Let the models go and end; the batches at hand are finished first, unless ``fast``."""
        self._reactor.call_soon_threadsafe(self._end_now if fast else self._begin_stop)

    def add_model(self, spec: ModelSpec) -> Future[None]:
        """Serve one more model; the future resolves when the server does.

        It fails with ``StartupError`` when an instance cannot load, and with ``BindError`` when the server
        refuses the name.
        """
        served: Future[None] = Future()
        if not self._reactor.call_soon_threadsafe(lambda: self._add_model(spec, served)):
            served.set_exception(self._failure or _ended())
        return served

    # ---- the life of an attachment --------------------------------------------------------

    def run(self) -> None:
        """Live until stopped, in the calling thread.

        Raises:
            AttachError: the server is not there, does not take this program, or has ended.
            BindError, StartupError: a model of the start is refused, or could not be loaded.
            ModelUnrecoverable: a callable said that it cannot go on.
        """
        try:
            self._live()
            if self._failure is not None:
                raise self._failure
        except BaseException as error:
            self._tell_waiting(error)
            raise
        self._tell_waiting(_ended())

    def _live(self) -> None:
        try:
            self._move(AttachmentState.LOOKING)
            self._reactor.call_later(self._timeout_s, self._on_timeout)
            self._look()
            self._reactor.run()
        finally:
            self._leave()
            self._models.kill()
            self._move(AttachmentState.STOPPED)
            self._reactor.close()

    def _tell_waiting(self, error: BaseException) -> None:
        if not self.started.done():
            self.started.set_exception(error)
        self._models.fail_waiting(error)

    # ---- finding the server ---------------------------------------------------------------

    def _look(self) -> None:
        if self.state is not AttachmentState.LOOKING:
            return
        try:
            sock = attach_socket.connect(self._port)
        except OSError:
            self._reactor.call_later(RETRY_S, self._look)
            return
        self._move(AttachmentState.GREETING)
        self._server = AttachEnd(sock, self._reactor, self._heard, self._lost, send_timeout_s=SEND_TIMEOUT_S)
        self._server.open()
        if not may_attach(os.geteuid(), self._server.peer.uid):
            self._fail(AttachError(f"what answers for port {self._port} belongs to another user"))
            return
        self._tell(attach_messages.Hello(attach_messages.PROTOCOL, wire.PROTOCOL))

    def _on_timeout(self) -> None:
        if self.state in {AttachmentState.LOOKING, AttachmentState.GREETING}:
            looked = f"no server to attach to at port {self._port} of this machine in {self._timeout_s:g} s"
            self._fail(
                AttachError(
                    f"{looked}: check that it runs, as the same user and not in another container, that this "
                    "is its HTTP or gRPC port, and that its setting 'attachable' is on"
                )
            )

    # ---- what the server says -------------------------------------------------------------

    def _heard(self, message: Any, fds: list[int]) -> None:
        """Obey a message.

        Raises:
            WireError: it is not one that a server sends, or not now.
        """
        match message:
            case attach_messages.Ended(str(reason)):
                self._fail(AttachError(f"the server at port {self._port} has let this program go: {reason}"))
            case attach_messages.Welcome(str(), dict(addresses)) if self.state is AttachmentState.GREETING:
                self._welcome(addresses)
            case attach_messages.Bound(str(model)) if self.is_connected:
                self._on_bound(model)
            case attach_messages.Refused(str(model), str(text)) if self.is_connected:
                self._give_up(model, BindError(text))
            case attach_messages.Replaced(str(model)) if self.is_connected:
                self._on_taken_over(model)
            case other:
                raise WireError(f"{type(other).__name__} in state {self.state.name}")

    def _lost(self, reason: str) -> None:
        self._server = None
        if self.state is AttachmentState.GREETING:  # it was just about to end
            self._move(AttachmentState.LOOKING)
            self._reactor.call_later(RETRY_S, self._look)
            return
        self._fail(AttachError(f"the server at port {self._port} is gone: {reason}"))

    def _welcome(self, addresses: dict[str, str]) -> None:
        self._move(AttachmentState.ATTACHED)
        self._addresses = addresses
        for model in list(self._models.specs):
            self._bind(model)
        self._check_started()

    def _on_bound(self, model: str) -> None:
        if model in self._models.specs:
            self._bound.add(model)
            self._models.resolve(model)
            self._check_started()

    def _on_taken_over(self, model: str) -> None:
        if model not in self._models.specs:
            return
        logger.warning("another program serves model %s now; it is not bound here any more", model)
        self._bound.discard(model)
        self._on_replaced(model)  # who sees the workers go may bind it again
        self._models.drop(model, BindError(f"another program serves model {model!r} now"))
        self._check_started()

    # ---- what the workers tell ------------------------------------------------------------

    def instance_changed(self, worker: WorkerKeeper, phase: str) -> None:
        """Nobody watches."""

    def instance_ready(self, worker: WorkerKeeper) -> None:
        """The server is given its link."""
        live = worker.live()
        assert live is not None
        up = InstanceUp(live.model, live.name, live.pid, live.slots, live.load_s)
        self._tell(up, [live.link_fd, live.pidfd])

    def instance_lost(self, worker: WorkerKeeper, reason: str) -> None:
        """The server is told; a model that was never served is given up."""
        if self.state is AttachmentState.STOPPING:
            self._check_workers_stopped()
            return
        model, instance = worker.spec.name, worker.instance.name
        self._tell(InstanceDown(model, instance, reason, worker.restart_in_s()))
        if not worker.life.was_ready and worker.life.state is not InstanceState.STOPPED:
            self._tell(attach_messages.UnbindModel(model))
            self._give_up(
                model,
                StartupError(f"model {model!r}: instance {instance} could not be started: {reason}"),
            )

    def instance_unrecoverable(self, worker: WorkerKeeper, text: str) -> None:
        """That worker starts afresh, or this attachment ends, as the model wants it. The server goes on."""
        if worker.spec.on_unrecoverable == RESTART_WORKER:
            worker.kill()
        elif self.state is AttachmentState.ATTACHED:
            self._fail(ModelUnrecoverable(f"model {worker.spec.name!r} cannot go on: {text}"))

    # ---- binding --------------------------------------------------------------------------

    def _add_model(self, spec: ModelSpec, served: Future[None]) -> None:
        if self.state in {AttachmentState.STOPPING, AttachmentState.STOPPED}:
            served.set_exception(self._failure or _ended())
            return
        self._models.add(spec, served)
        if self.state is AttachmentState.ATTACHED:
            self._bind(spec.name)

    def _bind(self, model: str) -> None:
        self._tell(attach_messages.BindModel(self._models.specs[model].to_wire()))
        try:
            self._models.start(model)
        except StartupError as error:
            self._tell(attach_messages.UnbindModel(model))
            self._give_up(model, error)

    def _give_up(self, model: str, failure: GpuserveError) -> None:
        """A model is not served. One of the start takes all along, as with a server."""
        if model not in self._models.specs:
            return
        if not self._models.is_waited_for(model):
            self._fail(failure)
            return
        self._models.drop(model, failure)
        self._check_started()

    def _check_started(self) -> None:
        if not self.started.done() and self._models.specs.keys() <= self._bound:
            self.started.set_result(self._addresses)

    def _tell(self, message: Any, fds: Sequence[int] = ()) -> None:
        if self._server is not None:
            self._server.send(message, fds)

    # ---- ending ---------------------------------------------------------------------------

    def _fail(self, failure: GpuserveError) -> None:
        """Nobody waits for what the workers still run: they are killed."""
        self._failure = self._failure or failure
        self._end_now()

    def _begin_stop(self) -> None:
        if self.state is not AttachmentState.ATTACHED:
            self._end_now()
            return
        for model in self._models.specs:
            self._tell(attach_messages.UnbindModel(model))
        self._move(AttachmentState.STOPPING)
        self._leave()
        self._models.stop()
        self._reactor.call_later(WORKER_STOP_TIMEOUT_S, self._end_now)
        self._check_workers_stopped()

    def _check_workers_stopped(self) -> None:
        if self._models.all_stopped():
            self._end_now()

    def _end_now(self) -> None:
        self._reactor.stop()

    def _leave(self) -> None:
        """The server hears of the end before the workers do."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _move(self, state: AttachmentState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"an attachment cannot go from {self.state.name} to {state.name}")
        self.state = state


def _ended() -> AttachError:
    return AttachError("the attachment to the server has ended")
