"""The attachment of a program to a server of the same machine: where the server is found, what the two say,
and the sockets that they say it on. What either side does about it is in ``supervisor/attach``.

A server listens on one AF_UNIX socket for each of its ports; a client computes the addresses of the socket
from the port (``local_address.py``).

::

    program -> server   Hello, BindModel, WorkerUp, WorkerDown, UnbindModel
    server -> program   Welcome, Bound, BindRefused, Replaced, WorkerHung, Ended

Framed as in ``messages.py``; no callable travels. A program says ``Hello`` first and is answered by
``Welcome``, or by ``Ended`` where the two do not fit together. The end of the socket, on either side, is the
end of the attachment.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import SplitResult, urlsplit

from gpuserve.control.channel import Channel
from gpuserve.control.local_address import local_addresses
from gpuserve.control.reactor import Reactor
from gpuserve.errors import AttachError
from gpuserve_worker.protocol import datagram
from gpuserve_worker.protocol.wire import Vocabulary, WireError

logger = logging.getLogger(__name__)


DEFAULT_PORTS: Final = {"http": 8000, "https": 8000, "grpc": 8001, "grpcs": 8001}
_LOCAL_NAMES: Final = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
_ROOT: Final = 0
#: Of SO_PEERCRED: the process, the user and the group at the other end.
_CREDENTIALS: Final = struct.Struct("iII")
#: Raised whenever a field of a message changes meaning, or there is one more message.
PROTOCOL: Final = 2


# ---- addresses ------------------------------------------------------------------------------


def attach_name(uid: int, port: int) -> bytes:
    """Return the abstract name on which a user's server with this port takes attachments."""
    return f"\0gpuserve/{uid}/port-{port}".encode()


def attach_addresses(port: int, *, create: bool = False) -> list[bytes]:
    """Return the addresses on which this user's server with this port takes attachments."""
    return local_addresses(f"port-{port}", attach_name(os.geteuid(), port), create=create)


def may_attach(own_uid: int, peer_uid: int) -> bool:
    """Whether one side trusts the other: it is of the same user, or of root, who may do everything anyway."""
    return peer_uid in {own_uid, _ROOT}


def port_of(url: str) -> int:
    """Return the port that a url names; 8000, or 8001 for grpc://, where it names none. Raises AttachError:
    the text is not a url of a server, or the server is on another machine.
    """
    parts = server_url(url) if isinstance(url, str) else None
    if parts is None:
        raise AttachError(
            f"expected localhost:8000, http://localhost:8000 or grpc://localhost:8001, given {url!r}"
        )
    if not _is_here(parts.hostname or ""):
        raise AttachError(
            f"cannot attach to {url!r}: attaching works on one machine only, and {parts.hostname!r} is not "
            "this one"
        )
    return parts.port or DEFAULT_PORTS[parts.scheme]


def server_url(text: str) -> SplitResult | None:
    """Read the url of a server, which may lack its scheme; None where the text is none."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        is_good = parts.scheme in DEFAULT_PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
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
    """The first message: this protocol, and that of the program's workers (``wire.PROTOCOL``)."""

    protocol: int
    worker_protocol: int


class BindModel(NamedTuple):
    """A model to be served (``ModelSpec.to_wire``) as soon as its instances are up."""

    spec: dict[str, Any]


class WorkerUp(NamedTuple):
    """A worker is loaded, as ``messages.InstanceUp`` says it; its link and its pidfd ride beside."""

    model: str
    instance: str
    pid: int
    slots: int
    load_s: float = 0.0


class WorkerDown(NamedTuple):
    """A worker is dead. Its successor comes in ``restart_in_s``."""

    model: str
    instance: str
    reason: str
    restart_in_s: float


class UnbindModel(NamedTuple):
    """A model that is no more, or could not be loaded."""

    model: str


# ---- messages: server -> program ------------------------------------------------------------


