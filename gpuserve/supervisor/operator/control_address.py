"""Where a running server is found by its operator: names, and which of them an address means. Pure.

A server listens on one abstract AF_UNIX name for each of its ports, as it does for programs that attach
(``attach_address.py``). This one has the address as well: several servers of a machine may have one port.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from gpuserve.errors import ControlError

DEFAULT_PORT: Final = 8000
_SCHEMES: Final = frozenset({"http", "https", "grpc", "grpcs"})
_FORMS: Final = "--server: expected localhost:8000, 127.0.0.2:8000 or a URL of the server"
#: In /proc/net/unix: the socket listens.
_LISTENING: Final = "00010000"
_COLUMNS: Final = 8
#: A server that listens on one of these is reached at every address of its machine.
_UNSPECIFIED: Final = frozenset({"0.0.0.0", "::"})


class ControlName(NamedTuple):
    """What a server of a user listens on for its operator: one for each of its ports."""

    uid: int
    address: str
    port: int

    def encode(self) -> bytes:
        """As the kernel knows it."""
        return f"\0gpuserve/{self.uid}/control/{self.address}:{self.port}".encode()

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def listening_names(proc_net_unix: str) -> list[ControlName]:
    """The names in the text of /proc/net/unix that anybody listens on."""
    found = set()
    for line in proc_net_unix.splitlines():
        columns = line.split(maxsplit=_COLUMNS - 1)
        if len(columns) == _COLUMNS and columns[3] == _LISTENING and (name := _parsed(columns[-1])):
            found.add(name)
    return sorted(found)


def _parsed(path: str) -> ControlName | None:
    """A name as the kernel prints it, with an @ for the zero byte; None where it is none of ours."""
    root, _, rest = path.partition("/")
    uid, _, where = rest.partition("/control/")
    address, _, port = where.rpartition(":")
    if root != "@gpuserve" or not uid.isdecimal() or not port.isdecimal() or not address:
        return None
    return ControlName(int(uid), address, int(port))


def host_and_port(server: str) -> tuple[str, int]:
    """The host and the port that ``--server`` names; a port alone is one of this machine.

    Raises:
        ControlError: it is no address.
    """
    if server.isdecimal():  # or else an IPv4 address, written as one number
        server = f"localhost:{server}"
    try:
        parts = urlsplit(server if "://" in server else f"http://{server}")
        host, port = parts.hostname, parts.port
    except ValueError:  # a port or an IPv6 address that is none
        host, port = None, None
        parts = urlsplit("")
    if not host or port == 0 or parts.scheme not in _SCHEMES or parts.path.strip("/") or parts.query:
        raise ControlError(f"{_FORMS}, given {server!r}")
    return host, port or DEFAULT_PORT


def meant(names: Iterable[ControlName], addresses: Collection[str], port: int) -> list[ControlName]:
    """Those of the names that a client reaches who connects to the port at one of the addresses
    of this machine.
    """
    return [one for one in names if one.port == port and _covers(one.address, addresses)]


def _covers(own: str, addresses: Collection[str]) -> bool:
    return own in addresses or (bool(addresses) and own in _UNSPECIFIED)
