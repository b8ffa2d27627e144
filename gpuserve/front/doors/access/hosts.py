"""Which names a page in a browser may call this server by. Pure. By DNS rebinding a stranger's page may send
requests from here without an ``Origin``, but they name its host: only names that nobody can buy are our own.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final, NamedTuple

from gpuserve.front.doors.access.peers import is_here
from gpuserve.front.doors.access.routes import Refusal
from gpuserve.front.exchange.exchange import Header
from gpuserve.front.requests.limits import shown

#: In ``allowed_hosts``: whatever the name is.
_ANY: Final = "*"
#: What browsers send and few other clients do. A page can add headers, and leave none of all these out.
_BROWSERS: Final = frozenset({b"accept-language", b"cookie", b"origin", b"referer", b"sec-fetch-mode"})
_BROWSERS_AGENT: Final = b"Mozilla/"
#: Nobody can buy a name that ends like this.
_RESERVED: Final = ("localhost", "local", "internal", "test", "home.arpa")


class ForeignHost(NamedTuple):
    name: str


def foreign_host(headers: Iterable[Header]) -> ForeignHost | None:
    """The host that the headers of a browser's request name, where it could be anybody's."""
    host, from_browser = "", False
    for name, value in headers:
        if name == b"host":
            host = _without_port(value.decode("latin-1").lower())
        elif name in _BROWSERS or (name == b"user-agent" and value.startswith(_BROWSERS_AGENT)):
            from_browser = True
    return ForeignHost(host) if from_browser and not _is_nobodys(host) else None


class AllowedHosts:
    """The judgement of one server by its names; without any, only what comes from this machine is judged."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._machine = socket.gethostname().lower()

    def refusal(self, host: ForeignHost, address: str) -> Refusal | None:
        """What is told to the page of a foreign host, which asks from this address."""
        if not (self._names or is_here(address)) or {_ANY, host.name} & self._names:
            return None
        if host.name == self._machine:
            return None
        text = (
            f"pages in browsers may not ask this server as '{shown(host.name)}', expected an address, "
            "localhost, or a name in the setting allowed_hosts"
        )
        return Refusal(421, text)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).rstrip(".")


def _is_nobodys(name: str) -> bool:
    """Whether no stranger can have the name: an address, one without a dot, or with an end not for sale."""
    if "." not in name or name.endswith(tuple(f".{end}" for end in _RESERVED)):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
