"""The models that attached programs serve through this server: who has which name, and what the front is
told of them.

A model of an attached program is served once all of its instances are up, and until its program withdraws
it, goes away, or loses its name to another program. The names of the server's own models are not to be had.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator

from gpuserve.supervisor.attach_address import attach_name
from gpuserve.supervisor.attach_messages import Bound, InstanceDown, Refused, Replaced, Welcome
from gpuserve.supervisor.attached_program import AttachedModel, AttachedProgram
from gpuserve.supervisor.front_keeper import FrontKeeper
from gpuserve.supervisor.listeners import Listeners
from gpuserve.supervisor.live_instance import LiveInstance
from gpuserve.supervisor.local_listener import LocalListener
from gpuserve.supervisor.reactor import Reactor

logger = logging.getLogger(__name__)

#: The ports whose numbers a program may attach by.
_ROLES = ("http", "grpc")


class AttachedModels:
    """The attached programs and their models. Owner: ``end()`` lets all of them go.

    ``own`` gives the names of the server's own models, and ``generations`` a number for each model that is
    to be served.
    """

    def __init__(
        self, reactor: Reactor, own: Callable[[], Collection[str]], generations: Iterator[int]
    ) -> None:
        self._reactor = reactor
        self._own = own
        self._generations = generations
        self._front: FrontKeeper | None = None
        self._welcome = Welcome("", {})
        self._listeners: list[LocalListener] = []
        self._programs: list[AttachedProgram] = []
        self._served_by: dict[str, AttachedProgram] = {}
        self._is_closing = False

    def open(self, front: FrontKeeper, name: str, addresses: dict[str, str], ports: Listeners) -> None:
        """Take programs from now on; each is told the name and the addresses of the server."""
        self._front = front
        self._welcome = Welcome(name, addresses)
        for role in _ROLES:
            port = ports.port(role)
            if port is not None:
                self._listen(port)

    def take_no_more(self) -> None:
        """The server is stopping: no program and no model is taken any more; those that are there stay."""
        self._is_closing = True
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def end(self) -> None:
        """Let all programs go."""
        self.take_no_more()
        for program in self._programs:
            program.end("it has been stopped")
        self._programs.clear()
        self._served_by.clear()

    def has(self, name: str) -> bool:
        """Whether a program serves a model of that name; case does not tell names apart."""
        return any(name.lower() == one.lower() for one in self._served_by)

    def served(self) -> Iterator[tuple[int, AttachedModel]]:
        """Every model, with the pid of its program."""
        for name, program in self._served_by.items():
            yield program.pid, program.models[name]

    def announce(self, front: FrontKeeper) -> None:
        """Tell a new front of every model."""
        for name, program in self._served_by.items():
            program.models[name].announce(front)

    # ---- who comes ------------------------------------------------------------------------

    def _listen(self, port: int) -> None:
        name = attach_name(os.geteuid(), port)
        listener = LocalListener(name, self._reactor, self._connected, "attach")
        try:
            listener.open()
        except OSError as error:
            logger.warning("programs cannot attach by port %d: %s", port, error.strerror or error)
            return
        self._listeners.append(listener)

    def _connected(self, sock: socket.socket) -> None:
        program = AttachedProgram(sock, self._reactor, self)
        self._programs.append(program)
        program.open()

    # ---- what the programs tell -----------------------------------------------------------

    def program_arrived(self, program: AttachedProgram) -> Welcome:
        """It is told where the server is."""
        logger.info("process %d has attached", program.pid)
        return self._welcome

    def model_offered(self, program: AttachedProgram, model: AttachedModel) -> None:
        """Said at once where the name is not to be had, before anything is loaded for it."""
        self._is_refused(program, model)

    def instance_came_up(
        self, program: AttachedProgram, model: AttachedModel, instance: LiveInstance
    ) -> None:
        """The last one of a new model is the beginning of its service."""
        assert self._front is not None
        if model.is_served:
            self._front.instance_up(model.generation, instance)
        elif model.is_complete() and not self._is_refused(program, model):
            self._serve(program, model)

    def instance_went_down(self, model: AttachedModel, down: InstanceDown) -> None:
        """Out of rotation."""
        assert self._front is not None
        if model.is_served:
            self._front.instance_down(model.generation, down.instance, down.reason, down.restart_in_s)

    def model_withdrawn(self, program: AttachedProgram, model: AttachedModel) -> None:
        """Whoever waits for it is refused."""
        self._take_away(program, model.spec.name)

    def program_lost(self, program: AttachedProgram, reason: str) -> None:
        """Its models go with it."""
        level = logging.WARNING if program.models else logging.INFO
        names = ", ".join(program.models) or "no model"
        logger.log(
            level, "process %d is not attached any more: %s; with it goes %s", program.pid, reason, names
        )
        for name in list(program.models):
            self._take_away(program, name)
        program.close()
        self._programs.remove(program)

    # ---- who has which name ---------------------------------------------------------------

    def _is_refused(self, program: AttachedProgram, model: AttachedModel) -> bool:
        name = model.spec.name
        if self._is_closing:
            text = f"model {name!r} cannot be served: the server is stopping"
        elif any(name.lower() == own.lower() for own in self._own()):
            text = f"model {name!r} cannot be served: the server has a model of that name of its own"
        else:
            return False
        program.forget(name)
        program.tell(Refused(name, text))
        return True

    def _serve(self, program: AttachedProgram, model: AttachedModel) -> None:
        assert self._front is not None
        name = model.spec.name
        before = self._served_by.get(name)
        if before is not None:
            logger.warning("process %d takes model %s over from process %d", program.pid, name, before.pid)
            self._take_away(before, name)
            before.tell(Replaced(name))
        self._served_by[name] = program
        model.generation = next(self._generations)
        model.announce(self._front)
        logger.info("process %d serves model %s", program.pid, name)
        program.tell(Bound(name))

    def _take_away(self, program: AttachedProgram, name: str) -> None:
        """The program's model of that name is no more, whether it was served or not yet."""
        model = program.models[name]
        if self._served_by.get(name) is program and model.is_served:
            assert self._front is not None
            del self._served_by[name]
            self._front.remove_model(model.generation)
        program.forget(name)
