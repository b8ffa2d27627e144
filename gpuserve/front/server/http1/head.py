"""Heads of HTTP/1 requests (RFC 9112): bytes to a ``Head``, and what they say of body and connection. Pure.
What could be read in two ways by two servers is refused, not repaired: that is how requests are smuggled
through a proxy. A client's head is mostly the same bytes again, so short ones are remembered.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from gpuserve.front.exchange.exchange import Head, Header

#: What ends a head.
BLANK_LINE: Final = b"\r\n\r\n"
HEAD_NBYTES: Final = 64 << 10
LINE_NBYTES: Final = 16 << 10
MAX_FIELDS: Final = 128
#: The framing of a body whose length its chunks tell.
CHUNKED: Final = -1

_REMEMBERED: Final = 512
#: So long a head may be that is.
REMEMBERED_NBYTES: Final = 2048
_MAX_LENGTH: Final = (1 << 63) - 1
_METHOD_NBYTES: Final = 32
_SHOWN_CHARACTERS: Final = 40

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE: Final = re.compile(rb"(%s) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])" % _TOKEN)
#: No control character is in a value, so neither a line's end nor half of one.
_FIELD: Final = re.compile(rb"(%s):([\t\x20-\x7e\x80-\xff]*)" % _TOKEN)
_NAME: Final = re.compile(_TOKEN)
_LENGTH: Final = re.compile(rb"[0-9]{1,20}")
_HOST: Final = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+;=:\[\]]*")
_ABSOLUTE: Final = re.compile(rb"[Hh][Tt][Tt][Pp][Ss]?://([^/?#]+)([^#]*)")
_LONE_LINE_FEED: Final = re.compile(rb"(?<!\r)\n")
#: The end of a head, or what cannot be in one.
_TELLING: Final = re.compile(rb"\r\n\r\n|(?<!\r)\n")


class RequestRefused(Exception):
    """Bytes that are no request of this server's. ``status`` and one sentence for the client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RequestHead(NamedTuple):
    """A head, and what it says of its message; equal bytes may share one. ``is_plain``: its response has a
    body, and no word about the connection.
    """

    head: Head
    body_nbytes: int
    keep_alive: bool
    expects_continue: bool
    is_plain: bool


def parse(text: bytes) -> RequestHead:
    """The head in ``text``, to the first blank line; ``RequestRefused``: malformed or ambiguous."""
    return remembered(text) if len(text) <= REMEMBERED_NBYTES else _parse(text)


def check_begun(text: bytes) -> None:
    """Judge the beginning of a head, so that nobody waits for the end of nonsense; or ``RequestRefused``."""
    if _NAME.match(text) is None:
        raise RequestRefused(400, "the request does not begin with a method")
    if _LONE_LINE_FEED.search(text) is not None:
        raise RequestRefused(400, "a line of the request head does not end with CR LF")
    if len(text) > LINE_NBYTES and b"\r\n" not in text[: LINE_NBYTES + 2]:
        raise _line_too_long()
    if len(text) > HEAD_NBYTES:
        raise RequestRefused(431, f"the request head is over the limit of {HEAD_NBYTES} bytes")


def is_as_begun(text: bytearray, judged_nbytes: int) -> bool:
    """Whether ``check_begun`` would say the same of this longer beginning; only what is new is looked at."""
    for limit in (LINE_NBYTES + len(b"\r\n"), HEAD_NBYTES + 1):
        if judged_nbytes < limit <= len(text):
            return False
    return _TELLING.search(text, max(0, judged_nbytes - len(BLANK_LINE) + 1)) is None


def parse_fields(lines: Sequence[bytes]) -> list[Header]:
    """The fields in these lines, names in lower case; ``RequestRefused``: one is malformed."""
    fields: list[Header] = []
    for line in lines:
        found = _FIELD.fullmatch(line)
        if found is None:
            raise _bad_field(line)
        fields.append((found[1].lower(), found[2].strip(b" \t")))
    return fields


def _parse(text: bytes) -> RequestHead:
    if len(text) > HEAD_NBYTES:
        check_begun(text)
    first, *lines = text[: -len(BLANK_LINE)].split(b"\r\n")
    method, target, version = _request_line(first)
    if len(lines) > MAX_FIELDS:
        raise RequestRefused(
            431, f"the request has {len(lines)} header fields, expected at most {MAX_FIELDS}"
        )
    headers = parse_fields(lines)
    length, body_nbytes = _framing(headers, version)
    _check_host(headers, version)
    target, headers = _resolved(method, target, headers)
    _check_host(headers, version)
    _check_upgrade(headers)
    keep_alive = _keeps_alive(headers, version)
    expects = any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)
    return RequestHead(
        Head(method.decode("ascii"), target, tuple(headers), version, length),
        body_nbytes,
        keep_alive,
        expects and body_nbytes != 0 and version == "1.1",
        keep_alive and version == "1.1" and method != b"HEAD",
    )


