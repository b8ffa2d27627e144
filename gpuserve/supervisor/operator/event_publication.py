"""Publication of events, log lines and samples to subscribers, over ZeroMQ. ZeroMQ is imported in the
background, once the server has started or somebody asks, so that the start does not wait for it.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpuserve.core.event_log import Event, EventKind, Subscriptions, topic
from gpuserve.core.states import StepTable
from gpuserve.supervisor.control.front_messages import Rates, WatchRates
from gpuserve.supervisor.processes.child_supervision import LogLine
from gpuserve.supervisor.processes.server_core import ServerCore

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

#: Delay after the start of a server before the publication opens by itself.
DELAY_S: Final = 1.0
#: Maximum number of messages, each at most a sample, that wait for one subscriber; it loses further ones.
MAX_WAITING: Final = 500
#: Time that the end of a server waits until subscribers have received the last events.
_LINGER_MS: Final = 100
#: More descriptors than a context with one socket opens.
_DESCRIPTORS: Final = 24
_OF_SERVER: Final = ("name", "version", "state", "ready", "uptime_s")
_OF_MODEL: Final = (
    "requests_per_s", "failures_per_s", "rejections_per_s", "batch_size", "p50_s", "p99_s",
)  # fmt: skip
_OF_INSTANCE: Final = ("batches_per_s", "busy")
_OF_GPU: Final = ("device", "uuid", "utilization", "memory_used_nbytes", "memory_nbytes")

#: Makes a call in a background thread, and passes its result to a callback in the reactor's thread.
RunInBackground: TypeAlias = Callable[[Callable[[], str], Callable[[str | Exception], None]], None]


class PublicationState(enum.Enum):
    """The states of the publication; subscribers are accepted in OPEN."""

    CLOSED = "CLOSED"
    OPENING = "OPENING"
    OPEN = "OPEN"
    FAILED = "FAILED"


PUBLICATION_STEPS: Final = StepTable(
    "the publication",
    {
        PublicationState.CLOSED: {PublicationState.OPENING},
        PublicationState.OPENING: {PublicationState.OPEN, PublicationState.FAILED},
        PublicationState.FAILED: {PublicationState.OPENING},
    },
)


class EventPublication:
    """The event stream of one server. Owner of its socket, until ``close()``. ``address`` is the address to
    subscribe to, "" while the publication is not open. A slow subscriber loses messages, and delays nobody.
    """

    def __init__(self, core: ServerCore, run_in_background: RunInBackground) -> None:
        self.address = ""
        self._core = core
        self._run_in_background = run_in_background
        self._subscriptions = Subscriptions()
        self._socket: zmq.Socket[bytes] | None = None
        self._state = PublicationState.CLOSED
        self._waiting: list[Callable[[], None]] = []
        #: True while a client subscribes to samples.
        self._samples = False
        self._numbers = itertools.count(1)
        core.events.recent.subscribe(self._on_event)
        core.lines.subscriber = self._on_line

    def open(self, then: Callable[[], None]) -> None:
        """Accept subscribers from now on. ``then`` is called when the publication is open, or has failed."""
        if self._state is PublicationState.OPEN:
            then()
            return
        self._waiting.append(then)
        if self._state is not PublicationState.OPENING:
            self._state = PUBLICATION_STEPS.step(self._state, PublicationState.OPENING)
            self._run_in_background(_import_zmq, self._on_imported)

    def close(self) -> None:
        if self._socket is None:
            return
        socket, self._socket = self._socket, None
        self._core.reactor.unwatch(socket.fileno())
        context = socket.context
        socket.close(_LINGER_MS)
        context.term()

    def front_ready(self) -> None:
        """Tell a new front whether samples are wanted."""
        if self._samples:
            self._core.front.send(WatchRates(True))

    def publish_sample(self, status: dict[str, Any], rates: Rates) -> None:
        """Publish a sample made from the status and the rates of the same moment."""
        number = next(self._numbers)
        self._publish(topic(EventKind.SAMPLE), lambda: sample(status, rates, number, time.time()))

    def _on_imported(self, imported: str | Exception) -> None:
        problem = str(imported)
        try:
            if not problem:
                self._open_socket()
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            logger.warning("clients cannot subscribe to the events of this server: %s", problem)
        state = PublicationState.FAILED if problem else PublicationState.OPEN
        self._state = PUBLICATION_STEPS.step(self._state, state)
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def _on_event(self, event: Event) -> None:
        self._publish(topic(event.kind, event.model), event.document)

    def _on_line(self, line: LogLine) -> None:
        self._publish(topic(EventKind.LOG, line.model), line.document)

    def _publish(self, topic: bytes, document: Callable[[], dict[str, Any]]) -> None:
        if self._socket is not None and self._subscriptions.wants(topic):
            import zmq

            text = json.dumps(document(), separators=(",", ":"), default=str)
            self._socket.send_multipart((topic, text.encode()), zmq.NOBLOCK, copy=True)
            # Sending can consume the one time that a change makes the socket's descriptor readable.
            self._receive_subscriptions()

    def _open_socket(self) -> None:
        """Accept subscribers. Raise OSError if descriptors or names are lacking."""
        import zmq

        # libzmq aborts the process if it lacks a descriptor.
        with contextlib.ExitStack() as opened:
            for _ in range(_DESCRIPTORS):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        try:
            self._socket = socket = zmq.Context().socket(zmq.XPUB)
            socket.set(zmq.SNDHWM, MAX_WAITING)
            socket.set(zmq.LINGER, _LINGER_MS)
            for uid in {0, os.geteuid()}:
                socket.set(zmq.IPC_FILTER_UID, uid)
            self.address = _bind(socket)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, error.strerror) from None
        self._core.reactor.watch(socket.fileno(), self._receive_subscriptions)
        self._receive_subscriptions()

    def _receive_subscriptions(self) -> None:
        import zmq

        if self._socket is None:
            return
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            hello = self._subscriptions.handle(self._socket.recv(zmq.NOBLOCK))
            if hello:
                self._socket.send_multipart((hello, b"{}"), zmq.NOBLOCK)
        wanted = self._subscriptions.wants_some(EventKind.SAMPLE)
        if wanted != self._samples:
            self._samples = wanted
            self._core.front.send(WatchRates(wanted))


def _import_zmq() -> str:
    """Import ZeroMQ, in any thread. Return the reason if the import fails, else ""."""
    try:
        import zmq  # noqa: F401
    except (ImportError, OSError) as error:
        return str(error)
    return ""


def _bind(socket: zmq.Socket[bytes]) -> str:
    """Bind to this process's name, or a random one if that is taken by another server; return the name."""
    import zmq

    name = f"ipc://@gpuserve/{os.geteuid()}/events/{os.getpid()}"
    try:
        socket.bind(name)
    except zmq.ZMQError as error:
        if error.errno != zmq.EADDRINUSE:
            raise
        name += f".{secrets.token_hex(8)}"
        socket.bind(name)
    return name


