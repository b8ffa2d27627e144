"""Attached programs and the models that they serve through this server. A model is served once all its
instances are up, until its program withdraws it, ends, or loses the name to another program. The server's own
models keep their names.

Messages and models of a program are checked: its version may differ, and its memory may be corrupt. A model
that would crash the front is refused here, because every later front would be sent the same model.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from gpuserve.core.errors import BindError, InvalidArgument
from gpuserve.core.event_log import EventKind
from gpuserve.model.rules import check_declared
from gpuserve.model.spec import ModelSpec, check_model_name
from gpuserve.supervisor.control import attach_protocol as attach
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.control.attach_protocol import (
    AttachConnection,
    BindRefused,
    Bound,
    Replaced,
    Welcome,
    WorkerDown,
    WorkerHung,
    WorkerUp,
    attach_addresses,
)
from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.processes.front_monitor import FrontMonitor
from gpuserve.supervisor.processes.lifecycle import LiveInstance
from gpuserve.supervisor.processes.listeners import LocalListener
from gpuserve.supervisor.processes.server_core import ServerCore
from gpuserve.supervisor.workers.worker_watchdogs import Hang
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import ITEMSIZE
from gpuserve_worker.protocol.wire import WireError

logger = logging.getLogger(__name__)


class AttachedModels:
    """The attached programs and their models. Owner of both until ``end()``. ``own`` returns the names of the
    server's own models, and ``generations`` yields a number for each model that is to be served.
    """

    def __init__(
        self, core: ServerCore, own: Callable[[], Collection[str]], generations: Iterator[int]
    ) -> None:
        self._core = core
        self._own = own
        self._generations = generations
        self.welcome = Welcome("", {})
        self._listener = LocalListener(core.reactor, self._connected, "attach")
        self._programs: list[AttachedProgram] = []
        self._served_by: dict[str, AttachedProgram] = {}
        self._is_closing = False

    def open(self, addresses: dict[str, str]) -> None:
        """Accept programs from now on, and send them the server's name and these addresses. Raise
        StartupError if another process has a local address that ``require_control`` asks for.
        """
        self.welcome = Welcome(self._core.settings.current.name, addresses)
        for role in ("http", "grpc"):
            port = self._core.listeners.port(role)
            if port is not None:
                local = attach_addresses(port, create=True)
                required = self._core.settings.current.require_control
                self._listener.open(local, f"programs cannot attach by port {port}", required=required)

    def stop_accepting(self) -> None:
        """Accept no more programs and models; attached programs stay."""
        self._is_closing = True
        self._listener.close()

    def end(self) -> None:
        self.stop_accepting()
        for program in self._programs:
            program.end("it has been stopped")
        self._programs.clear()
        self._served_by.clear()

    def has(self, name: str) -> bool:
        """Return whether a program serves a model of that name, regardless of case."""
        return any(name.lower() == one.lower() for one in self._served_by)

    def attached_refusal(self, name: str, does: str) -> InvalidArgument | None:
        """Return the error for a request to change a program's model; None for other models."""
        if not self.has(name):
            return None
        only = f"only that program {does} its models"
        return InvalidArgument(f"model '{name}' is served by an attached program, and {only}")

    def served(self) -> Iterator[tuple[int, AttachedModel]]:
        for name, program in self._served_by.items():
            yield program.pid, program.models[name]

    def announce(self) -> None:
        for name, program in self._served_by.items():
            program.models[name].announce(self._core.front)

    # ---- messages of programs -------------------------------------------------------------

    def _connected(self, sock: socket.socket) -> None:
        program = AttachedProgram(sock, self._core.reactor, self)
        self._programs.append(program)
        program.open()

    def instance_came_up(
        self, program: AttachedProgram, model: AttachedModel, instance: LiveInstance
    ) -> None:
        """Send an instance to the front. The last instance of a new model starts the service of the model."""
        if model.is_served:
            self._core.front.instance_up(model.generation, instance)
        elif len(model.live) == len(model.spec.instances) and not self.refuse_unavailable_name(
            program, model
        ):
            self._serve(program, model)

    def instance_went_down(self, model: AttachedModel, down: WorkerDown) -> None:
        if model.is_served:
            self._core.front.send(messages.InstanceDown(model.generation, *down[1:]))
            self._core.events.record(
                EventKind.INSTANCE_DIED,
                model=model.spec.name,
                version=model.spec.version,
                instance=down.instance,
                reason=down.reason,
                restart_in_s=round(down.restart_in_s, 3),
            )

    def execution_hung(self, generation: int, hang: Hang) -> ModelSpec | None:
        """Send an overdue call to the program of its instance. Return the model, or None."""
        for name, program in self._served_by.items():
            model = program.models[name]
            if model.generation == generation:
                live = model.live.get(hang.instance)
                if live is not None and live.pid == hang.pid:
                    program.send(WorkerHung(name, *hang._replace(pid=model.program_pids[hang.instance])))
                return model.spec
        return None

    def program_lost(self, program: AttachedProgram, reason: str) -> None:
        level = logging.WARNING if program.models else logging.INFO
        names = ", ".join(program.models) or "no model"
        logger.log(level, "process %d is detached: %s; removed %s", program.pid, reason, names)
        for name in list(program.models):
            self.withdraw(program, name)
        program.close()
        self._programs.remove(program)

    # ---- names ----------------------------------------------------------------------------

    def refuse_unavailable_name(self, program: AttachedProgram, model: AttachedModel) -> bool:
        """Refuse a model whose name is not available. Return whether it was refused."""
        name = model.spec.name
        if self._is_closing:
            text = f"model {name!r} cannot be served: the server is stopping"
        elif any(name.lower() == own.lower() for own in self._own()):
            text = f"model {name!r} cannot be served: the server has a model of that name of its own"
        else:
            return False
        program.forget(name)
        program.send(BindRefused(name, text))
        return True

    def _serve(self, program: AttachedProgram, model: AttachedModel) -> None:
        name = model.spec.name
        before = self._served_by.get(name)
        if before is not None:
            logger.warning("process %d took over model %s from process %d", program.pid, name, before.pid)
            self.withdraw(before, name)
            before.send(Replaced(name))
        self._served_by[name] = program
        model.generation = next(self._generations)
        model.announce(self._core.front)
        logger.info("process %d serves model %s", program.pid, name)
        self._record(EventKind.MODEL_LOADED, program, model, instances=len(model.spec.instances))
        program.send(Bound(name))

    def withdraw(self, program: AttachedProgram, name: str) -> None:
        """Remove a program's model, served or not yet. The front refuses its waiting requests."""
        model = program.models[name]
        if self._served_by.get(name) is program and model.is_served:
            del self._served_by[name]
            self._core.front.send(messages.RemoveModel(model.generation))
            self._record(EventKind.MODEL_UNLOADED, program, model)
        program.forget(name)

    def _record(self, kind: EventKind, program: AttachedProgram, model: AttachedModel, **facts: Any) -> None:
        spec, source = model.spec, f"program {program.pid}"
        self._core.events.record(kind, model=spec.name, version=spec.version, source=source, **facts)


