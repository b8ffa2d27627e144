"""Operator commands: the verbs, which the admin API uses as well, all stacks, and the control socket."""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.core.errors import (
    AlreadyExists,
    Code,
    GpuserveError,
    InvalidArgument,
    RequestError,
    Unavailable,
)
from gpuserve.model.placement import instances_by_device, with_count
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.attach.attached_programs import AttachedModels
from gpuserve.supervisor.control import operator_protocol as operator_arguments
from gpuserve.supervisor.control.operator_client import ControlName
from gpuserve.supervisor.control.operator_protocol import (
    KEEP_ALIVE_PERIOD_S,
    OPERATOR_VOCABULARY,
    PROTOCOL,
    CommandKeepAlive,
    CommandProgress,
    OnOutcome,
    OnProgress,
    OperatorCommand,
    VerbOutcome,
    failed,
)
from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.models.generations import GenerationTable
from gpuserve.supervisor.models.load_requests import LoadRequests
from gpuserve.supervisor.models.model_operations import ResizeOperation, failed_version
from gpuserve.supervisor.models.served_models import ServedModels
from gpuserve.supervisor.operator.event_publication import EventPublication
from gpuserve.supervisor.operator.quiescence import Quiescence
from gpuserve.supervisor.operator.server_status import FrontCensus, OperatorStatus
from gpuserve.supervisor.processes.child_supervision import MonitoredChild
from gpuserve.supervisor.processes.front_monitor import FrontMonitor
from gpuserve.supervisor.processes.listeners import Listeners, LocalListener
from gpuserve.supervisor.processes.server_core import ServerCore, refuse_change
from gpuserve.supervisor.reload.config_reload import ConfigReload
from gpuserve_worker.protocol import datagram
from gpuserve_worker.protocol.wire import WireError

logger = logging.getLogger(__name__)

#: Verbs that change nothing are allowed in every state of the server.
_ALWAYS: Final = frozenset({"status", "events", "logs"})