def sample(status: Mapping[str, Any], rates: Rates, number: int, time_s: float) -> dict[str, Any]:
    """Return a sample: the status of the server with the rates of the same moment. Pure."""
    server = {key: status["server"][key] for key in _OF_SERVER}
    server |= {"requests_per_s": rates.requests_per_s, "connections": rates.connections}
    models = {(name, version): values for name, version, *values in rates.models}
    instances = {(model, version, name): values for model, version, name, *values in rates.instances}
    return {
        "time": round(time_s, 3),
        "number": number,
        "kind": EventKind.SAMPLE.value,
        "server": server,
        "models": [_model(one, models, instances) for one in status["models"]],
        "gpus": [dict(zip(_OF_GPU, one, strict=True)) for one in rates.gpus],
        "doors": status["server"]["doors"],
    }


def _model(
    row: Mapping[str, Any],
    models: Mapping[tuple[str, int], list[Any]],
    instances: Mapping[tuple[str, int, str], list[Any]],
) -> dict[str, Any]:
    name, version = row["name"], row["version"]
    return {
        **row,
        **_named(_OF_MODEL, models.get((name, version))),
        "instances": [
            {**one, **_named(_OF_INSTANCE, instances.get((name, version, one["name"])))}
            for one in row["instances"]
        ],
    }


def _named(names: tuple[str, ...], values: list[Any] | None) -> dict[str, Any]:
    return dict.fromkeys(names) if values is None else dict(zip(names, values, strict=True))
