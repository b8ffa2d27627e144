"""The service manager that started the server, such as systemd: inherited listeners (sd_listen_fds(3)) and
notifications of the server's state (sd_notify(3)). Both protocols need no library.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping
from typing import Final, NamedTuple

from gpuserve.core.errors import StartupError
from gpuserve.core.event_log import Event, EventKind
from gpuserve.supervisor.processes.lifecycle import ServerState

#: The first inherited descriptor.
_FIRST_FD: Final = 3
_US_PER_S: Final = 1_000_000


class InheritedListener(NamedTuple):
    """A listening socket of the service manager, and its ``FileDescriptorName``. Borrowed: the service
    manager keeps a descriptor too, so connections wait in its backlog while no server runs.
    """

    name: str
    sock: socket.socket

    @property
    def port(self) -> int:
        return int(self.sock.getsockname()[1])


class ServiceManager:
    """The service manager of this process, as the environment describes it. Its variables are removed from
    the environment, because they are not for children. Raise StartupError if a descriptor is no listener.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._address = environment.pop("NOTIFY_SOCKET", "")
        self.listeners = _inherited(environment)
        watchdog_us = environment.pop("WATCHDOG_USEC", "")
        is_watched = environment.pop("WATCHDOG_PID", "") in {"", str(os.getpid())} and watchdog_us.isdecimal()
        #: Longest time between two notifications of the watchdog; 0 if it is off.
        self.watchdog_s = int(watchdog_us) / _US_PER_S if is_watched else 0.0

    def on_event(self, event: Event) -> None:
        """Notify the service manager if an event changes the state of the server, or ends a reload."""
        if event.kind is EventKind.CONFIG_RELOADED:
            failed = event.facts.get("reason", "").partition("\n")[0]
            self._notify(
                "READY=1", f"STATUS=the last reload failed: {failed}" if failed else "STATUS=serving"
            )
        elif event.kind is EventKind.SERVER_STATE:
            match event.facts["state"]:
                case ServerState.SERVING.value:
                    self._notify("READY=1", "STATUS=serving")
                case ServerState.DRAINING.value | ServerState.STOPPING.value:
                    self._notify("STOPPING=1", "STATUS=finishing queued requests")

    def reload_started(self) -> None:
        self._notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reloading")

    def heartbeat(self) -> None:
        self._notify("WATCHDOG=1")

    def _notify(self, *assignments: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        # A service manager that does not listen must not end the server.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(assignments).encode(), address)


def _inherited(environment: MutableMapping[str, str]) -> list[InheritedListener]:
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    names = environment.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    found = []
    for position in range(int(count)):
        fd = _FIRST_FD + position
        try:
            sock = socket.socket(fileno=fd)
            is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise StartupError(f"descriptor {fd} of the service manager: {error.strerror}") from error
        if not is_listening or sock.family not in {socket.AF_INET, socket.AF_INET6}:
            raise StartupError(
                f"descriptor {fd} of the service manager is not usable: expected a listening TCP socket"
            )
        sock.set_inheritable(False)
        sock.setblocking(False)
        found.append(InheritedListener(names[position] if position < len(names) else "", sock))
    return found