@dataclass(eq=False)
class OperatorVerbs:
    """The verbs of one server, in the reactor's thread. Restrictions of clients do not apply to operators."""

    _core: ServerCore
    _models: ServedModels
    _attached: AttachedModels
    _loads: LoadRequests
    _config: ConfigReload
    _publication: EventPublication

    def __post_init__(self) -> None:
        core, table = self._core, self._models.table
        self.quiescence, self.census = Quiescence(core), FrontCensus(core)
        about = (table, self._attached, self.quiescence, self._config.path, self._models.on_demand.document)
        self.status = OperatorStatus(core, self.census, *about)
        self._stacks = OperatorStacks(core.front, table)

    def ask(self, verb: str, arguments: dict[str, Any], progress: OnProgress, answer: OnOutcome) -> None:
        """Run a verb. ``progress`` is called with lines of progress, ``answer`` once with the outcome."""
        try:
            operator_arguments.check_verb(verb, arguments)
            if verb in _ALWAYS:
                self._query(verb, arguments, answer)
                return
            if verb == "stacks":
                self._stacks.ask(progress, answer)
                return
            if (refusal := self._core.lifecycle.command_refusal()) is not None:
                raise refusal
            # The answer comes after the front has handled all earlier messages, so that clients see it.
            self._start(verb, arguments, progress, lambda outcome: self.census.ask(lambda _: answer(outcome)))
        except Exception as error:
            answer(failed(refuse_change(f"the command {verb}", error)))

    def _query(self, verb: str, arguments: dict[str, Any], answer: OnOutcome) -> None:
        """Answer a verb that is allowed in every state of the server."""
        match verb:
            case "status":
                self.status.ask(answer)
            case "events":
                self._publication.open(lambda: answer(self._events()))
            case "logs":
                named = arguments.get("model") is not None
                model = operator_arguments.model_name(verb, arguments) if named else ""
                lines, known = self._core.lines.of(model), self._models.table.names()
                if model and not lines and model not in known and not self._attached.has(model):
                    raise operator_arguments.unknown_model(model, known)
                answer(VerbOutcome("", "", {"lines": [line.document() for line in lines]}))

    def _events(self) -> VerbOutcome:
        if not self._publication.address:
            return failed(Unavailable("the server cannot publish what happens; its log says why"))
        events = [event.document() for event in self._core.events.recent]
        return VerbOutcome("", "", {"address": self._publication.address, "events": events})

    def _start(self, verb: str, arguments: dict[str, Any], progress: OnProgress, answer: OnOutcome) -> None:
        match verb:
            case "drain":
                timeout_s = operator_arguments.timeout_s(arguments)
                if not operator_arguments.undo(arguments):
                    self.quiescence.drain(timeout_s, progress, answer)
                elif timeout_s is None:
                    self.quiescence.resume(answer)
                else:
                    raise InvalidArgument("timeout_s: cannot be combined with undo")
            case "load":
                self._load(operator_arguments.model_name(verb, arguments), progress, answer)
            case "unload":
                self._unload(operator_arguments.model_name(verb, arguments), progress, answer)
            case "reload" if arguments.get("model") is not None:
                self._reload(operator_arguments.model_name(verb, arguments), progress, answer)
            case "reload":
                self._config.request(answer, progress)
            case "scale":
                self._scale(operator_arguments.counts(arguments), progress, answer)

    def _load(self, model: str, progress: OnProgress, answer: OnOutcome) -> None:
        self._check_own(model, "loads")
        if not self._models.table.is_served(model):
            progress(f"loading model {model}")

        def loaded(error: RequestError | None) -> None:
            if isinstance(error, AlreadyExists):
                answer(VerbOutcome("", str(error), {}))
            else:
                _report(f"model '{model}' is loaded", answer, error)

        failure = functools.partial(_failure, "is not loaded")
        self._loads.load(model, {}, loaded, again=False, failure=failure, unreadable=self._unreadable)

    def _unload(self, model: str, progress: OnProgress, answer: OnOutcome) -> None:
        self._check_own(model, "unloads")
        self._check_loaded(model)
        progress(f"unloading model {model}")
        specs = self._models.table.specs()
        without = sorted({one.name for one in specs if any(step.model == model for step in one.steps)})
        rest = f"; without it these cannot run: {', '.join(without)}" if without else ""
        self._loads.unload(model, functools.partial(_report, f"model '{model}' is unloaded{rest}", answer))

    def _reload(self, model: str, progress: OnProgress, answer: OnOutcome) -> None:
        self._check_own(model, "loads")
        self._check_loaded(model)
        progress(f"reloading model {model}, beside the one that serves")
        reloaded = functools.partial(_report, f"model '{model}' is reloaded", answer)
        failure = functools.partial(_failure, "stays as it was")
        self._loads.load(model, {}, reloaded, failure=failure, unreadable=self._unreadable, is_last_word=True)

    def _scale(self, counts: Mapping[str, int], progress: OnProgress, answer: OnOutcome) -> None:
        """Resize models to a number of instances on each device, and answer once for all of them."""
        table = self._models.table
        for model, count in counts.items():
            self._check_own(model, "scales")
            self._check_loaded(model)
            for one in table.served(model) or table.of(model):
                with_count(one.spec, count)  # raises InvalidArgument if it cannot have so many
        result = {model: {"before": _instance_count(table, model)} for model in counts}
        errors: list[GpuserveError] = []

        def scaled(model: str, error: GpuserveError | None) -> None:
            result[model]["after"] = _instance_count(table, model)
            if error is not None:
                errors.append(error)
            if any("after" not in one for one in result.values()):
                return
            if not errors:
                answer(VerbOutcome("", "", {"models": result}))
                return
            kind = type(errors[0]) if isinstance(errors[0], RequestError) else Unavailable
            answer(failed(kind("; ".join(map(str, errors))), {"models": result}))

        for model, count in counts.items():
            progress(f"model {model}: {result[model]['before']} to {count} instances on each device")
            self._models.submit(ResizeOperation(model, functools.partial(scaled, model), count))

    # ---- checks ---------------------------------------------------------------------------

    def _check_own(self, model: str, does: str) -> None:
        if (refusal := self._attached.attached_refusal(model, does)) is not None:
            raise refusal

    def _unreadable(self, model: str, error: GpuserveError | None) -> RequestError:
        """Return the error of the present declaration, or that the file has no such model."""
        if error is not None:
            return InvalidArgument(str(error))
        return operator_arguments.unknown_model(model, self._models.table.names())

    def _check_loaded(self, model: str) -> None:
        """Raise ``RequestError`` if a model is neither loaded nor being loaded."""
        if not self._models.table.of(model):
            known = self._models.table.names()
            if model in known:
                raise InvalidArgument(f"model '{model}' is not loaded")
            raise operator_arguments.unknown_model(model, known)


def _report(text: str, answer: OnOutcome, error: RequestError | None) -> None:
    answer(VerbOutcome("", text, {}) if error is None else failed(error))


def _instance_count(table: GenerationTable, model: str) -> int:
    """Return the number of instances that a model has on a device: the highest, if devices differ."""
    specs = [one.spec for one in table.served(model)]
    return max((n for one in specs for n in instances_by_device(one).values()), default=0)


def _failure(outcome: str, spec: ModelSpec, instance: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"model '{spec.name}' {outcome}: {failed_version(spec, instance, reason)}")


