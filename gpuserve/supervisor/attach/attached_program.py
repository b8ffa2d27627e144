"""One program that is attached to this server: its models, and what it says of them. Its word is checked like
that of any peer: what is out of place ends this attachment and nothing else.
"""

from __future__ import annotations

import enum
import os
import socket
import stat
import time
from typing import TYPE_CHECKING, Any

from gpuserve.control import attach, messages
from gpuserve.control.attach import AttachEnd, WorkerDown, WorkerUp
from gpuserve.control.reactor import Reactor
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.attach.foreign_spec import checked_spec
from gpuserve.supervisor.core.front_keeper import FrontKeeper
from gpuserve.supervisor.core.life import LiveInstance
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.wire import WireError

if TYPE_CHECKING:
    from gpuserve.supervisor.attach.attached_models import AttachedModels

#: What tells of the end of a worker: a process's descriptor, or the eventfd that stands for a thread's.
_DEATH_FILES = ("anon_inode:[pidfd]", "pidfd:", "anon_inode:[eventfd]")


class AttachedModel:
    """A model of an attached program. Owner of the descriptors that its workers are reached by, so that a
    front that is replaced gets them again.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        #: Its number, where the front knows it; 0 otherwise.
        self.generation = 0
        self._up: dict[str, LiveInstance] = {}
        self._restart_at: dict[str, float] = {}

    @property
    def is_served(self) -> bool:
        return self.generation > 0

    def live(self) -> list[LiveInstance]:
        return list(self._up.values())

    def is_complete(self) -> bool:
        return len(self._up) == len(self.spec.instances)

    def up(self, instance: LiveInstance) -> None:
        self._up[instance.name] = instance
        self._restart_at.pop(instance.name, None)

    def down(self, name: str, restart_in_s: float) -> None:
        self._restart_at[name] = time.monotonic() + restart_in_s
        if name in self._up:
            _close(self._up.pop(name))

    def announce(self, front: FrontKeeper) -> None:
        front.send(messages.AddModel(self.generation, self.spec.to_wire(), True, True))
        for instance in self._up.values():
            front.instance_up(self.generation, instance)
        for name, restart_at in self._restart_at.items():
            restart_in_s = max(0.0, restart_at - time.monotonic())
            front.send(
                messages.InstanceDown(self.generation, name, "it died before this front", restart_in_s)
            )

    def may_come_up(self, name: str) -> bool:
        return name not in self._up and any(one.name == name for one in self.spec.instances)

    def close(self) -> None:
        for instance in self._up.values():
            _close(instance)
        self._up.clear()


class ProgramState(enum.Enum):
    """Where an attached program stands."""

    CONNECTED = "CONNECTED"
    WELCOME = "WELCOME"
    LEAVING = "LEAVING"


class AttachedProgram:
    """One attachment, from ``open()`` to ``close()`` or to ``program_lost``."""

    def __init__(self, sock: socket.socket, reactor: Reactor, served: AttachedModels) -> None:
        self.models: dict[str, AttachedModel] = {}
        self.state = ProgramState.CONNECTED
        self._reactor = reactor
        self._served = served
        #: Without waiting: one program that does not read must not hold up the server.
        self._end = AttachEnd(sock, reactor, self, send_timeout_s=0.0)
        self._taken_over: set[str] = set()

    @property
    def pid(self) -> int:
        """The program's process; 0 where it is not visible."""
        return self._end.peer.pid

    def open(self) -> None:
        self._end.open()

    def tell(self, message: Any) -> None:
        self._end.send(message)

    def forget(self, model: str) -> None:
        """Let the workers of a model go. What the program still says of it does not count."""
        self._taken_over.add(model)
        self.models.pop(model).close()

    def end(self, reason: str) -> None:
        self.tell(attach.Ended(reason))
        self.close()

    def close(self) -> None:
        """End the attachment, and close the descriptors of its workers."""
        self.state = ProgramState.LEAVING
        self._end.close()
        for model in self.models.values():
            model.close()

    def lost(self, reason: str) -> None:
        self._served.program_lost(self, reason)

    def heard(self, message: Any, fds: list[int]) -> None:
        if self.state is ProgramState.CONNECTED:
            self._greet(message)
            return
        match message:
            case attach.BindModel(dict(plain)):
                self._bind(checked_spec(plain))
            case attach.UnbindModel(str(name)):
                if self._model(name) is not None:
                    self._served.take_away(self, name)
            case WorkerUp():
                self._instance_up(message, fds)
            case WorkerDown(str(name), str(instance), str(), float(restart_in_s)) if restart_in_s >= 0.0:
                if (model := self._model(name)) is not None:
                    model.down(instance, restart_in_s)
                    self._served.instance_went_down(model, message)
            case other:
                raise WireError(f"{type(other).__name__} with fields that do not fit, or out of place")

    def _greet(self, message: Any) -> None:
        ours = (attach.PROTOCOL, wire.PROTOCOL)
        match message:
            case attach.Hello(int(protocol), int(worker_protocol)):
                if (protocol, worker_protocol) == ours:
                    self.state = ProgramState.WELCOME
                    self.tell(self._served.program_arrived(self))
                    return
                self.tell(attach.Ended("both need the same version of gpuserve"))
                raise WireError(f"it speaks protocol {(protocol, worker_protocol)}, not {ours}")
            case other:
                raise WireError(f"its first word is {type(other).__name__}")

    def _bind(self, spec: ModelSpec) -> None:
        if spec.name in self.models:
            raise WireError(f"it binds model {spec.name!r} twice")
        self._taken_over.discard(spec.name)
        model = self.models[spec.name] = AttachedModel(spec)
        self._served.refuses(self, model)  # before anything is loaded for it

    def _instance_up(self, message: WorkerUp, fds: list[int]) -> None:
        match message:
            case WorkerUp(str(name), str(instance), int(pid), int(slots), float(load_s)) if slots > 0:
                model = self._model(name)
            case _:
                raise WireError("WorkerUp with fields that do not fit")
        if model is None:
            return
        if not model.may_come_up(instance):
            raise WireError(f"instance {instance!r} of model {name!r} is up already, or unknown")
        if len(fds) != 2 or not _is_link(fds[0]) or not _tells_of_death(fds[1]):
            raise WireError("WorkerUp came without the link and the pidfd of a worker")
        live = LiveInstance(instance, pid, slots, load_s, *fds)
        fds.clear()
        model.up(live)
        self._served.instance_came_up(self, model, live)

    def _model(self, name: str) -> AttachedModel | None:
        """Return its model; None where it was taken over or refused; ``WireError`` where it never had it."""
        if name not in self.models and name not in self._taken_over:
            raise WireError(f"it has no model {name!r}")
        return self.models.get(name)


def _is_link(fd: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return False
    with socket.socket(fileno=os.dup(fd)) as link:
        return (link.family, link.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _tells_of_death(fd: int) -> bool:
    """Anything else could be no file that an event loop can wait for."""
    return os.readlink(f"/proc/self/fd/{fd}").startswith(_DEATH_FILES)


def _close(instance: LiveInstance) -> None:
    os.close(instance.link_fd)
    os.close(instance.pidfd)