#: ``parse`` for heads that are not long.
remembered = functools.lru_cache(_REMEMBERED)(_parse)


def _request_line(line: bytes) -> tuple[bytes, bytes, str]:
    """The method, the target, and the version as "1.0" or "1.1"."""
    if len(line) > LINE_NBYTES:
        raise _line_too_long()
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise RequestRefused(
            400, f"the request line must be a method, a target and a version, got {shown(line)}"
        )
    method, target, major, minor = found.groups()
    if major != b"1":
        raise RequestRefused(
            505, f"HTTP version {major.decode()}.{minor.decode()} is not served like this, expected 1.1"
        )
    if len(method) > _METHOD_NBYTES or method == b"CONNECT":
        raise RequestRefused(501, f"method {shown(method)} is not served")
    return method, target, "1.0" if minor == b"0" else "1.1"


def _resolved(method: bytes, target: bytes, headers: list[Header]) -> tuple[bytes, list[Header]]:
    """The path and query of a target in any of its forms; a whole URL also says the host."""
    if target[0] == 0x2F or (target == b"*" and method == b"OPTIONS"):
        return target, headers
    found = _ABSOLUTE.fullmatch(target)
    if found is None:
        raise RequestRefused(400, f"the request target must be a path, got {shown(target)}")
    authority, path = found.groups()
    others = [header for header in headers if header[0] != b"host"]
    return path if path[:1] == b"/" else b"/" + path, [(b"host", authority), *others]


def _framing(headers: list[Header], version: str) -> tuple[int | None, int]:
    """The length that is told, and how many bytes the body has."""
    lengths = {value for name, value in headers if name == b"content-length"}
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings:
        _check_codings(codings, version)
        if lengths:
            raise RequestRefused(400, "the request has both Content-Length and Transfer-Encoding")
        return None, CHUNKED
    if not lengths:
        return None, 0
    if len(lengths) > 1:
        raise RequestRefused(400, "the request has several Content-Length fields that differ")
    (value,) = lengths
    length = int(value) if _LENGTH.fullmatch(value) else _MAX_LENGTH + 1
    if length > _MAX_LENGTH:
        raise RequestRefused(
            400, f"Content-Length must be a number from 0 to {_MAX_LENGTH}, got {shown(value)}"
        )
    return length, length


def _check_codings(codings: list[bytes], version: str) -> None:
    if version == "1.0":
        raise RequestRefused(400, "a request of HTTP/1.0 cannot have Transfer-Encoding")
    coding = b", ".join(codings)
    if coding.lower() != b"chunked":
        raise RequestRefused(501, f"Transfer-Encoding {shown(coding)} is not served, expected 'chunked'")


def _check_host(headers: list[Header], version: str) -> None:
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts) or (hosts and not _HOST.fullmatch(hosts[0])):
        raise _bad_host()


def _check_upgrade(headers: list[Header]) -> None:
    """Other protocols are offers, which need not be taken; a WebSocket client can do nothing without."""
    if any(name == b"upgrade" and value.lower() == b"websocket" for name, value in headers):
        raise RequestRefused(403, "WebSocket is not served, expected a plain HTTP request")


def _bad_host() -> RequestRefused:
    return RequestRefused(400, "the request must have exactly one valid Host field")


def _keeps_alive(headers: list[Header], version: str) -> bool:
    said = b",".join([value for name, value in headers if name == b"connection"]).lower()
    options = {option.strip() for option in said.split(b",")}
    return b"close" not in options and (version == "1.1" or b"keep-alive" in options)


def _bad_field(line: bytes) -> RequestRefused:
    if line[:1] in {b" ", b"\t"}:
        return RequestRefused(400, "a header field is folded over several lines, which HTTP has given up")
    name, colon, _ = line.partition(b":")
    if not colon or _NAME.fullmatch(name) is None:
        return RequestRefused(400, f"a header field must be a name, a colon and a value, got {shown(line)}")
    return RequestRefused(400, f"the value of header field {shown(name)} has a control character in it")


def _line_too_long() -> RequestRefused:
    return RequestRefused(414, f"the request line is over the limit of {LINE_NBYTES} bytes")


def shown(text: bytes) -> str:
    """Bytes from outside as an error may repeat them."""
    return ascii(text[:_SHOWN_CHARACTERS].decode("latin-1"))
