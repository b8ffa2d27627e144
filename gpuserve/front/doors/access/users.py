"""Which user of this machine a client is, by the kernel's word: a unix socket knows, of a loopback connection
sock_diag(7) is asked, which takes a tenth of a millisecond. Where it cannot be asked, nobody knows.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from pathlib import Path
from typing import Final

from gpuserve.front.doors.access.endpoints import Endpoint
from gpuserve.front.doors.access.peers import address_of, is_local
from gpuserve.front.exchange.exchange import Ends, Exchange, Head

#: Of SO_PEERCRED: the process, the user and the group at the other end.
_CREDENTIALS: Final = struct.Struct("iII")
_INET_DIAG: Final = 4
_BY_FAMILY: Final = 20
_REQUEST: Final = 1
#: The head of a message: its size, what it is, and how it is meant.
_HEAD: Final = struct.Struct("=IHHII")
#: A question: of which protocol, and what is wanted; then the ports and addresses, of any device and life.
_QUESTION: Final = struct.Struct("=BBBxI")
_ADDRESSES: Final = struct.Struct("!HH16s16sIII")
_ANY: Final = (1 << 32) - 1
_N_USERS: Final = _ANY
#: An answer: the family and the state, and further on the user and the inode.
_STATE: Final = struct.Struct("=BB")
_USER: Final = struct.Struct("=II")
_USER_AT: Final = 4 + _ADDRESSES.size + 12
_ESTABLISHED: Final = 1
#: What is answered to this request depends on who sends it.
_REGISTER: Final = Endpoint.SYSTEM_REGION_REGISTER


def depends_on_user(head: Head) -> bool:
    """Whether who answers a request with this head asks for its user."""
    if head.is_grpc:
        return head.path.endswith(f"/{_REGISTER.rpc}")
    return head.method == _REGISTER.method and _REGISTER.pattern.fullmatch(head.raw_path) is not None


def user_of(exchange: Exchange) -> int | None:
    """The user (uid) of a request's client; None where it is on another machine, or not known."""
    ends, sock = exchange.ends, exchange.ends.socket
    if not is_local(address_of(ends), exchange.head.headers):
        return None
    if sock is None:
        return ends.user
    try:
        if ends.client is None:
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return _known(_CREDENTIALS.unpack(raw)[1])
        user = _maker_of(ends)
        # Of a client that has gone, the address may be somebody else's.
        stays = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
        return _known(user) if stays and user is not None else None
    except OSError:
        return None


def _maker_of(ends: Ends) -> int | None:
    """The user who made the client's end over loopback; None where it is gone; OSError: nobody can tell."""
    assert ends.client is not None
    client, server = (ipaddress.ip_address(end[0]) for end in (ends.client, ends.server))
    family = socket.AF_INET if client.version == 4 else socket.AF_INET6
    ports = ends.client[1], ends.server[1] or 0
    asked = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, _ANY)
    asked += _ADDRESSES.pack(*ports, client.packed, server.packed, 0, _ANY, _ANY)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _INET_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(_HEAD.pack(_HEAD.size + len(asked), _BY_FAMILY, _REQUEST, 0, 0) + asked)
        answer = kernel.recv(4096)
    if len(answer) < _HEAD.size + _USER_AT + _USER.size or _HEAD.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    _, state = _STATE.unpack_from(answer, _HEAD.size)
    user, inode = _USER.unpack_from(answer, _HEAD.size + _USER_AT)
    return user if state == _ESTABLISHED and inode else None  # what is closed is nobody's


def _known(user: int) -> int | None:
    """The user, unless it is the number that a namespace gives to every user that it does not know."""
    if user != int(Path("/proc/sys/kernel/overflowuid").read_text()):
        return user
    spans = Path("/proc/self/uid_map").read_text().splitlines()
    return user if sum(int(span.split()[2]) for span in spans) == _N_USERS else None
