"""An ingress process: parts, connections and status reports. The supervisor connects it to each front."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from gpuserve.config.settings import logs
from gpuserve.config.settings.logs import LogSettings
from gpuserve.config.settings.server import ServerSettings, with_changed_settings
from gpuserve.config.settings.tls import TlsFiles, tls_files
from gpuserve.front.ingress import channel_messages as messages
from gpuserve.front.ingress.channel_messages import Connect, IngressStatus
from gpuserve.front.ingress.forwarding import RequestForwarder
from gpuserve.front.ingress.ipc_channel import IpcChannel
from gpuserve.front.ingress.model_replica import IngressService
from gpuserve.front.ipc.heap_memory import trim_periodically
from gpuserve.front.net.admission import Admission, ingress_share, limits_from_settings
from gpuserve.front.net.async_requests import AsyncRequests, run_periodic_work
from gpuserve.front.net.exchange import RequestHandler
from gpuserve.front.net.listeners import TlsHandshakes, tls_context
from gpuserve.front.net.request_rate_limiter import RequestRates
from gpuserve.front.net.server import Connections
from gpuserve.front.observability.access_log import AccessLog
from gpuserve.front.process_setup import on_callback_error
from gpuserve.front.protocols import router
from gpuserve.front.protocols.access_log_middleware import with_access_log
from gpuserve.front.protocols.cors import with_cors
from gpuserve.supervisor.control.front_messages import CONTROL
from gpuserve_worker.memory.arena import ORPHANS
from gpuserve_worker.protocol import datagram

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IngressParts:
    """The parts of an ingress process, created on the first message of the front."""

    admission: Admission
    connections: Connections
    entrance: router.IngressRouter
    forwarding: RequestForwarder
    receiver: ConnectionReceiver
    reporter: StatusReporter
    inference: IngressService
    awaited: AsyncRequests


class IngressProcess:
    """One ingress process. ``on_lost`` is called if the supervisor is gone or it cannot continue."""

    def __init__(
        self, control: socket.socket, on_setup: Callable[[ServerSettings], None], on_lost: Callable[[], None]
    ) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        # A lost front is handled later, not while messages are read, perhaps on behalf of a request.
        on_front_lost = partial(self._loop.call_soon, self._lose_front)
        self._channel = IpcChannel(None, self._on_message, on_front_lost)
        self._on_setup = on_setup
        self._on_lost = on_lost
        self._settings = ServerSettings()
        self._parts: IngressParts | None = None
        self._handlers: Mapping[type, Callable[[Any], None]] = {messages.IngressSetup: self._set_up}
        #: The number of shutdown notices of the present front.
        self._notice = 0
        #: The totals of former processes with the same number, by the fields of ``IngressStatus``.
        self._counted: dict[str, Any] = {}
        #: The client addresses of all connections, and of those closed in this turn of the event loop.
        self._addresses: Counter[str | None] = Counter()
        self._closed: list[str | None] = []
        self._quit = asyncio.Event()

    async def run(self) -> None:
        self._loop.set_exception_handler(on_callback_error("ingress process", self._on_lost))
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._on_control)
        trimming = self._loop.create_task(run_periodic_work(partial(trim_periodically, self._shrink)))
        await self._quit.wait()
        trimming.cancel()
        assert self._parts is not None
        self._parts.receiver.close()
        await self._parts.connections.close()
        await self._parts.awaited.stop()
        self._parts.inference.close()
        self._parts.reporter.close()
        self._report_closed()
        self._channel.flush()

    def _shrink(self) -> None:
        if self._parts is not None:
            self._parts.inference.shrink()

    # ---- fronts come and go -------------------------------------------------------------------

    def _on_control(self) -> None:
        """Connect to a new front, the only message from the supervisor."""
        try:
            data, fds = datagram.receive(self._control, datagram.receive_buffer())
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._control.fileno())
            self._on_lost()
            return
        CONTROL.decode(data)
        self._channel.drain_and_close()
        self._lose_front()
        self._channel.reopen(socket.socket(fileno=fds.pop()))
        if self._parts is not None:
            self._parts.entrance.front_found()
            self._parts.inference.resume()

    def _lose_front(self) -> None:
        """Fail or hold the requests of the dead front, once for each front."""
        parts = self._parts
        if parts is None or parts.inference.outage.is_active or self._channel.is_open:
            return
        self._closed.clear()
        parts.entrance.front_lost()
        parts.inference.on_front_died()
        parts.forwarding.on_front_died()

    # ---- the front's word -------------------------------------------------------------------

    def _on_message(self, message: Any, fds: list[int]) -> None:
        if type(message) is messages.Connect:
            assert self._parts is not None
            self._channel.post(messages.ReceivedConnections(1))  # leaves before a byte is read from it
            self._addresses[message.address] += 1
            self._parts.receiver.accept_connection(message, fds)
        elif fds:
            assert self._parts is not None
            self._parts.inference.attach(message, fds)
        else:
            self._handlers[type(message)](message)

    def _set_up(self, setup: messages.IngressSetup) -> None:
        self._counted = setup.counted
        self._settings = ServerSettings.from_wire(setup.settings)
        settings = ingress_share(self._settings)
        self._on_setup(settings)
        inference = IngressService(settings, self._channel)
        forwarding = RequestForwarder(
            self._channel, inference.outage, router.refuse, router.is_readiness_request
        )
        admission = Admission(limits_from_settings(settings), rates=RequestRates(reports=True))
        awaited = AsyncRequests(inference.service.intake)
        http, grpc = router.make_handlers(inference.service, settings, awaited, admission)
        connections = Connections(admission, settings.max_connection_age_s, setup.idle_paths)
        limit = router.make_rate_limit(settings, admission)
        entrance = router.IngressRouter(grpc, http, forwarding.accept, limit)
        accept = with_access_log(AccessLog.of(settings), with_cors(settings.cors_origins, entrance.accept))
        tls, on_closed = tls_files(settings), self._on_connection_closed
        receiver = ConnectionReceiver(connections, accept, admission, tls, on_closed)
        reporter = StatusReporter(self._status, self._report)
        parts = self._parts = IngressParts(
            admission, connections, entrance, forwarding, receiver, reporter, inference, awaited
        )
        self._handlers = {**forwarding.handlers, **inference.handlers, **self._dispatch_table(parts)}
        connections.open()
        reporter.report_now()

    def _dispatch_table(self, parts: IngressParts) -> Mapping[type, Callable[[Any], None]]:
        return {
            messages.IngressSetup: lambda message: self._on_new_front(parts, message),
            messages.ChangeSettings: lambda message: self._adjust(parts, message),
            messages.ChangeLogSettings: lambda message: logs.adjust(LogSettings(**message.settings)),
            messages.AnnounceShutdown: lambda message: parts.receiver.when_connected(
                partial(self._announce, parts, message)
            ),
            messages.ReloadTls: lambda _: self._renew(parts),
            messages.SpentTokens: lambda message: parts.admission.rates.charge(message.spent),
            messages.StopIngress: lambda _: self._quit.set(),
        }

    def _on_new_front(self, parts: IngressParts, setup: messages.IngressSetup) -> None:
        self._notice = 0
        self._adjust(parts, messages.ChangeSettings(setup.settings))
        self._renew(parts)  # files may have changed during the outage
        self._closed.clear()
        self._channel.post(messages.HeldConnections(tuple(self._addresses.elements())))
        parts.reporter.report_now()

    def _adjust(self, parts: IngressParts, message: messages.ChangeSettings) -> None:
        self._settings = with_changed_settings(self._settings, message.settings)
        settings = ingress_share(self._settings)
        parts.admission.adjust(limits_from_settings(settings))
        if "max_connection_age_s" in message.settings:
            parts.connections.limit_age(settings.max_connection_age_s)

    def _announce(self, parts: IngressParts, message: messages.AnnounceShutdown) -> None:
        self._notice = message.notice
        parts.connections.announce()
        parts.reporter.report_now()

    def _renew(self, parts: IngressParts) -> None:
        try:
            parts.receiver.renew()
        except (OSError, ValueError) as error:  # the files have changed again since the front read them
            logger.warning("the renewed TLS files are not used: %s", error)

    # ---- reports to the front ----------------------------------------------------------------

    def _on_connection_closed(self, address: str | None) -> None:
        self._addresses[address] -= 1
        if not self._addresses[address]:
            del self._addresses[address]
        if not self._closed:
            self._loop.call_soon(self._report_closed)
        self._closed.append(address)

    def _report_closed(self) -> None:
        if self._closed:
            closed, self._closed = self._closed, []
            self._channel.post(messages.ClosedConnections(tuple(closed)))

    def _report(self, status: messages.IngressStatus) -> None:
        assert self._parts is not None
        self._channel.post(status)
        if spent := self._parts.admission.rates.take_spent():
            self._channel.post(messages.SpentTokens(spent))

    def _status(self) -> messages.IngressStatus:
        assert self._parts is not None
        connections, admission = self._parts.connections, self._parts.admission
        intake, arena = self._parts.inference.service.intake, self._parts.inference.arena_statistics()
        before = self._counted
        return messages.IngressStatus(
            notice=self._notice,
            n_unaware=connections.n_unaware if self._notice else 0,
            n_held=connections.n_held if self._notice else 0,
            n_requests=self._parts.entrance.n_requests + before.get("n_requests", 0),
            cpu_s=time.process_time() + before.get("cpu_s", 0.0),
            n_streams=admission.streams.n_open,
            unsent_nbytes=sum(admission.unsent_nbytes.values()),
            refused=dict(Counter(admission.refused) + Counter(before.get("refused"))),
            late=dict(Counter(admission.late) + Counter(before.get("late"))),
            limited=dict(Counter(admission.rates.refused) + Counter(before.get("limited"))),
            intake_nbytes=intake.nbytes,
            intake_refused=intake.refused + before.get("intake_refused", 0),
            arena_nbytes=arena.nbytes,
            arena_blocks=arena.blocks,
            reclaimed=dict(Counter(ORPHANS.reclaimed) + Counter(before.get("reclaimed"))),
        )


class ConnectionReceiver:
    """Receives admitted sockets. ``closed`` gets the address of each connection that has ended, once."""

    def __init__(
        self,
        connections: Connections,
        accept: RequestHandler,
        admission: Admission,
        tls: TlsFiles | None,
        closed: Callable[[str | None], None],
    ) -> None:
        self._made = connections.connection_factory(accept)
        self._tls = tls
        self._closed = closed
        self._handshakes = None if tls is None else TlsHandshakes(self._made, admission, tls_context(tls))
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        connections.pending.append(self)
        if self._handshakes is not None:
            connections.pending.append(self._handshakes)

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)

    def check(self, now: float) -> None:
        """Do nothing: no connection here waits for its client."""

    def accept_connection(self, message: Connect, fds: list[int]) -> None:
        """Take over the connection whose descriptor is the only one."""
        accepted, address = socket.socket(fileno=fds.pop()), message.address
        accepted.setblocking(False)
        release_place = partial(self._closed, address)
        if message.tls and self._handshakes is not None:
            self._handshakes.on_accepted(accepted, address, release_place)
        else:
            task = self._loop.create_task(self._connect(accepted, release_place))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def when_connected(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the sockets that were received so far have their connections."""
        if self._tasks:
            waiting = asyncio.gather(*self._tasks, return_exceptions=True)
            waiting.add_done_callback(lambda _: call())
        else:
            call()

    def renew(self) -> None:
        """Read the TLS files again. Raises OSError or ValueError if they are invalid."""
        if self._handshakes is not None and self._tls is not None:
            self._handshakes.context = tls_context(self._tls)

    def close(self) -> None:
        """Stop waiting for handshakes, except those of new connections."""
        if self._handshakes is not None:
            self._handshakes.close()

    async def _connect(self, accepted: socket.socket, release_place: Callable[[], None]) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: self._made(release_place), accepted)
        except OSError:  # the client has already disconnected
            accepted.close()
            release_place()


