"""A listener on AF_UNIX sockets, which accepts processes of the same user and of root."""

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
from gpuserve.control.attach import may_attach, peer_credentials
from gpuserve.control.reactor import Reactor
from gpuserve.errors import StartupError
from gpuserve_worker.protocol.spare_descriptor import SpareDescriptor

logger = logging.getLogger(__name__)

_BACKLOG: Final = 128
#: Out of descriptors, it is tried again to take a connection after this time.
_RETRY_S: Final = 1.0
#: After so many processes of other users no connection is taken for a moment, whoever's: they may come as
#: fast as they like.
_STRANGERS: Final = 128
_REST_S: Final = 0.05


class LocalListener:
    """Listens at the addresses that it is given, until ``close()``. ``on_connected`` gets each connection and
    owns it from then on. ``purpose`` is what those who come want, for the log: "attach".
    """

    def __init__(self, reactor: Reactor, on_connected: Callable[[socket.socket], None], purpose: str) -> None:
        self._reactor = reactor
        self._on_connected = on_connected
        self._purpose = purpose
        self._socks: list[socket.socket] = []
        self._takes = True
        self._spare = SpareDescriptor()
        self._refusals = RateLimitedLog(logger)
        self._n_strangers = 0

    def open(self, addresses: Sequence[bytes], otherwise: str, *, required: bool) -> None:
        """Accept connections at these addresses as well. If other processes have all of them, log
        ``otherwise``, or raise StartupError if one of them is ``required``.
        """
        socks, problems = [], []
        for address in addresses:
            try:
                socks.append(_listening(address))
            except OSError as error:
                problems.append((address, f"{error.strerror or error}{_holder(address)}"))
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
        self._takes = False
        self._unwatch()

    def resume(self) -> None:
        self._takes = True
        self._watch()

    def close(self) -> None:
        self.pause()
        for sock in self._socks:
            _remove_file(sock)
            sock.close()
        self._socks.clear()
        self._spare.release()

    def _watch(self) -> None:
        if self._takes:
            self._unwatch()
            for sock in self._socks:
                self._reactor.watch(sock.fileno(), partial(self._accept, sock))

    def _unwatch(self) -> None:
        for sock in self._socks:
            self._reactor.unwatch(sock.fileno())

    def _accept(self, listener: socket.socket) -> None:
        self._spare.hold()
        try:
            sock = self._accepted(listener)
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors: that passes
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

    def _accepted(self, listener: socket.socket) -> socket.socket:
        """Accept one connection, by the spare descriptor if no other is left. Raises OSError."""
        try:
            return listener.accept()[0]
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._spare.release():
                raise
        return listener.accept()[0]


def _listening(address: bytes) -> socket.socket:
    """Listen on an abstract name, or on a file in place of one that a killed server left. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if address.startswith(b"\0"):
            sock.bind(address)
        else:
            _bind_file(sock, address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _bind_file(sock: socket.socket, path: bytes) -> None:
    """Bind to a file that only this user may use; remove files of killed servers from its folder."""
    with contextlib.ExitStack() as held:
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        held.callback(os.close, folder)
        fcntl.flock(folder, fcntl.LOCK_EX)  # between look and removal no other server may bind
        held.callback(fcntl.flock, folder, fcntl.LOCK_UN)  # a child may have the descriptor by a fork
        for entry in os.scandir(os.path.dirname(path)):
            with contextlib.suppress(
                FileNotFoundError
            ):  # a server that ends removes its own without the lock
                if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode) and _is_dead(entry.path):
                    os.unlink(entry.path)
        sock.bind(path)
        os.chmod(path, 0o600)


def _is_dead(path: bytes) -> bool:
    """Return whether no process has the socket of a file. No server notices the question: the kernel answers
    EPROTOTYPE for sockets of another type, which those of servers are.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        return sock.connect_ex(path) == errno.ECONNREFUSED


def _remove_file(sock: socket.socket) -> None:
    """Remove the file of a socket, which no other server replaces before the socket is closed."""
    address = sock.getsockname()
    if isinstance(address, str):
        with contextlib.suppress(OSError):  # at the user's logout the system removes the folder
            os.unlink(address)


def _holder(name: bytes) -> str:
    """Who listens on a name, for a sentence; "" where nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        try:
            sock.connect(name)
        except OSError:
            return ""
        peer = peer_credentials(sock)
    return f" by process {peer.pid} of user {peer.uid}"
