"""How an operator's command finds a running server of its machine and asks it. Blocking. A server listens on
one AF_UNIX socket for each of its ports, as it does for programs that attach (``attach.py``). The names of
these sockets have the address as well, because several servers of a machine may have one port. Commands find
the files and the abstract names of the sockets (``local_address.py``) in the kernel's table. Nothing heavy is
imported here: a probe may run a command every few seconds.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpuserve.control.attach import DEFAULT_PORTS, may_attach, peer_credentials, server_url
from gpuserve.control.local_address import local_addresses, private_owner
from gpuserve.control.operator import OPERATE, PROTOCOL, Alive, Answered, Ask, Told, VerbOutcome
from gpuserve.control.process_state import STOPPED, how_it_is, state_of
from gpuserve.errors import ControlError
from gpuserve_worker.protocol import datagram
from gpuserve_worker.protocol.wire import WireError

#: In /proc/net/unix: the socket listens.
_LISTENING: Final = "00010000"
_COLUMNS: Final = 8
#: The name of a socket's file begins so.
_FILE: Final = "control-"
#: A server that listens on one of these is reached at every address of its machine.
_UNSPECIFIED: Final = frozenset({"0.0.0.0", "::"})
#: A server takes a connection within this time, or hangs. Many names together get the time once: other users
#: may hold any number of abstract names and accept nothing there.
_CONNECT_TIMEOUT_S: Final = 5.0
_MIN_CONNECT_TIMEOUT_S: Final = 0.001
#: A server that has said nothing for so long hangs: it says so often that it is alive.
SILENCE_TIMEOUT_S: Final = 15.0
#: So often it is looked meanwhile whether its process is stopped.
_LOOK_S: Final = 1.0


def ask(
    server: str | None,
    verb: str,
    arguments: Mapping[str, Any],
    tell: Callable[[str], None],
    timeout_s: float = SILENCE_TIMEOUT_S,
) -> VerbOutcome:
    """Ask the server at an address, or the only one of this user, for a verb and wait for the outcome.
    ``tell`` is given lines of progress. ``timeout_s`` is the limit for each message from the server. Raises
    ControlError: there is no such server, or several, or it ended before it answered.
    """
    with _connected(_found(server)) as sock:
        patience = _Patience(peer_credentials(sock).pid, timeout_s)
        try:
            datagram.send(sock, OPERATE.encode(Ask(PROTOCOL, verb, dict(arguments))))
            return _heard(sock, tell, patience)
        except (WireError, OSError) as error:
            raise ControlError(f"the connection to the server broke: {error}") from None


class _Patience:
    """How long the process of a server is waited for that says nothing; not at all while it is stopped."""

    def __init__(self, pid: int, timeout_s: float) -> None:
        self._pid = pid
        self._timeout_s = timeout_s

    def wait(self, sock: socket.socket) -> None:
        """Return when something has come, or raise ``ControlError``."""
        readable = select.poll()
        readable.register(sock, select.POLLIN)
        waited_s = 0.0
        while not readable.poll(min(_LOOK_S, self._timeout_s) * 1000):
            waited_s += _LOOK_S
            if state_of(self._pid) in STOPPED:
                how = f"process {self._pid} is stopped (SIGSTOP), and goes on after kill -CONT {self._pid}"
                raise ControlError(f"the server does not answer: {how}")
            if waited_s >= self._timeout_s:
                how = f"; process {self._pid}: {how_it_is(self._pid)}" if self._pid else ""
                text = f"the server says nothing for {self._timeout_s:g} s, and seems to hang{how}"
                raise ControlError(text)


def _heard(sock: socket.socket, tell: Callable[[str], None], patience: _Patience) -> VerbOutcome:
    buffer = datagram.receive_buffer()
    while True:
        patience.wait(sock)
        data, fds = datagram.receive(sock, buffer)
        datagram.close_all(fds)
        if not data:
            raise ControlError("the server ended before it answered")
        match OPERATE.decode(data):
            case Told(str(text)):
                tell(text)
            case Alive():
                pass
            case Answered(str(code), str(text), dict(result)):
                return VerbOutcome(code, text, result)
            case other:
                raise WireError(f"{type(other).__name__} is no answer")


# ---- which server ---------------------------------------------------------------------------


def running() -> dict[tuple[int, int], list[ControlName]]:
    """Return the names of each running server of this user, by its (uid, pid)."""
    return _by_process(_names())


def _found(server: str | None) -> ControlName:
    if server is None:
        there, where = running(), ""
    else:
        host, port = host_and_port(server)
        there, where = _by_process(meant(_names(), _addresses(host), port)), f" at {server}"
    if not there:
        others = _listed(running()) if server else ""
        instead = f"; there is {others}" if others else ""
        raise ControlError(f"no server of this user runs{where} on this machine{instead}")
    if len(there) > 1:
        raise ControlError(f"several servers run here{where}, choose one by --server: {_listed(there)}")
    return next(iter(there.values()))[0]


def _names() -> list[ControlName]:
    uid, text = os.geteuid(), Path("/proc/net/unix").read_text("utf-8", "replace")
    names = [one for one in listening_names(text) if may_attach(one.uid, uid)]
    return sorted(names, key=lambda one: not one.path)  # no other user can hold a file


def _addresses(host: str) -> set[str]:
    """Return the addresses here behind a host name; ``ControlError`` where it is of another machine."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ControlError(f"--server: there is no host {host!r}") from None
    here = {str(address[0]) for family, *_, address in found if _is_here(family, address)}
    if not here:
        raise ControlError(f"--server: {host!r} is another machine: run this command on that machine")
    return here


