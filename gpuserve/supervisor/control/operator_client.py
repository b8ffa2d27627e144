"""Client for operator commands: finds a running server of this machine, sends it a command and waits for the
answer. Blocking, and light, because a probe may run a command every few seconds.

A server listens on one AF_UNIX socket for each of its ports, as it does for programs that attach
(``attach_protocol.py``). The names of these sockets contain the address as well, because several servers of a
machine may have the same port. ``holder_of`` finds the process that has a port.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpuserve.core.errors import ControlError
from gpuserve.supervisor.control.attach_protocol import (
    DEFAULT_PORTS,
    local_addresses,
    may_attach,
    peer_credentials,
    private_owner,
    server_url,
)
from gpuserve.supervisor.control.heartbeat import STOPPED, describe_process_state, state_of
from gpuserve.supervisor.control.operator_protocol import (
    OPERATOR_VOCABULARY,
    PROTOCOL,
    CommandKeepAlive,
    CommandProgress,
    OperatorCommand,
    VerbOutcome,
)
from gpuserve_worker.protocol import datagram
from gpuserve_worker.protocol.wire import WireError

#: Flags of a listening socket in /proc/net/unix.
_LISTENING: Final = "00010000"
_COLUMNS: Final = 8
#: Prefix of the names of socket files.
_FILE: Final = "control-"
#: A server that listens on one of these is reached at every address of its machine.
_UNSPECIFIED: Final = frozenset({"0.0.0.0", "::"})
#: A server that does not accept a connection within this time hangs. Many names share the time, because other
#: users may hold any number of abstract names that accept nothing.
_CONNECT_TIMEOUT_S: Final = 5.0
_MIN_CONNECT_TIMEOUT_S: Final = 0.001
#: A server that sends nothing for this time hangs, because it sends keep-alive messages more often.
SILENCE_TIMEOUT_S: Final = 15.0
#: Interval between two checks whether the process of the server is stopped.
_CHECK_S: Final = 1.0


def ask(
    server: str | None,
    verb: str,
    arguments: Mapping[str, Any],
    progress: Callable[[str], None],
    timeout_s: float = SILENCE_TIMEOUT_S,
) -> VerbOutcome:
    """Send a command to the server at an address, or to the only server of this user, and return the outcome.

    ``progress`` is called with lines of progress. ``timeout_s`` limits the wait for each message. Raise
    ControlError if there is no such server, there are several, or the server ends before it answers.
    """
    with _connected(_find_server(server)) as sock:
        try:
            datagram.send(sock, OPERATOR_VOCABULARY.encode(OperatorCommand(PROTOCOL, verb, dict(arguments))))
            return _receive_outcome(sock, progress, timeout_s)
        except (WireError, OSError) as error:
            raise ControlError(f"the connection to the server broke: {error}") from None


def _wait_for_message(sock: socket.socket, pid: int, timeout_s: float) -> None:
    """Wait for a message of process ``pid``. Raise ``ControlError`` at the timeout, or if it is stopped."""
    readable = select.poll()
    readable.register(sock, select.POLLIN)
    waited_s = 0.0
    while not readable.poll(min(_CHECK_S, timeout_s) * 1000):
        waited_s += _CHECK_S
        if state_of(pid) in STOPPED:
            how = f"process {pid} is stopped (SIGSTOP), and goes on after kill -CONT {pid}"
            raise ControlError(f"the server does not answer: {how}")
        if waited_s >= timeout_s:
            how = f"; process {pid}: {describe_process_state(pid)}" if pid else ""
            raise ControlError(f"the server says nothing for {timeout_s:g} s, and seems to hang{how}")


def _receive_outcome(sock: socket.socket, progress: Callable[[str], None], timeout_s: float) -> VerbOutcome:
    pid = peer_credentials(sock).pid
    buffer = datagram.receive_buffer()
    while True:
        _wait_for_message(sock, pid, timeout_s)
        data, fds = datagram.receive(sock, buffer)
        datagram.close_all(fds)
        if not data:
            raise ControlError("the server ended before it answered")
        match OPERATOR_VOCABULARY.decode(data):
            case CommandProgress(str(text)):
                progress(text)
            case CommandKeepAlive():
                pass
            case VerbOutcome(str(), str(), dict()) as outcome:
                return outcome
            case other:
                raise WireError(f"{type(other).__name__} is no answer")


def running() -> dict[tuple[int, int], list[ControlName]]:
    """Return the names of each running server of this user, by its (uid, pid)."""
    return _by_process(_names())


def _find_server(server: str | None) -> ControlName:
    if server is None:
        there, where = running(), ""
    else:
        host, port = host_and_port(server)
        there, where = _by_process(reachable_names(_names(), _addresses(host), port)), f" at {server}"
    if not there:
        others = _list_servers(running()) if server else ""
        instead = f"; there is {others}" if others else ""
        raise ControlError(f"no server of this user runs{where} on this machine{instead}")
    if len(there) > 1:
        raise ControlError(f"several servers run here{where}, choose one by --server: {_list_servers(there)}")
    return next(iter(there.values()))[0]


def _names() -> list[ControlName]:
    uid, text = os.geteuid(), Path("/proc/net/unix").read_text("utf-8", "replace")
    names = [one for one in listening_names(text) if may_attach(one.uid, uid)]
    return sorted(names, key=lambda name: not name.path)  # files first: no other user can hold one


def _addresses(host: str) -> set[str]:
    """Return the local addresses of a host name. Raise ``ControlError`` if the host is another machine."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ControlError(f"--server: there is no host {host!r}") from None
    here = set()
    for family, _, _, _, address in found:
        with socket.socket(family, socket.SOCK_STREAM) as sock, contextlib.suppress(OSError):
            sock.bind(address)
            here.add(str(address[0]))
    if not here:
        raise ControlError(f"--server: {host!r} is another machine: run this command on that machine")
    return here


