"""The protocol by which a program attaches to a server of the same machine: addresses, messages, and sockets.
Both sides are implemented in ``supervisor/attach``.

A server listens on AF_UNIX sockets for each of its ports; a client computes their addresses from the port.
There are two: a file in ``$XDG_RUNTIME_DIR/gpuserve``, which no other user can create, and an abstract name,
which other users can take but which needs no folder::

    program -> server   Hello, BindModel, WorkerUp, WorkerDown, UnbindModel
    server -> program   Welcome, Bound, BindRefused, Replaced, WorkerHung, Ended

Messages are framed as in ``front_messages.py``; callables are not sent. A program sends ``Hello`` first. The
server answers ``Welcome``, or ``Ended`` if the versions do not match. The end of the socket, on either side,
ends the attachment.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

from gpuserve.core.errors import AttachError
from gpuserve.supervisor.control.reactor import Channel, Reactor
from gpuserve_worker.protocol import datagram
from gpuserve_worker.protocol.wire import MessageCodec, WireError

logger = logging.getLogger(__name__)

DEFAULT_PORTS: Final = {"http": 8000, "https": 8000, "grpc": 8001, "grpcs": 8001}
_LOCAL_NAMES: Final = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
_ROOT: Final = 0
#: Format of SO_PEERCRED: process, user and group of the peer.
_CREDENTIALS: Final = struct.Struct("iII")
#: Incremented whenever a field of a message changes meaning, or a message is added.
PROTOCOL: Final = 2


def attach_name(uid: int, port: int) -> bytes:
    """Return the abstract name on which a user's server with this port accepts programs."""
    return f"\0gpuserve/{uid}/port-{port}".encode()


def attach_addresses(port: int, *, create: bool = False) -> list[bytes]:
    """Return the addresses on which this user's server with this port accepts programs."""
    return local_addresses(f"port-{port}", attach_name(os.geteuid(), port), create=create)


def may_attach(own_uid: int, peer_uid: int) -> bool:
    """Return whether one side trusts the other: a process of the same user, or of root."""
    return peer_uid in {own_uid, _ROOT}


def port_of(url: str) -> int:
    """Return the port of a URL; 8000, or 8001 for grpc://, if the URL has none. Raise AttachError if the text
    is not the URL of a server, or the server is on another machine.
    """
    parts = server_url(url) if isinstance(url, str) else None
    if parts is None:
        expected = "localhost:8000, http://localhost:8000 or grpc://localhost:8001"
        raise AttachError(f"expected {expected}, given {url!r}")
    if not _is_here(parts.hostname or ""):
        here = f"attaching works on one machine only, and {parts.hostname!r} is not this one"
        raise AttachError(f"cannot attach to {url!r}: {here}")
    return parts.port or DEFAULT_PORTS[parts.scheme]


