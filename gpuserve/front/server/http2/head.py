"""The fields of a request's header block as a ``Head`` (RFC 9113, 8.2 and 8.3). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from gpuserve.front.exchange.exchange import TE, Head, Header

_PSEUDO: Final = frozenset({b":method", b":scheme", b":authority", b":path"})
_NEEDED: Final = (b":method", b":scheme", b":path")
#: Of the connection, which in HTTP/2 are none of a request's.
_FORBIDDEN: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_METHOD: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_SCHEME: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+\-.]*")
_PATH: Final = re.compile(rb"/[\x21-\x7e]*|\*")
#: Without a user, spaces and control characters; clients of gRPC put names of targets there.
_AUTHORITY: Final = re.compile(rb"[\x21-\x3f\x41-\x7e]*")
_LENGTH: Final = re.compile(rb"[0-9]{1,19}")


class MalformedHead(ValueError):
    """The fields are no head of a request; the stream is lost, the connection is not."""


def request_head(fields: Iterable[Header]) -> Head:
    pseudo: dict[bytes, bytes] = {}
    headers: list[Header] = []
    for field in fields:
        name, value = field
        if name[:1] == b":":
            if name not in _PSEUDO or name in pseudo or headers:
                raise MalformedHead(f"the field {name!r} is unknown, double or late")
            pseudo[name] = value
        else:
            _check(field)
            headers.append(field)
        if b"\0" in value or b"\r" in value or b"\n" in value or value != value.strip(b" \t"):
            raise MalformedHead(f"the value of {name!r} has characters that it cannot have")
    if not all(pseudo.get(name) for name in _NEEDED):
        raise MalformedHead("a request needs :method, :scheme and :path")
    return _head(pseudo, headers)


def _check(field: Header) -> None:
    name = field[0]
    if _NAME.fullmatch(name) is None:
        raise MalformedHead(f"{name!r} is no name of a header")
    if name in _FORBIDDEN or (name == b"te" and field != TE):
        raise MalformedHead(f"the header {name!r} is of the connection")


def check_trailers(fields: Iterable[Header]) -> None:
    for field in fields:
        _check(field)


def _head(pseudo: dict[bytes, bytes], headers: list[Header]) -> Head:
    method, scheme, path = (pseudo[name] for name in _NEEDED)
    if not (_METHOD.fullmatch(method) and _SCHEME.fullmatch(scheme) and _PATH.fullmatch(path)):
        raise MalformedHead(":method, :scheme or :path has characters that it cannot have")
    host = _host(pseudo.get(b":authority", b""), headers)
    if host and not any(name == b"host" for name, _ in headers):
        headers.insert(0, (b"host", host))
    length = _content_length(headers)
    return Head(method.decode(), path, headers, "2", length, scheme.decode())


def _host(authority: bytes, headers: Iterable[Header]) -> bytes:
    """The host that a request is for, which :authority and host may not tell in two ways."""
    hosts = [value for name, value in headers if name == b"host"]
    host = authority or b"".join(hosts)
    if len(hosts) > 1 or any(one.lower() != host.lower() for one in hosts):
        raise MalformedHead("there are several hosts")
    if _AUTHORITY.fullmatch(host) is None:
        raise MalformedHead("the host has characters that it cannot have")
    return host


def _content_length(headers: Iterable[Header]) -> int | None:
    lengths = {value for name, value in headers if name == b"content-length"}
    if not lengths:
        return None
    if len(lengths) > 1 or _LENGTH.fullmatch(next(iter(lengths))) is None:
        raise MalformedHead("content-length is no number, or there are several")
    return int(lengths.pop())