def _by_process(names: Iterable[ControlName]) -> dict[tuple[int, int], list[ControlName]]:
    found: dict[tuple[int, int], list[ControlName]] = defaultdict(list)
    until = time.monotonic() + _CONNECT_TIMEOUT_S
    for name in names:
        try:
            with _connected(name, until - time.monotonic()) as sock:
                peer = peer_credentials(sock)
        except ControlError:  # the server has just ended, or the name is not a server's
            continue
        found[peer.uid, peer.pid].append(name)
    return dict(found)


def _list_servers(servers: Mapping[tuple[int, int], list[ControlName]]) -> str:
    return ", ".join(f"{min(names)} (process {pid})" for (_, pid), names in sorted(servers.items()))


def _connected(name: ControlName, timeout_s: float = _CONNECT_TIMEOUT_S) -> socket.socket:
    """Connect to the server of a name. Raise ``ControlError`` if there is none, or it is another user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # A timeout of Python's socket would not wait if the backlog is full.
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


class ControlName(NamedTuple):
    """The name of a control socket, one for each port. ``path`` is its file, or "" for the abstract name."""

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
    """Return the names of listening control sockets in the text of /proc/net/unix."""
    found = set()
    for line in proc_net_unix.splitlines():
        columns = line.split(maxsplit=_COLUMNS - 1)
        if len(columns) == _COLUMNS and columns[3] == _LISTENING and (name := _parsed(columns[-1])):
            found.add(name)
    return sorted(found)


def _parsed(path: str) -> ControlName | None:
    """Parse an abstract name as the kernel prints it, with an @ for the zero byte, or the path of a socket
    file, whose folder identifies the user. Return None if it is no control socket's.
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
    """Return the host and the port of ``--server``, or raise ``ControlError``."""
    if server.isdecimal():  # a port; urlsplit would read an IPv4 address written as one number
        server = f"localhost:{server}"
    parts = server_url(server)
    if parts is None or parts.hostname is None:
        expected = "localhost:8000, 127.0.0.2:8000 or a URL of the server"
        raise ControlError(f"--server: expected {expected}, given {server!r}")
    return parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme]


def reachable_names(names: Iterable[ControlName], addresses: Collection[str], port: int) -> list[ControlName]:
    """Return the names of servers that a client reaches at the port of one of these local addresses."""
    covering = {*addresses, *_UNSPECIFIED} if addresses else set()
    return [name for name in names if name.port == port and name.address in covering]


#: The state of a listening socket in /proc/net/tcp, and the columns of its address, state and inode.
_LISTENS: Final = "0A"
_ADDRESS, _STATE, _INODE = 1, 3, 9


class PortHolder(NamedTuple):
    """A process that listens on a port. ``is_server``: it is a gpuserve server of this user, or of root."""

    pid: int
    name: str
    is_server: bool

    def __str__(self) -> str:
        if self.is_server and self.pid == os.getpid():
            return "a server of this very program"
        kind = "the gpuserve server" if self.is_server else self.name
        return f"{kind}, process {self.pid}"


def holder_of(port: int) -> PortHolder | None:
    """Return the process that listens on a port, or None if there is none, or this user cannot see it."""
    for (_, pid), names in running().items():
        if any(one.port == port for one in names):
            return PortHolder(pid, "gpuserve", True)
    tables = [_text(Path(f"/proc/net/{table}")) for table in ("tcp", "tcp6")]
    wanted = {f"socket:[{inode}]" for table in tables for inode in listening_inodes(table, port)}
    for process in Path("/proc").glob("[0-9]*") if wanted else ():
        # The process may be another user's, or a file of it may just have been closed.
        with contextlib.suppress(OSError):
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(file) in wanted:
                        name = _text(process / "comm").strip() or "a process"
                        return PortHolder(int(process.name), name, False)
    return None


def listening_inodes(table: str, port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port, from the text of /proc/net/tcp or tcp6."""
    for line in table.splitlines()[1:]:
        columns = line.split()
        listens = len(columns) > _INODE and columns[_STATE] == _LISTENS
        if listens and int(columns[_ADDRESS].rpartition(":")[2], 16) == port:
            yield columns[_INODE]


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