#: Files that become readable at the end of a worker: the pidfd of a process, or the eventfd of a thread.
_DEATH_FILES = ("anon_inode:[pidfd]", "pidfd:", "anon_inode:[eventfd]")


class AttachedModel:
    """A model of an attached program. Owner of its workers' descriptors, which every front receives."""

    def __init__(self, spec: ModelSpec) -> None:
        #: The program starts its workers itself, so its models are always loaded.
        self.spec = dataclasses.replace(spec, on_demand=False)
        #: Its number at the front; 0 if the front does not know the model.
        self.generation = 0
        self.live: dict[str, LiveInstance] = {}
        #: The process id of each instance as its program has it, which may be in another PID namespace.
        self.program_pids: dict[str, int] = {}
        self._restart_at: dict[str, float] = {}

    @property
    def is_served(self) -> bool:
        return self.generation > 0

    def up(self, instance: LiveInstance) -> None:
        self.live[instance.name] = instance
        self._restart_at.pop(instance.name, None)

    def down(self, name: str, restart_in_s: float) -> None:
        self._restart_at[name] = time.monotonic() + restart_in_s
        if name in self.live:
            _close(self.live.pop(name))

    def announce(self, front: FrontMonitor) -> None:
        front.send(messages.AddModel(self.generation, self.spec.to_wire(), True, True))
        for instance in self.live.values():
            front.instance_up(self.generation, instance)
        for name, restart_at in self._restart_at.items():
            restart_in_s = max(0.0, restart_at - time.monotonic())
            down = messages.InstanceDown(self.generation, name, "it died before this front", restart_in_s)
            front.send(down)

    def close(self) -> None:
        for instance in self.live.values():
            _close(instance)
        self.live.clear()


