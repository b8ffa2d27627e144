"""The models that attached programs serve through this server. One is served once all its instances are up,
and until its program withdraws it, goes away, or loses its name to another program. The names of the
server's own models are not to be had.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection, Iterator
from typing import Any

from gpuserve.control import messages
from gpuserve.control.attach import (
    BindRefused,
    Bound,
    Replaced,
    Welcome,
    WorkerDown,
    WorkerHung,
    attach_addresses,
)
from gpuserve.errors import InvalidArgument
from gpuserve.journal.kinds import EventKind
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.attach.attached_program import AttachedModel, AttachedProgram
from gpuserve.supervisor.core.life import LiveInstance
from gpuserve.supervisor.core.local_listener import LocalListener
from gpuserve.supervisor.core.server_core import ServerCore
from gpuserve.supervisor.workers.hang import Hang

logger = logging.getLogger(__name__)


class AttachedModels:
    """The attached programs and their models. Owner: ``end()`` lets all of them go. ``own`` gives the names
    of the server's own models, and ``generations`` a number for each model that is to be served.
    """

    def __init__(
        self, core: ServerCore, own: Callable[[], Collection[str]], generations: Iterator[int]
    ) -> None:
        self._core = core
        self._own = own
        self._generations = generations
        self._welcome = Welcome("", {})
        self._listener = LocalListener(core.reactor, self._connected, "attach")
        self._programs: list[AttachedProgram] = []
        self._served_by: dict[str, AttachedProgram] = {}
        self._is_closing = False

    def open(self, addresses: dict[str, str]) -> None:
        """Take programs from now on; each is told the name and these addresses of the server. Raises
        StartupError: another process has a name that ``require_control`` asks for.
        """
        self._welcome = Welcome(self._core.settings.now.name, addresses)
        for role in ("http", "grpc"):
            port = self._core.listeners.port(role)
            if port is not None:
                local = attach_addresses(port, create=True)
                required = self._core.settings.now.require_control
                self._listener.open(local, f"programs cannot attach by port {port}", required=required)

    def take_no_more(self) -> None:
        """Take no program and no model any more; those that are there stay."""
        self._is_closing = True
        self._listener.close()

    def end(self) -> None:
        self.take_no_more()
        for program in self._programs:
            program.end("it has been stopped")
        self._programs.clear()
        self._served_by.clear()

    def has(self, name: str) -> bool:
        """Whether a program serves a model of that name; case does not tell names apart."""
        return any(name.lower() == one.lower() for one in self._served_by)

    def why_not_ours(self, name: str, does: str) -> InvalidArgument | None:
        """Make the refusal for whoever wants something done to a program's model; None for any other."""
        if not self.has(name):
            return None
        return InvalidArgument(
            f"model '{name}' is served by an attached program, and only that program {does} its models"
        )

    def served(self) -> Iterator[tuple[int, AttachedModel]]:
        for name, program in self._served_by.items():
            yield program.pid, program.models[name]

    def announce(self) -> None:
        for name, program in self._served_by.items():
            program.models[name].announce(self._core.front)

    # ---- who comes ------------------------------------------------------------------------

    def _connected(self, sock: socket.socket) -> None:
        program = AttachedProgram(sock, self._core.reactor, self)
        self._programs.append(program)
        program.open()

    # ---- what the programs tell -----------------------------------------------------------

    def program_arrived(self, program: AttachedProgram) -> Welcome:
        logger.info("process %d has attached", program.pid)
        return self._welcome

    def instance_came_up(
        self, program: AttachedProgram, model: AttachedModel, instance: LiveInstance
    ) -> None:
        """Hand an instance to the front; with the last one of a new model its service begins."""
        if model.is_served:
            self._core.front.instance_up(model.generation, instance)
        elif model.is_complete() and not self.refuses(program, model):
            self._serve(program, model)

    def instance_went_down(self, model: AttachedModel, down: WorkerDown) -> None:
        if model.is_served:
            self._core.front.send(messages.InstanceDown(model.generation, *down[1:]))
            self._core.events.tell(
                EventKind.INSTANCE_DIED,
                model=model.spec.name,
                version=model.spec.version,
                instance=down.instance,
                reason=down.reason,
                restart_in_s=round(down.restart_in_s, 3),
            )

    def execution_hung(self, generation: int, hang: Hang) -> ModelSpec | None:
        """Have the program of an instance end it, or tell of it: its worker is that program's child. Return
        the model; None where no program has it.
        """
        for name, program in self._served_by.items():
            model = program.models[name]
            if model.generation == generation:
                program.tell(WorkerHung(name, *hang))
                return model.spec
        return None

    def program_lost(self, program: AttachedProgram, reason: str) -> None:
        level = logging.WARNING if program.models else logging.INFO
        names = ", ".join(program.models) or "no model"
        logger.log(
            level, "process %d is not attached any more: %s; with it goes %s", program.pid, reason, names
        )
        for name in list(program.models):
            self.take_away(program, name)
        program.close()
        self._programs.remove(program)

    # ---- who has which name ---------------------------------------------------------------

    def refuses(self, program: AttachedProgram, model: AttachedModel) -> bool:
        """Refuse a model whose name is not to be had, and say whether that is so."""
        name = model.spec.name
        if self._is_closing:
            text = f"model {name!r} cannot be served: the server is stopping"
        elif any(name.lower() == own.lower() for own in self._own()):
            text = f"model {name!r} cannot be served: the server has a model of that name of its own"
        else:
            return False
        program.forget(name)
        program.tell(BindRefused(name, text))
        return True

    def _serve(self, program: AttachedProgram, model: AttachedModel) -> None:
        name = model.spec.name
        before = self._served_by.get(name)
        if before is not None:
            logger.warning("process %d takes model %s over from process %d", program.pid, name, before.pid)
            self.take_away(before, name)
            before.tell(Replaced(name))
        self._served_by[name] = program
        model.generation = next(self._generations)
        model.announce(self._core.front)
        logger.info("process %d serves model %s", program.pid, name)
        self._tell(EventKind.MODEL_LOADED, program, model, instances=len(model.spec.instances))
        program.tell(Bound(name))

    def take_away(self, program: AttachedProgram, name: str) -> None:
        """Take away a program's model, whether it was served or not yet; whoever waits for it is refused."""
        model = program.models[name]
        if self._served_by.get(name) is program and model.is_served:
            del self._served_by[name]
            self._core.front.send(messages.RemoveModel(model.generation))
            self._tell(EventKind.MODEL_UNLOADED, program, model)
        program.forget(name)

    def _tell(self, kind: EventKind, program: AttachedProgram, model: AttachedModel, **facts: Any) -> None:
        spec, source = model.spec, f"program {program.pid}"
        self._core.events.tell(kind, model=spec.name, version=spec.version, source=source, **facts)