def server_url(text: str) -> SplitResult | None:
    """Parse the URL of a server, whose scheme is optional. Return None if the text is not such a URL."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        is_good = parts.scheme in DEFAULT_PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
        return None
    more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    return parts if is_good and not more else None


def _is_here(host: str) -> bool:
    if host in _LOCAL_NAMES or host == socket.gethostname().lower():
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


# ---- messages: program -> server ------------------------------------------------------------


class Hello(NamedTuple):
    """The first message: the version of this protocol, and of the protocol of workers (``wire.PROTOCOL``)."""

    protocol: int
    worker_protocol: int


class BindModel(NamedTuple):
    """A model (``ModelSpec.to_wire``) to be served as soon as its instances are up."""

    spec: dict[str, Any]


class WorkerUp(NamedTuple):
    """A worker that is loaded, as ``InstanceUp``, with the descriptors of its link and its pidfd."""

    model: str
    instance: str
    pid: int
    slots: int
    load_s: float = 0.0


class WorkerDown(NamedTuple):
    """A worker that died. It restarts in ``restart_in_s``."""

    model: str
    instance: str
    reason: str
    restart_in_s: float


class UnbindModel(NamedTuple):
    """A model to be withdrawn, because it was unbound or failed to load."""

    model: str


# ---- messages: server -> program ------------------------------------------------------------


class Welcome(NamedTuple):
    """The server accepts models. Its name, and its addresses by "http", "grpc", "metrics" and "health"."""

    name: str
    addresses: dict[str, str]


class Bound(NamedTuple):
    """A model that is served from now on."""

    model: str


class BindRefused(NamedTuple):
    """A model that is not served, with a sentence that says why."""

    model: str
    text: str


class Replaced(NamedTuple):
    """A model that another program serves from now on under the same name."""

    model: str


class WorkerHung(NamedTuple):
    """An overdue call, as ``ExecutionHung``. With a limit the server has stopped using the worker."""

    model: str
    instance: str
    pid: int
    ran_s: float
    limit_s: float


class Ended(NamedTuple):
    """The end of the attachment by the server; ``reason`` is a sentence."""

    reason: str


ATTACH: Final = MessageCodec(
    dict(enumerate((Hello, BindModel, UnbindModel, WorkerUp, WorkerDown), start=1))
    | dict(enumerate((Welcome, Bound, BindRefused, Replaced, Ended, WorkerHung), start=20))
)


class PeerCredentials(NamedTuple):
    """The process that connected or listened at the other end; pid 0 if it is not visible."""

    pid: int
    uid: int


def connect(port: int) -> socket.socket:
    """Connect to the port's server of this user; raise OSError, or PermissionError for another user's."""
    *files, name = attach_addresses(port)
    for path in files:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):  # no server has the file
            return _connected(path)
    return _connected(name)


def _connected(address: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)  # a server that does not accept has a full backlog
        sock.connect(address)
        peer = peer_credentials(sock)
        if not may_attach(os.geteuid(), peer.uid):
            raise PermissionError(f"process {peer.pid} listens there and belongs to user {peer.uid}")
    except OSError:
        sock.close()
        raise
    return sock


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return PeerCredentials(pid, uid)


class AttachConnection:
    """One end of an attachment, from ``open()`` to ``close()`` or to the loss of the peer. Its end shows by
    the socket and by its pidfd, because a child that the peer has forked may hold the socket open.
    ``on_message`` may raise ``WireError``, and removes descriptors from the list to keep them. ``on_lost`` is
    called once, unless ``close()`` came first.
    """

    def __init__(
        self,
        sock: socket.socket,
        reactor: Reactor,
        on_message: Callable[[Any, list[int]], None],
        on_lost: Callable[[str], None],
        send_timeout_s: float,
    ) -> None:
        self.peer = peer_credentials(sock)
        self._channel = Channel(sock, ATTACH, send_timeout_s)
        self._reactor = reactor
        self._on_message = on_message
        self._on_lost = on_lost
        self._death_fd: int | None = None
        self._closed = False

    def open(self) -> None:
        self._reactor.watch(self._channel.fileno(), self._on_readable)
        with contextlib.suppress(OSError):  # in another pid namespace only the socket shows the end
            self._death_fd = os.pidfd_open(self.peer.pid)
            self._reactor.watch(self._death_fd, self._on_died)

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message to the peer, which may have ended. The caller keeps the descriptors."""
        if self._closed:
            return
        try:
            self._channel.send(message, fds)
        except TimeoutError:
            # Later, because the caller may be in the middle of a change.
            self._reactor.call_later(0.0, lambda: self._lose("it does not read its messages"))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._reactor.unwatch(self._channel.fileno())
        self._channel.close()
        if self._death_fd is not None:
            self._reactor.unwatch(self._death_fd)
            os.close(self._death_fd)

    def _on_readable(self) -> None:
        try:
            received = self._channel.receive_with_fds()
        except BlockingIOError:
            return
        except (WireError, OSError) as error:
            self._break_off(error)
            return
        if received is None:
            self._lose("it has ended")
            return
        message, fds = received
        try:
            self._on_message(message, fds)
        except WireError as error:
            self._break_off(error)
        finally:
            datagram.close_all(fds)

    def _on_died(self) -> None:
        while not self._closed and self._channel.pending():
            self._on_readable()
        self._lose("it has ended")

    def _break_off(self, error: Exception) -> None:
        logger.error("closed the attachment of process %d: it broke the protocol: %s", self.peer.pid, error)
        self._lose("it broke the protocol")

    def _lose(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._on_lost(reason)


#: ``sun_path`` has 108 bytes, including the zero byte at the end.
_MAX_PATH_NBYTES: Final = 107
_OWNER_ONLY: Final = 0o700
_OTHERS_WRITE: Final = 0o022


def local_addresses(file: str, name: bytes, *, create: bool = False) -> list[bytes]:
    """Return the addresses of this user's server in the order in which clients try them: the path of ``file``
    if there is a runtime folder and the path is not too long, then the abstract ``name``.
    """
    folder = _runtime_folder(create=create)
    path = os.fsencode(os.path.join(folder, file)) if folder else b""
    return [path, name] if 0 < len(path) <= _MAX_PATH_NBYTES else [name]


def private_owner(folder: str) -> int | None:
    """Return the user who alone can enter a folder; None if others can, or if it is no folder (a link)."""
    try:
        found = os.lstat(folder)
    except OSError:
        return None
    is_private = stat.S_ISDIR(found.st_mode) and found.st_mode & 0o777 == _OWNER_ONLY
    return found.st_uid if is_private else None


def _runtime_folder(*, create: bool) -> str | None:
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.isabs(base):
        return None
    folder = os.path.join(base, "gpuserve")
    try:
        found = os.stat(base)
        if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
            return None
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, _OWNER_ONLY)
    except OSError:
        return None
    return folder if private_owner(folder) == os.geteuid() else None