class OperatorStacks:
    """The verb ``stacks``: the stacks of the front and of the server's own workers. Each answer is a message
    of its own, because all stacks together may be larger than a message can be.
    """

    def __init__(self, front: FrontMonitor, table: GenerationTable) -> None:
        self._front = front
        self._table = table

    def ask(self, progress: OnProgress, answer: OnOutcome) -> None:
        """Report each process: its name in the first line, its stacks below."""
        processes: list[tuple[str, MonitoredChild | None]] = [("front", self._front.child)]
        for one in self._table.workers():
            head = f"model {one.spec.name}, instance {one.instance.name}"
            for rank in one.ranks:
                which = f", rank {rank.number}" if len(one.ranks) > 1 else ""
                processes.append((f"{head}{which}", rank.child))
        self._ask_next(iter(processes), progress, lambda: answer(VerbOutcome()))

    def _ask_next(
        self,
        processes: Iterator[tuple[str, MonitoredChild | None]],
        progress: OnProgress,
        done: Callable[[], None],
    ) -> None:
        for name, child in processes:
            if child is None:
                continue
            head = f"{name}, process {child.process.pid}:"

            def on_stacks(stacks: str, head: str = head) -> None:
                progress(f"{head}\n{stacks}")
                self._ask_next(processes, progress, done)

            child.stacks.ask(on_stacks)
            return
        done()


#: Maximum number of clients at once. Others wait in the backlog.
MAX_CLIENTS: Final = 64
#: A client that has sent no command within this time is disconnected.
ASK_TIMEOUT_S: Final = 5.0
#: Maximum size of a command.
MAX_ASK_NBYTES: Final = 64 << 10


class ControlSocket:
    """The control sockets of one server and their clients, whom the kernel identifies (SO_PEERCRED)."""

    def __init__(
        self, reactor: Reactor, ask: Callable[[str, dict[str, Any], OnProgress, OnOutcome], None]
    ) -> None:
        self.ask = ask
        self._reactor = reactor
        self._listener = LocalListener(reactor, self._connected, "operate the server")
        self._clients: set[ControlClient] = set()

    def open(self, ports: Listeners, *, required: bool) -> None:
        """Accept clients by a socket for each port. Raise StartupError if a ``required`` address is taken."""
        for listener in ports.sockets.values():
            address, port = listener.getsockname()[:2]
            name = ControlName(os.geteuid(), address, port)
            otherwise = f"the server cannot be operated by {name}"
            self._listener.open(name.addresses(), otherwise, required=required)

    def close(self) -> None:
        self._listener.close()
        for client in list(self._clients):
            client.close()

    def _connected(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        client = ControlClient(sock, self._reactor, self)
        self._clients.add(client)
        client.open()
        if len(self._clients) >= MAX_CLIENTS:
            self._listener.pause()

    def client_closed(self, client: ControlClient) -> None:
        self._clients.discard(client)
        if len(self._clients) == MAX_CLIENTS - 1:
            self._listener.resume()


class ControlClient:
    """One client with its command, from ``open()`` to the answer. If it leaves, the command runs on."""

    def __init__(self, sock: socket.socket, reactor: Reactor, server: ControlSocket) -> None:
        self._sock = sock
        self._reactor = reactor
        self._server = server
        self._has_asked = False
        self._is_closed = False

    def open(self) -> None:
        self._reactor.watch(self._sock.fileno(), self._on_readable)
        self._reactor.call_later(ASK_TIMEOUT_S, lambda: None if self._has_asked else self.close())

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._reactor.unwatch(self._sock.fileno())
        self._sock.close()
        self._server.client_closed(self)

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(MAX_ASK_NBYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or self._has_asked or len(data) > MAX_ASK_NBYTES:
            self.close()
            return
        try:
            message = OPERATOR_VOCABULARY.decode(data)
        except WireError as error:
            logger.warning("rejected malformed control command: %s", error)
            self.close()
            return
        match message:
            case OperatorCommand(int(protocol)) if protocol != PROTOCOL:
                text = "the command and the server need the same version of gpuserve"
                self._answer(VerbOutcome(Code.UNIMPLEMENTED.value, text, {}))
            case OperatorCommand(int(), str(verb), dict(arguments)):
                self._has_asked = True
                self._reactor.call_later(KEEP_ALIVE_PERIOD_S, self._keep_alive)
                self._server.ask(
                    verb, arguments, lambda text: self._send(CommandProgress(text)), self._answer
                )
            case _:
                logger.warning("rejected malformed control command: %s", type(message).__name__)
                self.close()

    def _answer(self, outcome: VerbOutcome) -> None:
        self._send(outcome)
        self.close()

    def _keep_alive(self) -> None:
        if not self._is_closed:
            self._send(CommandKeepAlive())
            self._reactor.call_later(KEEP_ALIVE_PERIOD_S, self._keep_alive)

    def _send(self, message: CommandProgress | CommandKeepAlive | VerbOutcome) -> None:
        if not self._is_closed:
            try:
                datagram.send(self._sock, OPERATOR_VOCABULARY.encode(message))
            except OSError:  # do not wait for a client that does not read
                self.close()
