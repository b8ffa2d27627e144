"""Where a server is found by programs that want to attach to it, and whom each side trusts. Pure.

A server listens on one abstract AF_UNIX name for each of its ports: a name that is no file, that the kernel
forgets with the server, and that is told by what every client knows of the server.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import SplitResult, urlsplit

from gpuserve.errors import AttachError

_DEFAULT_PORTS: Final = {"http": 8000, "https": 8000, "grpc": 8001, "grpcs": 8001}
_LOCAL_NAMES: Final = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
_FORMS: Final = "expected localhost:8000, http://localhost:8000 or grpc://localhost:8001"
_ROOT: Final = 0


def attach_name(uid: int, port: int) -> bytes:
    """The abstract name on which the server of a user that has this port is attached to."""
    return f"\0gpuserve/{uid}/port-{port}".encode()


def may_attach(own_uid: int, peer_uid: int) -> bool:
    """Whether one side trusts the other: the same user, or root, who may do as he likes anyway."""
    return peer_uid in {own_uid, _ROOT}


def port_of(url: str) -> int:
    """The port that a url names; 8000, or 8001 for grpc://, where it names none.

    Raises:
        AttachError: it is no url of a server, or one of another machine.
    """
    parts = _split(url)
    if not _is_here(parts.hostname or ""):
        raise AttachError(
            f"cannot attach to {url!r}: attaching works on one machine only, and {parts.hostname!r} is not "
            "this one"
        )
    return parts.port or _DEFAULT_PORTS[parts.scheme]


def _split(url: object) -> SplitResult:
    if not isinstance(url, str):
        raise AttachError(f"{_FORMS}, given an object of type {type(url).__name__}")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        is_good = parts.scheme in _DEFAULT_PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        is_good = False
    if not is_good or parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise AttachError(f"{_FORMS}, given {url!r}")
    return parts


def _is_here(host: str) -> bool:
    if host in _LOCAL_NAMES or host == socket.gethostname().lower():
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