#: The longest interval between reports, by which the front detects a hang.
STATUS_S: Final = 0.25
#: The interval while the values that a drain waits for change.
_HURRIED_S: Final = 0.01


class StatusReporter:
    """Sends status reports, from ``open`` to ``close``. ``measure`` visits all connections."""

    def __init__(self, measure: Callable[[], IngressStatus], send: Callable[[IngressStatus], None]) -> None:
        self._measure = measure
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._sent: IngressStatus | None = None
        self._sent_at = 0.0
        self._pause_s = STATUS_S

    def report_now(self) -> None:
        """Report now, and soon again if the values change."""
        self.close()
        self._sent, self._pause_s = None, _HURRIED_S
        self._on_time()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_time(self) -> None:
        status, now, sent = self._measure(), self._loop.time(), self._sent
        awaited = status.notice, status.n_unaware, status.n_held
        if sent is None or awaited != (sent.notice, sent.n_unaware, sent.n_held):
            self._pause_s = _HURRIED_S if status.notice else STATUS_S
            due = True
        else:
            self._pause_s = min(STATUS_S, 2 * self._pause_s)
            due = now - self._sent_at >= STATUS_S - _HURRIED_S
        if due:
            self._sent, self._sent_at = status, now
            self._send(status)
        self._timer = self._loop.call_later(self._pause_s, self._on_time)