class AttachedProgram:
    """One attachment, from ``open()`` to ``close()`` or to ``program_lost``."""

    def __init__(self, sock: socket.socket, reactor: Reactor, served: AttachedModels) -> None:
        self.models: dict[str, AttachedModel] = {}
        self._is_welcome = False
        self._reactor = reactor
        self._served = served
        #: A timeout of 0, so that a program that does not read cannot block the server.
        self._connection = AttachConnection(sock, reactor, self.on_message, self.on_lost, send_timeout_s=0.0)
        #: Models of the program that were removed here. Its later messages about them are ignored.
        self._removed: set[str] = set()

    @property
    def pid(self) -> int:
        """The id of the program's process; 0 if it is not visible."""
        return self._connection.peer.pid

    def open(self) -> None:
        self._connection.open()

    def send(self, message: Any) -> None:
        self._connection.send(message)

    def forget(self, model: str) -> None:
        """Release a model's workers, and ignore later messages of the program about the model."""
        self._removed.add(model)
        self.models.pop(model).close()

    def end(self, reason: str) -> None:
        self.send(attach.Ended(reason))
        self.close()

    def close(self) -> None:
        """End the attachment, and close the descriptors of its workers."""
        self._connection.close()
        for model in self.models.values():
            model.close()

    def on_lost(self, reason: str) -> None:
        self._served.program_lost(self, reason)

    def on_message(self, message: Any, fds: list[int]) -> None:
        if not self._is_welcome:
            self._greet(message)
            return
        match message:
            case attach.BindModel(dict(plain)):
                self._bind(checked_spec(plain))
            case attach.UnbindModel(str(name)):
                if self._model(name) is not None:
                    self._served.withdraw(self, name)
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
            case attach.Hello(int(protocol), int(worker_protocol)) if (protocol, worker_protocol) == ours:
                self._is_welcome = True
                logger.info("process %d attached", self.pid)
                self.send(self._served.welcome)
            case attach.Hello(int(protocol), int(worker_protocol)):
                self.send(attach.Ended("both need the same version of gpuserve"))
                raise WireError(f"it speaks protocol {(protocol, worker_protocol)}, not {ours}")
            case other:
                raise WireError(f"its first message is {type(other).__name__}")

    def _bind(self, spec: ModelSpec) -> None:
        if spec.name in self.models:
            raise WireError(f"it binds model {spec.name!r} twice")
        self._removed.discard(spec.name)
        model = self.models[spec.name] = AttachedModel(spec)
        self._served.refuse_unavailable_name(self, model)  # now, before its workers load

    def _instance_up(self, message: WorkerUp, fds: list[int]) -> None:
        match message:
            case WorkerUp(str(name), str(instance), int(pid), int(slots), float(load_s)) if slots > 0:
                model = self._model(name)
            case _:
                raise WireError("WorkerUp with fields that do not fit")
        if model is None:
            return
        if instance in model.live or all(one.name != instance for one in model.spec.instances):
            raise WireError(f"instance {instance!r} of model {name!r} is up already, or unknown")
        if len(fds) != 2 or not _are_of_worker(*fds):
            raise WireError("WorkerUp came without the link and the pidfd of a worker")
        model.program_pids[instance] = pid
        live = LiveInstance(instance, _pid_of(fds[1], self.pid), slots, load_s, fds[0], fds[1])
        fds.clear()
        model.up(live)
        self._served.instance_came_up(self, model, live)

    def _model(self, name: str) -> AttachedModel | None:
        """Return a model, or None if it was removed here. Raise ``WireError`` if the program never had it."""
        if name not in self.models and name not in self._removed:
            raise WireError(f"it has no model {name!r}")
        return self.models.get(name)


