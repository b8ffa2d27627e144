"""The other end of the control socket: finds a running server of this machine and asks it. Blocking.

Nothing heavy is imported here: a probe may run a command every few seconds.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from gpuserve.errors import ControlError
from gpuserve.supervisor.attach_address import may_attach
from gpuserve.supervisor.attach_socket import PeerCredentials, peer_credentials
from gpuserve.supervisor.operator.control_address import ControlName, host_and_port, listening_names, meant
from gpuserve.supervisor.operator.messages import OPERATE, PROTOCOL, Alive, Answered, Ask, Told
from gpuserve.supervisor.operator.outcome import Outcome
from gpuserve_worker import datagram
from gpuserve_worker.wire import WireError

_PROC_NET_UNIX: Final = Path("/proc/net/unix")
#: Seconds and microseconds: a server takes a connection soon, or hangs.
_CONNECT_TIMEOUT: Final = struct.pack("ll", 5, 0)
_ROOT: Final = 0
#: A server that has said nothing for so long hangs: it says so often that it is alive.
SILENCE_TIMEOUT_S: Final = 15.0


def ask(
    server: str | None,
    verb: str,
    arguments: Mapping[str, Any],
    tell: Callable[[str], None],
    timeout_s: float = SILENCE_TIMEOUT_S,
) -> Outcome:
    """What becomes of a verb at a server: the one at an address, or else the only one of this user.

    ``tell`` is given lines of progress. ``timeout_s``: for each message from the server.

    Raises:
        ControlError: there is no such server, or several, or it ended before it answered.
    """
    with _connected(_found(server)) as sock:
        sock.settimeout(timeout_s)
        try:
            datagram.send(sock, OPERATE.encode(Ask(PROTOCOL, verb, dict(arguments))))
            return _heard(sock, tell)
        except TimeoutError:
            raise ControlError(f"the server says nothing for {timeout_s:g} s, and seems to hang") from None
        except (WireError, OSError) as error:
            raise ControlError(f"the server broke the conversation off: {error}") from None


def _heard(sock: socket.socket, tell: Callable[[str], None]) -> Outcome:
    buffer = datagram.receive_buffer()
    while True:
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
                return Outcome(code, text, result)
            case other:
                raise WireError(f"{type(other).__name__} is no answer")


# ---- which server ---------------------------------------------------------------------------


def running() -> dict[tuple[int, int], list[ControlName]]:
    """The servers of this user: the names of each, by its user and its process."""
    return _by_process(_names())


def _found(server: str | None) -> ControlName:
    """The name of the server that is meant.

    Raises:
        ControlError: none is, or several are.
    """
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
    """The names of this user's servers; root's are everybody's."""
    uid, text = os.geteuid(), _PROC_NET_UNIX.read_text("utf-8", "replace")
    return [one for one in listening_names(text) if uid in {one.uid, _ROOT}]


def _addresses(host: str) -> set[str]:
    """The addresses of this machine that a host name stands for.

    Raises:
        ControlError: none is of this machine.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ControlError(f"--server: there is no host {host!r}") from None
    here = {str(address[0]) for family, *_, address in found if _is_here(family, address)}
    if not here:
        raise ControlError(f"--server: {host!r} is another machine; a server is operated on its own")
    return here


def _is_here(family: int, address: Any) -> bool:
    """Whether an address is one of this machine."""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind(address)
        except OSError:
            return False
        return True


def _by_process(names: Iterable[ControlName]) -> dict[tuple[int, int], list[ControlName]]:
    """The names of each server: all that one process of a user listens on."""
    found: dict[tuple[int, int], list[ControlName]] = defaultdict(list)
    for name in names:
        try:
            with _connected(name) as sock:
                peer = peer_credentials(sock)
        except ControlError:  # it has just ended, or is not what it says
            continue
        found[peer.uid, peer.pid].append(name)
    return dict(found)


def _listed(servers: Mapping[tuple[int, int], list[ControlName]]) -> str:
    """The servers that there are, each by one of its names."""
    return ", ".join(f"{min(names)} (process {pid})" for (_, pid), names in sorted(servers.items()))


def _connected(name: ControlName) -> socket.socket:
    """A connection to the server of a name.

    Raises:
        ControlError: nobody is there, or somebody else is.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Python's own timeout would not wait where the backlog is full.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _CONNECT_TIMEOUT)
        sock.connect(name.encode())
        peer: PeerCredentials = peer_credentials(sock)
    except OSError as error:
        sock.close()
        raise ControlError(f"the server at {name} cannot be reached: {error.strerror or error}") from None
    if not may_attach(name.uid, peer.uid):
        sock.close()
        raise ControlError(f"what listens at {name} belongs to another user and is no server of this one")
    return sock
