"""Listening sockets: the server's ports, and AF_UNIX sockets for processes of this user and of root."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from gpuserve.config.settings.logs import RateLimitedLog
from gpuserve.config.settings.server import ServerSettings
from gpuserve.config.settings.tls import tls_files
from gpuserve.core.errors import StartupError
from gpuserve.supervisor.control.attach_protocol import may_attach, peer_credentials
from gpuserve.supervisor.control.operator_client import holder_of
from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.processes.service_manager import InheritedListener
from gpuserve_worker.protocol.datagram import SpareDescriptor

logger = logging.getLogger(__name__)

#: The kernel's default limit (net.core.somaxconn): clients that reconnect at once are not refused.
BACKLOG: Final = 4096
#: Formats of a role's address, without and with TLS.
_FORMS: Final = {
    "http": ("http://{}", "https://{}"),
    "grpc": ("{}", "grpcs://{}"),
    "metrics": ("http://{}/metrics", "https://{}/metrics"),
    "health": ("http://{}", "http://{}"),
}


class Listeners:
    """The open listeners by role ("http", "grpc", "metrics", "health"). Owner of them until ``close()``."""

    def __init__(self) -> None:
        self.sockets: dict[str, socket.socket] = {}
        #: Whether another process keeps the ports open after the end of this server.
        self.are_inherited = False

    def open(self, settings: ServerSettings, inherited: Sequence[InheritedListener] = ()) -> None:
        """Open the settings' ports that were not inherited; raise StartupError, with no port open."""
        self.sockets.update(_by_role(settings, inherited))
        self.are_inherited = bool(inherited)
        for role, port in settings.ports.items():
            if role not in self.sockets:
                host = settings.host_of(role)
                # grpc.aio binds the port itself, beside our socket, which reserves the port.
                reserve_only = role == "grpc" and settings.transport == "grpcio"
                try:
                    self.sockets[role] = _open(host, port, reserve_only)
                except OSError as error:
                    self.close()
                    problem = f"{error.strerror or error}{_holder_of_port(error, port)}"
                    raise StartupError(f"cannot listen on {host}:{port} for {role}: {problem}") from error

    def port(self, role: str) -> int | None:
        """Return the port that a role was bound to; None if the role is switched off."""
        listener = self.sockets.get(role)
        return None if listener is None else int(listener.getsockname()[1])

    def addresses(self, settings: ServerSettings) -> dict[str, str]:
        """Return the address of each role for clients on this machine; https:// and grpcs:// with TLS."""
        secure = () if tls_files(settings) is None else settings.tls_ports
        hosts = {role: f"{reachable(settings.host_of(role))}:{self.port(role)}" for role in self.sockets}
        return {role: _FORMS[role][role in secure].format(host) for role, host in hosts.items()}

    def close(self) -> None:
        for listener in self.sockets.values():
            listener.close()
        self.sockets.clear()


def _by_role(settings: ServerSettings, inherited: Sequence[InheritedListener]) -> dict[str, socket.socket]:
    """Return the inherited listeners by role: that of their name, else the role with their port."""
    roles = {port: role for role, port in settings.ports.items()}
    found: dict[str, socket.socket] = {}
    for listener in inherited:
        role = listener.name if listener.name in _FORMS else roles.get(listener.port)
        if role is None or role in found:
            problem = "has no role" if role is None else f"is a second one for {role}"
            raise StartupError(
                f"the inherited listener of port {listener.port} {problem}: expected a port of the settings, "
                f"or one of the names {', '.join(_FORMS)}"
            )
        if role == "grpc" and settings.transport == "grpcio":
            raise StartupError("transport grpcio opens its port itself, and cannot use an inherited listener")
        found[role] = listener.sock
    return found


def _holder_of_port(error: OSError, port: int) -> str:
    """Return ", by PROCESS" if another process has the port, "" if that is not the error, or is unknown."""
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


_BACKLOG: Final = 128
#: Delay before another try to accept connections when no descriptors are left.
_RETRY_S: Final = 1.0
#: After this many connections of other users, accept none for ``_REST_S``: they may come in a flood.
_STRANGERS: Final = 128
_REST_S: Final = 0.05