def _are_of_worker(link_fd: int, death_fd: int) -> bool:
    """Return whether descriptors are a worker's link, and its end: event loops cannot watch every file."""
    if not stat.S_ISSOCK(os.fstat(link_fd).st_mode):
        return False
    with socket.socket(fileno=os.dup(link_fd)) as link:
        is_link = (link.family, link.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return is_link and os.readlink(f"/proc/self/fd/{death_fd}").startswith(_DEATH_FILES)


def _pid_of(death_fd: int, program_pid: int) -> int:
    """Return a worker's process id here; 0 if it is not visible. Without a pidfd it is a thread."""
    with open(f"/proc/self/fdinfo/{death_fd}", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return max(0, int(fields.get("Pid", program_pid)))


def _close(instance: LiveInstance) -> None:
    os.close(instance.link_fd)
    os.close(instance.pidfd)


def checked_spec(plain: dict[str, Any]) -> ModelSpec:
    """Return the model of another program's ``ModelSpec.to_wire``. Raise ``WireError`` if it is invalid."""
    try:
        spec = ModelSpec.from_wire(plain)
        _check(spec, ModelSpec, "model")
        check_model_name(spec.name)
        check_declared(spec.sequence)
    except (TypeError, ValueError, LookupError, AttributeError, BindError) as error:
        raise WireError(f"it describes a model wrongly: {error}") from error
    for tensor in (*spec.inputs, *spec.outputs):
        if tensor.datatype not in ITEMSIZE:
            raise WireError(f"tensor {tensor.name!r} has the unknown datatype {tensor.datatype!r}")
    if spec.is_ensemble:
        raise WireError(f"model {spec.name!r} is an ensemble, which only the server itself has")
    names = {instance.name for instance in spec.instances}
    if not names or len(names) < len(spec.instances):
        raise WireError(f"model {spec.name!r} has no instances, or two of one name")
    return spec


def _check(value: Any, kind: Any, where: str) -> None:
    """Check that a value matches its annotation, recursively. Raise TypeError if it does not, or ValueError
    for a negative number other than -1 in a shape. ``where`` is the path to the value.
    """
    if kind is Any:
        return
    if get_origin(kind) is tuple:
        _check_tuple(value, get_args(kind), where)
    elif get_origin(kind) is Sequence:  # the annotation for users; a spec always has a tuple
        _check_tuple(value, (*get_args(kind), ...), where)
    elif type(value) is not (get_origin(kind) or kind):
        raise TypeError(f"{where} is of type {type(value).__name__}")
    elif kind is int and value < (-1 if ".shape" in where else 0):
        raise ValueError(f"{where} is {value}")
    elif getattr(kind, "__annotations__", None):
        for name, one in get_type_hints(kind).items():
            _check(getattr(value, name), one, f"{where}.{name}")


def _check_tuple(value: Any, kinds: tuple[Any, ...], where: str) -> None:
    if type(value) is not tuple:
        raise TypeError(f"{where} is of type {type(value).__name__}")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise TypeError(f"{where} has {len(value)} elements")
    for number, (one, kind) in enumerate(zip(value, kinds, strict=True)):
        _check(one, kind, f"{where}[{number}]")