class Welcome(NamedTuple):
    """The server takes models. Its name, and its addresses by "http", "grpc", "metrics" and "health"."""

    name: str
    addresses: dict[str, str]


class Bound(NamedTuple):
    """A model is served from now on."""

    model: str


class BindRefused(NamedTuple):
    """A model is not served; ``text`` is a sentence that says why."""

    model: str
    text: str


class Replaced(NamedTuple):
    """Another program serves a model of this name now; this one's is forgotten."""

    model: str


class WorkerHung(NamedTuple):
    """A callable is not back, as ``messages.ExecutionHung`` says it. With a limit the server has let the
    worker go.
    """

    model: str
    instance: str
    pid: int
    ran_s: float
    limit_s: float


class Ended(NamedTuple):
    """The server lets this program go; ``reason`` is a sentence."""

    reason: str


ATTACH: Final = Vocabulary(
    {
        1: Hello,
        2: BindModel,
        3: UnbindModel,
        4: WorkerUp,
        5: WorkerDown,
        20: Welcome,
        21: Bound,
        22: BindRefused,
        23: Replaced,
        24: Ended,
        25: WorkerHung,
    }
)


# ---- sockets --------------------------------------------------------------------------------


class PeerCredentials(NamedTuple):
    """The process at the other end when it connected or listened. The pid is 0 where it is not visible."""

    pid: int
    uid: int


def connect(port: int) -> socket.socket:
    """Connect to this user's server of the port. Raises OSError: none listens there, or accepts now;
    PermissionError: a process of another user listens there.
    """
    *files, name = attach_addresses(port)
    for path in files:
        with contextlib.suppress(
            FileNotFoundError, ConnectionRefusedError
        ):  # no server has the file (any more)
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


class AttachEvents(Protocol):
    """Who hears the other end of an attachment. Called in the reactor's thread."""

    def heard(self, message: Any, fds: list[int]) -> None:
        """Obey a message, or raise ``WireError``; descriptors that are kept are taken out of the list."""

    def lost(self, reason: str) -> None:
        """The peer is gone, for ``reason``; told once, unless ``close()`` came first."""


class AttachEnd:
    """One end of an attachment, from ``open()`` to ``close()`` or to the loss of the other end. The kernel
    says who the peer is. That it has ended is told by its end of the socket, and by its pidfd as well: a
    child that it forked may hold the socket open.
    """

    def __init__(
        self, sock: socket.socket, reactor: Reactor, events: AttachEvents, *, send_timeout_s: float
    ) -> None:
        self.peer = peer_credentials(sock)
        self._channel = Channel(sock, ATTACH, send_timeout_s)
        self._reactor = reactor
        self._events = events
        self._death_fd: int | None = None
        self._closed = False

    def open(self) -> None:
        self._reactor.watch(self._channel.fileno(), self._on_readable)
        with contextlib.suppress(OSError):  # of another pid namespace: then its socket has to tell
            self._death_fd = os.pidfd_open(self.peer.pid)
            self._reactor.watch(self._death_fd, self._on_died)

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message to the peer, which may be gone already. The descriptors stay the caller's."""
        if self._closed:
            return
        try:
            self._channel.send(message, fds)
        except TimeoutError:
            # Not at once: who sends may be in the middle of something.
            self._reactor.call_later(0.0, lambda: self._lose("it does not read what it is told"))

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
            self._broke_off(error)
            return
        if received is None:
            self._lose("it has ended")
            return
        message, fds = received
        try:
            self._events.heard(message, fds)
        except WireError as error:
            self._broke_off(error)
        finally:
            datagram.close_all(fds)

    def _on_died(self) -> None:
        """Read what the peer said before it ended, and then lose it."""
        while not self._closed and self._channel.pending():
            self._on_readable()
        self._lose("it has ended")

    def _broke_off(self, error: Exception) -> None:
        logger.error("process %d broke the protocol of attachments, and is let go: %s", self.peer.pid, error)
        self._lose("it broke the protocol")

    def _lose(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._events.lost(reason)