class LocalListener:
    """A listener on local addresses, until ``close()``. ``on_connected`` is called with each connection and
    owns it. ``purpose`` is what clients want, for the log, as in "attach".
    """

    def __init__(self, reactor: Reactor, on_connected: Callable[[socket.socket], None], purpose: str) -> None:
        self._reactor = reactor
        self._on_connected = on_connected
        self._purpose = purpose
        self._socks: list[socket.socket] = []
        self._is_accepting = True
        self._spare = SpareDescriptor()
        self._refusals = RateLimitedLog(logger)
        self._n_strangers = 0

    def open(self, addresses: Sequence[bytes], otherwise: str, *, required: bool) -> None:
        """Accept connections here too. If no address is free, log ``otherwise``, or raise if ``required``."""
        socks, problems = [], []
        for address in addresses:
            try:
                socks.append(_listening(address))
            except OSError as error:
                problems.append((address, f"{error.strerror or error}{_holder_of_name(address)}"))
        if socks:
            for address, problem in problems:
                shown = os.fsdecode(address.replace(b"\0", b"@"))
                logger.warning("the server did not bind %s, one of its local addresses: %s", shown, problem)
            self._spare.hold()
            self._socks += socks
            self._watch()
        else:
            text = f"{otherwise}: {problems[-1][1]}"
            if required:
                raise StartupError(f"{text} (the setting require_control is on)")
            logger.error("%s", text)

    def pause(self) -> None:
        """Let new connections wait in the backlog, until ``resume()``."""
        self._is_accepting = False
        self._unwatch()

    def resume(self) -> None:
        self._is_accepting = True
        self._watch()

    def close(self) -> None:
        self.pause()
        for sock in self._socks:
            if isinstance(address := sock.getsockname(), str):
                # No other server can replace the file before the socket is closed. At logout the system may
                # have removed the folder.
                with contextlib.suppress(OSError):
                    os.unlink(address)
            sock.close()
        self._socks.clear()
        self._spare.release()

    def _watch(self) -> None:
        if self._is_accepting:
            self._unwatch()
            for sock in self._socks:
                self._reactor.watch(sock.fileno(), partial(self._accept, sock))

    def _unwatch(self) -> None:
        for sock in self._socks:
            self._reactor.unwatch(sock.fileno())

    def _accept(self, listener: socket.socket) -> None:
        self._spare.hold()
        try:
            sock = self._accept_one(listener)
        except BlockingIOError:
            return
        except OSError as error:  # no descriptors are left, which may pass
            logger.error("no process can %s now: %s", self._purpose, error.strerror or error)
            self._unwatch()
            self._reactor.call_later(_RETRY_S, self._watch)
            return
        peer = peer_credentials(sock)
        if may_attach(os.geteuid(), peer.uid):
            self._on_connected(sock)
        else:
            sock.close()
            text = "process %d may not %s: it belongs to user %d"
            self._refusals.say(text, peer.pid, self._purpose, peer.uid)
            self._n_strangers += 1
            if not self._n_strangers % _STRANGERS:
                self._unwatch()
                self._reactor.call_later(_REST_S, self._watch)

    def _accept_one(self, listener: socket.socket) -> socket.socket:
        """Accept one connection, with the spare descriptor if no other is left. Raise OSError."""
        try:
            return listener.accept()[0]
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._spare.release():
                raise
        return listener.accept()[0]


def _listening(address: bytes) -> socket.socket:
    """Listen on an abstract name, or on a file that replaces the file of a killed server. Raise OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if address.startswith(b"\0"):
            sock.bind(address)
        else:
            _bind_file(sock, address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _bind_file(sock: socket.socket, path: bytes) -> None:
    """Bind to a file that only this user can use, and remove files of killed servers from its folder."""
    with contextlib.ExitStack() as held:
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        held.callback(os.close, folder)
        fcntl.flock(folder, fcntl.LOCK_EX)  # no other server may bind between the check and the removal
        held.callback(fcntl.flock, folder, fcntl.LOCK_UN)  # a forked child may hold the descriptor
        for entry in os.scandir(os.path.dirname(path)):
            # A server that ends removes its own file without the lock.
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode) and _is_dead(entry.path):
                    os.unlink(entry.path)
        sock.bind(path)
        os.chmod(path, 0o600)


def _is_dead(path: bytes) -> bool:
    """Return whether no process has the socket. Its type differs (EPROTOTYPE): no server notices this."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        return sock.connect_ex(path) == errno.ECONNREFUSED


def _holder_of_name(name: bytes) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        try:
            sock.connect(name)
        except OSError:
            return ""
        peer = peer_credentials(sock)
    return f" by process {peer.pid} of user {peer.uid}"