def _is_here(family: int, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind(address)
        except OSError:
            return False
        return True


def _by_process(names: Iterable[ControlName]) -> dict[tuple[int, int], list[ControlName]]:
    found: dict[tuple[int, int], list[ControlName]] = defaultdict(list)
    until = time.monotonic() + _CONNECT_TIMEOUT_S
    for name in names:
        try:
            with _connected(name, until - time.monotonic()) as sock:
                peer = peer_credentials(sock)
        except ControlError:  # it has just ended, or is not what it says
            continue
        found[peer.uid, peer.pid].append(name)
    return dict(found)


def _listed(servers: Mapping[tuple[int, int], list[ControlName]]) -> str:
    return ", ".join(f"{min(names)} (process {pid})" for (_, pid), names in sorted(servers.items()))


def _connected(name: ControlName, timeout_s: float = _CONNECT_TIMEOUT_S) -> socket.socket:
    """Connect to the server of a name; ``ControlError`` where none is there, or one of another user."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Python's own timeout would not wait where the backlog is full.
        seconds, rest = divmod(max(timeout_s, _MIN_CONNECT_TIMEOUT_S), 1.0)
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6))
        )
        sock.connect(name.encode())
        peer = peer_credentials(sock)
    except OSError as error:
        sock.close()
        raise ControlError(f"the server at {name} cannot be reached: {error.strerror or error}") from None
    if not may_attach(name.uid, peer.uid):
        sock.close()
        raise ControlError(f"what listens at {name} belongs to another user and is no server of this one")
    return sock


# ---- names ----------------------------------------------------------------------------------


class ControlName(NamedTuple):
    """A socket on which a server takes its operator's commands; the server has one for each of its ports.
    ``path`` is the socket's file, "" for its abstract name.
    """

    uid: int
    address: str
    port: int
    path: str = ""

    def encode(self) -> bytes:
        """Return the address for ``connect``."""
        if self.path:
            return os.fsencode(self.path)
        return f"\0gpuserve/{self.uid}/control/{self.address}:{self.port}".encode()

    def addresses(self) -> list[bytes]:
        """Return the addresses on which a server of this process's user listens."""
        return local_addresses(f"{_FILE}{self.address}:{self.port}", self.encode(), create=True)

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def listening_names(proc_net_unix: str) -> list[ControlName]:
    """Return the names of ours in the text of /proc/net/unix that a process listens on."""
    found = set()
    for line in proc_net_unix.splitlines():
        columns = line.split(maxsplit=_COLUMNS - 1)
        if len(columns) == _COLUMNS and columns[3] == _LISTENING and (name := _parsed(columns[-1])):
            found.add(name)
    return sorted(found)


def _parsed(path: str) -> ControlName | None:
    """Read an abstract name as the kernel prints it, with an @ for the zero byte, or the path of a socket
    file, whose folder tells the user. Returns None if the name is not ours.
    """
    if path.startswith("/"):
        folder, _, file = path.rpartition("/")
        is_ours = folder.endswith("/gpuserve") and file.startswith(_FILE)
        owner, where = private_owner(folder) if is_ours else None, file.removeprefix(_FILE)
    else:
        root, _, rest = path.partition("/")
        uid, _, where = rest.partition("/control/")
        owner, path = int(uid) if root == "@gpuserve" and uid.isdecimal() else None, ""
    address, _, port = where.rpartition(":")
    if owner is None or not port.isdecimal() or not address:
        return None
    return ControlName(owner, address, int(port), path)


def host_and_port(server: str) -> tuple[str, int]:
    """Return the host and the port that ``--server`` names, or raise ``ControlError``."""
    if server.isdecimal():  # or else an IPv4 address, written as one number
        server = f"localhost:{server}"
    parts = server_url(server)
    if parts is None or parts.hostname is None:
        raise ControlError(
            f"--server: expected localhost:8000, 127.0.0.2:8000 or a URL of the server, given {server!r}"
        )
    return parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme]


def meant(names: Iterable[ControlName], addresses: Collection[str], port: int) -> list[ControlName]:
    """Choose the names that a client reaches by connecting to the port at one of these addresses of ours."""
    return [one for one in names if one.port == port and _covers(one.address, addresses)]


def _covers(own: str, addresses: Collection[str]) -> bool:
    return own in addresses or (bool(addresses) and own in _UNSPECIFIED)
