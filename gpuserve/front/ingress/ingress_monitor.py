"""The front's transport with ingress processes: accepts connections and assigns each to a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from gpuserve.config.settings.logs import LogSettings
from gpuserve.config.settings.server import ServerSettings
from gpuserve.config.settings.tls import TlsFiles
from gpuserve.front.ingress import channel_messages as messages
from gpuserve.front.ingress import monitored_ingress as monitored
from gpuserve.front.ingress.ipc_channel import IpcChannel
from gpuserve.front.ingress.monitored_ingress import IngressState
from gpuserve.front.ingress.proxied_requests import IngressSession
from gpuserve.front.net.admission import Admission
from gpuserve.front.net.async_requests import AsyncRequests
from gpuserve.front.net.listeners import Acceptor, duplicate_listener, tls_context
from gpuserve.front.net.server import CLOSE_TIMEOUT_S, IngressRow, ProtocolServer
from gpuserve.supervisor.control.front_messages import IngressDown, IngressUp

#: The time without any ingress process after which the front cannot start.
_START_TIMEOUT_S: Final = 30.0
#: The longest time for which a connection waits for an ingress process.
_WAIT_S: Final = 10.0
#: The time for which an ingress process may end, beyond that of its connections.
_END_S: Final = 2.0


class IngressMonitor(ProtocolServer):
    """``settings.ingress_processes`` ingress processes, which hold the connections of the listeners.

    ``listeners`` maps descriptors to whether they use TLS. ``stop`` closes them, and ends what ``requests``
    runs. ``serve`` creates the session of a process. ``request_start`` asks the supervisor for a process;
    ``ingress_up`` and ``ingress_down`` answer. ``record_event`` records deaths.
    """

    def __init__(
        self,
        listeners: Mapping[int, bool],
        serve: Callable[[IpcChannel], IngressSession],
        requests: AsyncRequests,
        admission: Admission,
        setup: messages.IngressSetup,
        tls: TlsFiles | None,
        record_event: Callable[..., None],
        request_start: Callable[[int], None],
    ) -> None:
        self.serve = serve
        self.admission = admission
        self.record_event = record_event
        self.request_start = request_start
        self._listeners = listeners
        self._requests = requests
        self._setup = setup
        log = ServerSettings.from_wire(setup.settings).log_settings()
        self._log = messages.ChangeLogSettings(log._asdict())
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._processes = [
            monitored.MonitoredIngress(number, self) for number in range(setup.settings["ingress_processes"])
        ]
        #: Those that accept, by descriptor.
        self._acceptors: dict[int, Acceptor] = {}
        self._waiting: deque[monitored.AcceptedConnection] = deque()
        self._expiry: asyncio.TimerHandle | None = None
        self._next_check: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Start the processes. Accept once one is up and no other is about to be, or one has survived."""
        for process in self._processes:
            process.start()
        self._check_heartbeats()  # a process that has survived the previous front may hang
        processes = self._processes
        await self._until(
            lambda: (
                not self._count(IngressState.STARTING)
                or any(one.has_survived and one.state is IngressState.UP for one in processes)
            ),
            _START_TIMEOUT_S,
        )
        await self._until(lambda: bool(self._count(IngressState.UP)), _START_TIMEOUT_S)
        if not self._count(IngressState.UP):
            raise TimeoutError(f"no ingress process came up within {_START_TIMEOUT_S:g} s")
        for fd, tls in self._listeners.items():
            self._acceptors[fd] = Acceptor(duplicate_listener(fd), partial(self._on_accepted, tls))
            self._acceptors[fd].open()

    async def stop(self) -> None:
        if self._next_check is not None:
            self._next_check.cancel()
        for fd in self._listeners:
            if fd in self._acceptors:
                self._acceptors.pop(fd).close(fd)
            else:
                os.close(fd)
        self._refuse_while(lambda _: True)
        for process in self._processes:
            process.stop()
        await self._until(self._have_ended, CLOSE_TIMEOUT_S + _END_S)
        for process in self._processes:
            process.kill()
        await self._until(self._have_ended, _END_S)
        await self._requests.stop()

    async def stop_accepting(self) -> None:
        while self._acceptors:
            self._acceptors.popitem()[1].close()

    def announce(self) -> None:
        for process in self._processes:
            process.announce()

    @property
    def n_unaware(self) -> int:
        return sum(process.n_unaware for process in self._processes)

    @property
    def n_held(self) -> int:
        return sum(process.tally.counts.n_held for process in self._processes)

    def adjust(self, changes: Mapping[str, Any]) -> None:
        self._setup = self._setup._replace(settings={**self._setup.settings, **changes})
        for process in self._processes:
            process.post(messages.ChangeSettings(dict(changes)))

    def limit_age(self, max_age_s: float) -> None:
        self.adjust({"max_connection_age_s": max_age_s})

    def log_as(self, settings: LogSettings) -> None:
        """Change the log settings of all ingress processes."""
        self._log = messages.ChangeLogSettings(settings._asdict())
        for process in self._processes:
            process.post(self._log)

    async def renew(self) -> None:
        if self._tls is not None:
            tls_context(self._tls)  # raises here if the files are invalid, while the caller can report that
            for process in self._processes:
                process.post(messages.ReloadTls())

    def ingress_up(self, message: IngressUp, fds: list[int]) -> None:
        sock, pidfd = socket.socket(fileno=fds[0]), fds[1]
        handle = monitored.IngressHandle(message.pid, pidfd)
        self._processes[message.number].on_up(handle, sock, message.restarts, survived=message.survived)

    def ingress_down(self, message: IngressDown) -> None:
        self._processes[message.number].on_down(message.pid, message.reason)

    def ingress_rows(self) -> Iterator[IngressRow]:
        for process in self._processes:
            yield IngressRow(
                process.number, process.pid, process.state.value, process.n_open, process.tally.counts
            )

    # ---- connections ---------------------------------------------------------------------------

    def _on_accepted(self, tls: bool, accepted: socket.socket, address: str | None) -> None:
        if not self.admission.admit(address, accepted.fileno()):
            accepted.close()
            return
        self._waiting.append(
            monitored.AcceptedConnection(accepted, address, tls, self._loop.time() + _WAIT_S)
        )
        self._assign_waiting()

    def _assign_waiting(self) -> None:
        up = [process for process in self._processes if process.state is IngressState.UP]
        while self._waiting and (process := monitored.choose_ingress(up, self._loop.time())) is not None:
            one = self._waiting.popleft()
            if process.n_open < self.admission.n_descriptors:
                process.assign(one)
            else:
                n = self.admission.n_descriptors
                text = f"every ingress process holds {n}, as many as its descriptors allow"
                self.admission.count_refused("descriptors", f"refused a connection: {text}")
                self._refuse(one)
        if self._waiting and self._expiry is None:
            self._expiry = self._loop.call_at(self._waiting[0].until_s, self._on_expiry)

    def requeue(self, accepted: Iterable[monitored.AcceptedConnection]) -> None:
        """Queue connections of a dead process again, before all others."""
        self._waiting.extendleft(reversed(list(accepted)))
        if self._acceptors:
            self._assign_waiting()
        else:
            self._refuse_while(lambda _: True)

    def _on_expiry(self) -> None:
        self._expiry = None
        now = self._loop.time()
        self._refuse_while(lambda one: one.until_s <= now)
        self._assign_waiting()

    def _refuse_while(self, is_over: Callable[[monitored.AcceptedConnection], bool]) -> None:
        while self._waiting and is_over(self._waiting[0]):
            self._refuse(self._waiting.popleft())

    def _refuse(self, one: monitored.AcceptedConnection) -> None:
        one.accepted.close()
        self.admission.release(one.address)

    # ---- processes ------------------------------------------------------------------------------

    def first_messages(self, process: monitored.MonitoredIngress) -> Iterator[Any]:
        yield self._setup._replace(number=process.number, counted=process.tally.counted)
        yield self._log

    def broadcast(self, sender: monitored.MonitoredIngress, message: Any) -> None:
        for process in self._processes:
            if process is not sender:
                process.post(message)

    def on_change(self) -> None:
        self._changed.set()
        self._assign_waiting()

    def _check_heartbeats(self) -> None:
        for process in self._processes:
            process.check_heartbeat()
        self._next_check = self._loop.call_later(monitored.HEARTBEAT_CHECK_S, self._check_heartbeats)

    def _count(self, state: IngressState) -> int:
        return sum(process.state is state for process in self._processes)

    def _have_ended(self) -> bool:
        return self._count(IngressState.ENDED) == len(self._processes)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
