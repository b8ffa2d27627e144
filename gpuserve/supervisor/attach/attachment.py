"""This program's side of an attachment to the server of another one. Its models and their workers are in
``bound_models.py``. ``run()`` is its life: find the server, bind the models, then keep them alive until it is
told to stop or the server is gone. There is no second attempt: who wants one runs it again.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from gpuserve.control import attach
from gpuserve.control.attach import AttachEnd
from gpuserve.control.channel import SEND_TIMEOUT_S
from gpuserve.control.reactor import Reactor
from gpuserve.errors import AttachError, BindError, GpuserveError
from gpuserve.model.spec import ModelSpec
from gpuserve.states import StepTable
from gpuserve.supervisor.attach.bound_models import BoundModels
from gpuserve.supervisor.workers.hang import Hang
from gpuserve.supervisor.workers.worker_group import STOP_TIMEOUT_S
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.wire import WireError

logger = logging.getLogger(__name__)

#: How often a server that is not there yet is looked for.
RETRY_S: Final = 0.05


class AttachmentState(enum.Enum):
    """Where an attachment stands."""

    LOOKING = "LOOKING"
    GREETING = "GREETING"
    ATTACHED = "ATTACHED"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


STEPS: Final = StepTable(
    "an attachment",
    {
        AttachmentState.LOOKING: {AttachmentState.GREETING, AttachmentState.STOPPED},
        AttachmentState.GREETING: {
            AttachmentState.LOOKING,
            AttachmentState.ATTACHED,
            AttachmentState.STOPPED,
        },
        AttachmentState.ATTACHED: {AttachmentState.STOPPING, AttachmentState.STOPPED},
        AttachmentState.STOPPING: {AttachmentState.STOPPED},
        AttachmentState.STOPPED: {AttachmentState.LOOKING},
    },
)


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
        self._models = BoundModels(self._reactor, models, self)
        self._addresses: dict[str, str] = {}
        self._server: AttachEnd | None = None
        self._failure: GpuserveError | None = None
        self._refusal = ""

    # ---- from any thread ------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self.state is AttachmentState.ATTACHED

    def request_stop(self, fast: bool = False, terminated: bool = False) -> None:
        """Let the models go and end; the batches at hand are finished first, unless ``fast``."""
        self._reactor.call_soon_threadsafe(self._reactor.stop if fast else self._begin_stop)

    def add_model(self, spec: ModelSpec) -> Future[None]:
        """Serve one more model; the future resolves when the server does. It fails with ``StartupError`` when
        an instance cannot load, and with ``BindError`` when the server refuses the name.
        """
        served: Future[None] = Future()
        if not self._reactor.call_soon_threadsafe(lambda: self._add_model(spec, served)):
            served.set_exception(self._failure or _ended())
        return served

    def remove_model(self, model: str) -> Future[None]:
        """Have the server serve a model no more; the future resolves when it is told and the workers end."""
        gone: Future[None] = Future()
        if not self._reactor.call_soon_threadsafe(lambda: self._remove_model(model, gone)):
            gone.set_exception(self._failure or _ended())
        return gone

    # ---- the life of an attachment --------------------------------------------------------

    def run(self) -> None:
        """Live until stopped, in the calling thread. Raises AttachError: the server is not there, does not
        take this program, or has ended; BindError, StartupError: a model of the start is refused, or could
        not be loaded; ModelUnrecoverable: a callable said that it cannot go on.
        """
        end: BaseException = _ended()
        try:
            self._live()
            if self._failure is not None:
                raise self._failure
        except BaseException as error:
            end = error
            raise
        finally:
            if not self.started.done():
                self.started.set_exception(end)
            self._models.fail_waiting(end)

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

    # ---- finding the server ---------------------------------------------------------------

    def _look(self) -> None:
        if self.state is not AttachmentState.LOOKING:
            return
        try:
            sock = attach.connect(self._port)
        except OSError as error:
            self._refusal = str(error) if isinstance(error, PermissionError) else ""
            self._reactor.call_later(RETRY_S, self._look)  # the server may come, at its file
            return
        self._move(AttachmentState.GREETING)
        self._server = AttachEnd(sock, self._reactor, self, send_timeout_s=SEND_TIMEOUT_S)
        self._server.open()
        self.tell(attach.Hello(attach.PROTOCOL, wire.PROTOCOL))

    def _on_timeout(self) -> None:
        if self.state in {AttachmentState.LOOKING, AttachmentState.GREETING}:
            looked = f"no server to attach to at port {self._port} of this machine in {self._timeout_s:g} s"
            advice = (
                "check that it runs, as the same user and not in another container, that this is its HTTP or "
                "gRPC port, and that its setting 'attachable' is on"
            )
            self.fail(AttachError(f"{looked}: {self._refusal or advice}"))

    # ---- what the server says -------------------------------------------------------------

    def heard(self, message: Any, fds: list[int]) -> None:
        match message:
            case attach.Ended(str(reason)):
                self.fail(AttachError(f"the server at port {self._port} has let this program go: {reason}"))
            case attach.Welcome(str(), dict(addresses)) if self.state is AttachmentState.GREETING:
                self._welcome(addresses)
            case attach.Bound(str(model)) if self.is_connected:
                self._models.bound(model)
            case attach.BindRefused(str(model), str(text)) if self.is_connected:
                self._models.give_up(model, BindError(text))
            case attach.WorkerHung(str(model), str(), int(), float(), float()) if self.is_connected:
                self._models.execution_hung(model, Hang(*message[1:]))
            case attach.Replaced(str(model)) if self.is_connected:
                self._on_taken_over(model)
            case other:
                raise WireError(f"{type(other).__name__} in state {self.state.name}")

    def lost(self, reason: str) -> None:
        self._server = None
        if self.state is AttachmentState.GREETING:  # it was just about to end
            self._move(AttachmentState.LOOKING)
            self._reactor.call_later(RETRY_S, self._look)
            return
        self.fail(AttachError(f"the server at port {self._port} is gone: {reason}"))

    def _welcome(self, addresses: dict[str, str]) -> None:
        self._move(AttachmentState.ATTACHED)
        self._addresses = addresses
        self._models.bind(*self._models.specs)
        self.check_started()

    def _on_taken_over(self, model: str) -> None:
        if model not in self._models.specs:
            return
        logger.warning("another program serves model %s now; it is not bound here any more", model)
        self._on_replaced(model)  # who sees the workers go may bind it again
        self._models.drop(model, BindError(f"another program serves model {model!r} now"))

    # ---- binding --------------------------------------------------------------------------

    def _add_model(self, spec: ModelSpec, served: Future[None]) -> None:
        if self.state in {AttachmentState.STOPPING, AttachmentState.STOPPED}:
            served.set_exception(self._failure or _ended())
            return
        self._models.add(spec, served)
        if self.state is AttachmentState.ATTACHED:
            self._models.bind(spec.name)

    def _remove_model(self, model: str, gone: Future[None]) -> None:
        if self.state in {AttachmentState.STOPPING, AttachmentState.STOPPED}:
            gone.set_exception(self._failure or _ended())
            return
        self.tell(attach.UnbindModel(model))
        if model in self._models.specs:
            self._models.drop(model, BindError(f"model {model!r} is not bound any more"))
        gone.set_result(None)

    def check_started(self) -> None:
        if not self.started.done() and self._models.are_bound:
            self.started.set_result(self._addresses)

    def tell(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message to the server, if it is there. The descriptors stay the caller's."""
        if self._server is not None:
            self._server.send(message, fds)

    # ---- ending ---------------------------------------------------------------------------

    def fail(self, failure: GpuserveError) -> None:
        """End by an error. Nobody waits for what the workers still run: they are killed."""
        self._failure = self._failure or failure
        self._reactor.stop()

    def _begin_stop(self) -> None:
        if self.state is not AttachmentState.ATTACHED:
            self._reactor.stop()
            return
        for model in self._models.specs:
            self.tell(attach.UnbindModel(model))
        self._move(AttachmentState.STOPPING)
        self._leave()
        self._models.stop()
        self._reactor.call_later(STOP_TIMEOUT_S, self._reactor.stop)
        self.check_stopped()

    def check_stopped(self) -> None:
        if self._models.are_stopped():
            self._reactor.stop()

    def _leave(self) -> None:
        """The server hears of the end before the workers do."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _move(self, state: AttachmentState) -> None:
        self.state = STEPS.step(self.state, state)


def _ended() -> AttachError:
    return AttachError("the attachment to the server has ended")
