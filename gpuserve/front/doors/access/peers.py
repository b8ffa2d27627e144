"""Whether a client is on this machine. Pure: a connection's address and headers in, yes or no out. What a
proxy passed on, or a browser sends for a page, has an author elsewhere: that is no local client.
"""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Iterable
from typing import Final

from gpuserve.front.exchange.exchange import Ends

#: The address of a peer on a unix socket, which has none.
UNIX: Final = "unix:"
#: An address that is not known.
UNKNOWN: Final = ""
#: What proxies add.
_FORWARDED: Final = frozenset(
    {
        b"cf-connecting-ip", b"cf-ray", b"forwarded", b"true-client-ip", b"via", b"x-client-ip",
        b"x-cluster-client-ip", b"x-real-ip",
    }
)  # fmt: skip
_FORWARDED_STARTS: Final = (b"x-forwarded-", b"x-envoy-", b"x-original-")
_ORIGIN: Final = b"origin"
#: By which browsers say whether a page of another site asks.
SITE: Final = b"sec-fetch-site"
_OTHER_SITE: Final = b"cross-site"
#: What ``SITE`` says of a page of the server itself, and of an address that a user typed.
_OWN_SITE: Final = frozenset({b"same-origin", b"none"})
_LOCAL_NAME: Final = "localhost"


def is_local(address: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request comes from a client on this machine; names of headers are in lower case."""
    return is_here(address) and not any(
        name in _FORWARDED
        or name.startswith(_FORWARDED_STARTS)
        or (name == _ORIGIN and not _is_local_origin(value))
        or (name == SITE and value == _OTHER_SITE)
        for name, value in headers
    )


def is_of_another_page(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a browser asks for a page of another origin; another port of this machine is another
    origin. Names of headers are in lower case.
    """
    host, origins = b"", []
    for name, value in headers:
        if name == b"host":
            host = value.lower()
        elif name == _ORIGIN:
            origins.append(value.lower())
        elif name == SITE and value not in _OWN_SITE:
            return True
    return any(one.partition(b"://")[2] != host for one in origins)


def is_here(address: str) -> bool:
    """Whether a connection's other end is on this machine, whoever speaks through it."""
    return address == UNIX or _is_loopback(address)


def address_of(ends: Ends) -> str:
    if ends.server[1] is None:
        return UNIX
    return ends.client[0] if ends.client else UNKNOWN


def grpc_address(peer: str) -> str:
    """The address in what grpc calls a peer: ``ipv4:127.0.0.1:5``, ``ipv6:%5B::1%5D:5``, ``unix:…``."""
    kind, _, rest = peer.partition(":")
    if kind in {"unix", "unix-abstract"}:
        return UNIX
    if kind not in {"ipv4", "ipv6"}:
        return UNKNOWN
    return urllib.parse.unquote(rest).rpartition(":")[0].strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _is_local_origin(value: bytes) -> bool:
    try:
        host = urllib.parse.urlsplit(value.decode("latin-1")).hostname or ""
    except ValueError:
        return False
    return host == _LOCAL_NAME or _is_loopback(host)
