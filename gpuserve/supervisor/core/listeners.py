"""The listening sockets. The supervisor opens them once and lends them to every front."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from gpuserve.config.settings.server import ServerSettings
from gpuserve.config.settings.tls import tls_files
from gpuserve.control.port_holders import holder_of
from gpuserve.errors import StartupError

#: As many as the kernel allows by default (net.core.somaxconn): a herd of reconnecting clients waits
#: in the backlog instead of being refused.
BACKLOG: Final = 4096
#: How an address of a role is written without TLS, and with it.
_FORMS: Final = {
    "http": ("http://{}", "https://{}"),
    "grpc": ("{}", "grpcs://{}"),
    "metrics": ("http://{}/metrics", "https://{}/metrics"),
    "health": ("http://{}", "http://{}"),
}


class Listeners:
    """The open listeners by role ("http", "grpc", "metrics", "health"). Owner: ``close()`` ends them."""

    def __init__(self) -> None:
        self.sockets: dict[str, socket.socket] = {}

    def open(self, settings: ServerSettings) -> None:
        """Open every port of the settings; ``StartupError`` where one cannot be had: nothing stays open."""
        for role in _FORMS:
            port = getattr(settings, f"{role}_port")
            if port is not None:
                host = settings.host_of(role)
                # grpc.aio takes no descriptor: it binds the port itself, beside a socket of ours
                # that reserves it and never listens.
                reserve_only = role == "grpc" and settings.transport == "grpcio"
                try:
                    self.sockets[role] = _open(host, port, reserve_only)
                except OSError as error:
                    self.close()
                    raise StartupError(
                        f"cannot listen on {host}:{port} for {role}: {error.strerror or error}"
                        f"{_by_whom(error, port)}"
                    ) from error

    def port(self, role: str) -> int | None:
        """Return the port that a role got; None where it is switched off."""
        listener = self.sockets.get(role)
        return None if listener is None else int(listener.getsockname()[1])

    def addresses(self, settings: ServerSettings) -> dict[str, str]:
        """Return where clients on this machine find each role; https:// and grpcs:// where it speaks TLS."""
        secure = () if tls_files(settings) is None else settings.tls_ports
        return {
            role: _FORMS[role][role in secure].format(
                f"{reachable(settings.host_of(role))}:{self.port(role)}"
            )
            for role in self.sockets
        }

    def close(self) -> None:
        for listener in self.sockets.values():
            listener.close()
        self.sockets.clear()


def _by_whom(error: OSError, port: int) -> str:
    """Say who has the port, for a sentence; "" where that is not the problem, or cannot be seen."""
    holder = holder_of(port) if error.errno == errno.EADDRINUSE else None
    if holder is None:
        return ""
    own = holder.is_server and holder.pid == os.getpid()
    return f", by {holder}" + (": stop() it, or choose another port" if own else "")


def _open(host: str, port: int, reserve_only: bool) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reserve_only:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        if not reserve_only:
            listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def reachable(host: str) -> str:
    """Return the host to write in a command for this machine: a wildcard becomes the loopback."""
    if host in {"", "0.0.0.0", "::"}:
        return "localhost"
    return f"[{host}]" if ":" in host else host
