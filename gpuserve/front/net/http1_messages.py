"""HTTP/1 messages (RFC 9112): requests are parsed, response heads are encoded. Pure but for the date.

A message that two servers could read in two ways is refused, not repaired, because such messages smuggle
requests through proxies. Clients mostly send the same head again, so short heads are cached.
"""

from __future__ import annotations

import enum
import functools
import http
import json
import re
import time
from collections.abc import Iterable, Sequence
from email.utils import formatdate
from typing import Final, NamedTuple, TypeAlias

from gpuserve.core.states import StepTable
from gpuserve.front.net.exchange import AnswerHead, Head, Header, Piece

#: The end of a head.
BLANK_LINE: Final = b"\r\n\r\n"
HEAD_NBYTES: Final = 64 << 10
LINE_NBYTES: Final = 16 << 10
MAX_FIELDS: Final = 128
#: The body length of a chunked body.
CHUNKED: Final = -1

#: The number of cached heads: requests of each length have a head of their own.
_REMEMBERED: Final = 2048
#: The maximum size of a cached head, and of its lines: each field takes some 270 bytes of the cache.
REMEMBERED_NBYTES: Final = 2048
REMEMBERED_LINES: Final = 40
_MAX_LENGTH: Final = (1 << 63) - 1
_METHOD_NBYTES: Final = 32
_SHOWN_CHARACTERS: Final = 40

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE: Final = re.compile(rb"(%s) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])" % _TOKEN)
#: A value has no control character, so no line break or half of one.
_FIELD: Final = re.compile(rb"(%s):([\t\x20-\x7e\x80-\xff]*)" % _TOKEN)
_NAME: Final = re.compile(_TOKEN)
_LENGTH: Final = re.compile(rb"[0-9]{1,20}")
_HOST: Final = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+;=:\[\]]*")
_ABSOLUTE: Final = re.compile(rb"[Hh][Tt][Tt][Pp][Ss]?://([^/?#]+)([^#]*)")
_LONE_LINE_FEED: Final = re.compile(rb"(?<!\r)\n")
#: The end of a head, or an invalid line break.
_END_OR_INVALID: Final = re.compile(rb"\r\n\r\n|(?<!\r)\n")


class RequestRefused(Exception):
    """An invalid request: the HTTP status and one sentence for the client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RequestHead(NamedTuple):
    """A head and its meaning; may be shared. ``is_plain``: the response needs no header of the connection."""

    head: Head
    body_nbytes: int
    keep_alive: bool
    expects_continue: bool
    is_plain: bool


def parse_head(text: bytes) -> RequestHead:
    """Return the head in ``text``, which ends with a blank line. Raise RequestRefused if it is invalid."""
    is_usual = len(text) <= REMEMBERED_NBYTES and text.count(b"\n") <= REMEMBERED_LINES
    return remembered_head(text) if is_usual else _parse_head(text)


def check_begun(text: bytes) -> None:
    """Raise RequestRefused if the beginning of a head is invalid already, so nobody waits for its end."""
    if _NAME.match(text) is None:
        raise RequestRefused(400, "the request does not begin with a method")
    if _LONE_LINE_FEED.search(text) is not None:
        raise RequestRefused(400, "a line of the request head does not end with CR LF")
    if len(text) > LINE_NBYTES and b"\r\n" not in text[: LINE_NBYTES + 2]:
        raise _line_too_long()
    if len(text) > HEAD_NBYTES:
        raise RequestRefused(431, f"the request head is over the limit of {HEAD_NBYTES} bytes")


def is_as_begun(text: bytearray, judged_nbytes: int) -> bool:
    """Return whether ``check_begun`` has the same result for a longer beginning, by the new bytes alone."""
    for limit in (LINE_NBYTES + len(b"\r\n"), HEAD_NBYTES + 1):
        if judged_nbytes < limit <= len(text):
            return False
    return _END_OR_INVALID.search(text, max(0, judged_nbytes - len(BLANK_LINE) + 1)) is None


def parse_fields(lines: Sequence[bytes]) -> list[Header]:
    """Return header fields with lower-case names. Raise RequestRefused if a line is malformed."""
    fields: list[Header] = []
    for line in lines:
        found = _FIELD.fullmatch(line)
        if found is None:
            raise _bad_field(line)
        fields.append((found[1].lower(), found[2].strip(b" \t")))
    return fields


def _parse_head(text: bytes) -> RequestHead:
    if len(text) > HEAD_NBYTES:
        check_begun(text)
    first, *lines = text[: -len(BLANK_LINE)].split(b"\r\n")
    method, target, version = _request_line(first)
    if len(lines) > MAX_FIELDS:
        reason = f"the request has {len(lines)} header fields, expected at most {MAX_FIELDS}"
        raise RequestRefused(431, reason)
    headers = parse_fields(lines)
    length, body_nbytes = _framing(headers, version)
    _check_host(headers, version)
    target, headers = _resolve_target(method, target, headers)
    _check_host(headers, version)
    # Clients of WebSocket can do nothing without it; other upgrades are offers, and are ignored.
    if any(name == b"upgrade" and value.lower() == b"websocket" for name, value in headers):
        raise RequestRefused(403, "WebSocket is not served, expected a plain HTTP request")
    options_text = b",".join([value for name, value in headers if name == b"connection"]).lower()
    options = {option.strip() for option in options_text.split(b",")}
    keep_alive = b"close" not in options and (version == "1.1" or b"keep-alive" in options)
    names = [line.partition(b":")[0] for line in lines]
    spelled = tuple([(lower, name) for name in names if (lower := name.lower()) != name])
    expects = any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)
    return RequestHead(
        Head(method.decode("ascii"), target, tuple(headers), version, length, spelled=spelled),
        body_nbytes,
        keep_alive,
        expects and body_nbytes != 0 and version == "1.1",
        keep_alive and version == "1.1" and method != b"HEAD",
    )


#: ``parse_head`` for short heads, cached.
remembered_head = functools.lru_cache(_REMEMBERED)(_parse_head)


def _request_line(line: bytes) -> tuple[bytes, bytes, str]:
    if len(line) > LINE_NBYTES:
        raise _line_too_long()
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        text = f"the request line must be a method, a target and a version, got {shown(line)}"
        raise RequestRefused(400, text)
    method, target, major, minor = found.groups()
    if major != b"1":
        text = f"HTTP version {major.decode()}.{minor.decode()} is not served like this, expected 1.1"
        raise RequestRefused(505, text)
    if len(method) > _METHOD_NBYTES or method == b"CONNECT":
        raise RequestRefused(501, f"method {shown(method)} is not served")
    return method, target, "1.0" if minor == b"0" else "1.1"


def _resolve_target(method: bytes, target: bytes, headers: list[Header]) -> tuple[bytes, list[Header]]:
    """Return the path and query of a target. The host of an absolute URL replaces the Host header."""
    if target[0] == 0x2F or (target == b"*" and method == b"OPTIONS"):
        return target, headers
    found = _ABSOLUTE.fullmatch(target)
    if found is None:
        raise RequestRefused(400, f"the request target must be a path, got {shown(target)}")
    authority, path = found.groups()
    others = [header for header in headers if header[0] != b"host"]
    return path if path[:1] == b"/" else b"/" + path, [(b"host", authority), *others]


def _framing(headers: list[Header], version: str) -> tuple[int | None, int]:
    """Return the ``Content-Length``, and the length of the body."""
    lengths = {value for name, value in headers if name == b"content-length"}
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings:
        if version == "1.0":
            raise RequestRefused(400, "a request of HTTP/1.0 cannot have Transfer-Encoding")
        coding = b", ".join(codings)
        if coding.lower() != b"chunked":
            raise RequestRefused(501, f"Transfer-Encoding {shown(coding)} is not served, expected 'chunked'")
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
        text = f"Content-Length must be a number from 0 to {_MAX_LENGTH}, got {shown(value)}"
        raise RequestRefused(400, text)
    return length, length


def _check_host(headers: list[Header], version: str) -> None:
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts) or (hosts and not _HOST.fullmatch(hosts[0])):
        raise RequestRefused(400, "the request must have exactly one valid Host field")


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
    """Return client bytes shortened and escaped for an error text."""
    return ascii(text[:_SHOWN_CHARACTERS].decode("latin-1"))


# ---- request bodies ------------------------------------------------------------------------------

_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
#: A chunk's size line without extensions.
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
#: The maximum length of a chunk's size with extensions.
_SIZE_LINE_NBYTES: Final = 256
_TRAILERS_NBYTES: Final = 16 << 10
#: Chunks that are read in one call; the loop budget is checked between calls.
_CHUNKS: Final = 512


class SizedBody:
    """A body of known length. ``left_nbytes`` is still missing; ``ended``: the body is complete."""

    __slots__ = ("ended", "left_nbytes")

    def __init__(self, nbytes: int) -> None:
        self.left_nbytes = nbytes
        self.ended = nbytes == 0

    def cut(self, data: Piece) -> tuple[Piece, Piece]:
        """Return the part of the data that belongs to the body, and the rest."""
        left, nbytes = self.left_nbytes, len(data)
        if nbytes < left:
            self.left_nbytes = left - nbytes
            return data, b""
        self.left_nbytes, self.ended = 0, True
        return (data, b"") if nbytes == left else (data[:left], data[left:])


class ChunkPart(enum.Enum):
    """The next part of a chunked body."""

    SIZE = "the line with a chunk's size"
    DATA = "a chunk's data"
    DATA_END = "the line's end after it"
    TRAILERS = "the trailers, up to an empty line"


class ChunkedBody:
    """A chunked body. Trailers are checked and dropped. ``ended``: the body is complete.

    ::

        SIZE ──► DATA ──► DATA_END ──► SIZE …
          └─ 0 ──► TRAILERS ──► ended
    """

    __slots__ = ("_buffered", "_left", "_next_part", "_trailers_nbytes", "ended")

    #: The missing bytes of a chunked body are unknown.
    left_nbytes: Final = 0

    def __init__(self) -> None:
        self.ended = False
        self._next_part = ChunkPart.SIZE
        #: Missing bytes of the current chunk.
        self._left = 0
        #: The beginning of an incomplete line.
        self._buffered = b""
        self._trailers_nbytes = 0

    def cut(self, data: Piece) -> tuple[Piece, Piece]:
        """Return the body data and the rest, perhaps more of the body. Raise RequestRefused if malformed."""
        position, nbytes = 0, len(data)
        pieces: list[Piece] = []
        while position < nbytes and not self.ended and len(pieces) < _CHUNKS:
            if self._next_part is ChunkPart.DATA:
                piece = data[position : position + self._left]
                pieces.append(piece)
                position += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._next_part = ChunkPart.DATA_END
            elif (
                self._next_part is ChunkPart.SIZE
                and not self._buffered
                and (found := _CHUNK.match(data, position))
            ):
                position = _read_whole_chunks(data, position, found, pieces)
                if position == found.start():
                    position = self._read_line(data, position)
            else:
                position = self._read_line(data, position)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), data[position:]

    def _read_line(self, data: Piece, position: int) -> int:
        """Process a line, or buffer its beginning. Return the position after the line."""
        limit = _TRAILERS_NBYTES if self._next_part is ChunkPart.TRAILERS else _SIZE_LINE_NBYTES
        kept = self._buffered
        text = kept + bytes(data[position : position + limit + 1 - len(kept)])
        end = text.find(b"\r\n")
        if end >= 0:
            self._buffered = b""
            self._on_line(text[:end])
            return position + end + 2 - len(kept)
        if len(text) > limit:
            raise RequestRefused(400, f"a line between the chunks of the body is over {limit} bytes")
        self._buffered = text
        return len(data)

    def _on_line(self, line: bytes) -> None:
        match self._next_part:
            case ChunkPart.SIZE:
                found = _SIZE.fullmatch(line)
                if found is None:
                    raise RequestRefused(
                        400, f"a chunk of the body must begin with its size, got {shown(line)}"
                    )
                self._left = int(found[1], 16)
                self._next_part = ChunkPart.DATA if self._left else ChunkPart.TRAILERS
            case ChunkPart.DATA_END:
                if line:
                    raise RequestRefused(400, "a chunk of the body is longer than its size")
                self._next_part = ChunkPart.SIZE
            case _:
                self._trailers_nbytes += len(line) + 2
                if self._trailers_nbytes > _TRAILERS_NBYTES:
                    raise RequestRefused(431, f"the trailers are over the limit of {_TRAILERS_NBYTES} bytes")
                if line:
                    parse_fields((line,))
                else:
                    self.ended = True


def _read_whole_chunks(data: Piece, position: int, found: re.Match[bytes] | None, pieces: list[Piece]) -> int:
    """Append whole chunks to ``pieces``; return their end. Line by line takes five times as long."""
    while found is not None and len(pieces) < _CHUNKS:
        start = found.end()
        end = start + int(found[1], 16)
        if end == start or data[end : end + 2] != b"\r\n":
            break
        pieces.append(data[start:end])
        position = end + 2
        found = _CHUNK.match(data, position)
    return position


#: The body of a request while it arrives.
RequestBody: TypeAlias = SizedBody | ChunkedBody


def request_body(nbytes: int) -> RequestBody:
    """Return a body of ``nbytes``, or a chunked body for ``CHUNKED``."""
    return ChunkedBody() if nbytes == CHUNKED else SizedBody(nbytes)


# ---- responses -----------------------------------------------------------------------------------

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
CLOSE: Final = b"connection: close"
KEEP_ALIVE: Final = b"connection: keep-alive"
_CHUNKED_LINE: Final = b"transfer-encoding: chunked"
#: Headers of the connection, which this module adds itself.
_CONNECTION_HEADERS: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding"})
_BODILESS: Final = frozenset({204, 304})


class AnswerProgress(enum.Enum):
    """The progress of a response."""

    AWAITED = "not started"
    STARTED = "its head is known, and waits for the first part of the body"
    SENDING = "its head is sent"
    ENDED = "nothing more can be sent: the response is complete, or the client is gone"


# Compared in every request: a look-up on an Enum class costs ten times one of a global.
AWAITED: Final = AnswerProgress.AWAITED
ENDED: Final = AnswerProgress.ENDED

PROGRESS: Final = StepTable(
    "a response",
    {
        AnswerProgress.AWAITED: {AnswerProgress.STARTED, AnswerProgress.ENDED},
        AnswerProgress.STARTED: {AnswerProgress.SENDING, AnswerProgress.ENDED},
        AnswerProgress.SENDING: {AnswerProgress.ENDED},
        AnswerProgress.ENDED: (),
    },
)


class Framing(enum.Enum):
    """The way in which a client finds the end of a body."""

    NONE = "there is no body, whatever the head says"
    SIZED = "by its length"
    CHUNKED = "by its last chunk"
    CLOSED = "by the end of the connection"


class ResponseHead(NamedTuple):
    """An encoded response head. ``nbytes``: the length of a sized body."""

    text: bytes
    framing: Framing
    nbytes: int


def response_head(
    status: int,
    headers: Iterable[Header],
    version: str = "1.1",
    method: str = "",
    *,
    nbytes: int | None = None,
    keep_alive: bool = True,
) -> ResponseHead:
    """Return the encoded head of a response.

    Args:
        status: The HTTP status.
        headers: Headers with lower-case names; headers of the connection are left out.
        version: The client's HTTP version.
        method: The request's method.
        nbytes: The length of the body if the headers do not have it; None if unknown.
        keep_alive: Whether the connection stays open, unless only its end ends the body.

    Raises:
        ValueError: A header has a line break in it, or an invalid length.
    """
    lines, sent_length = _header_lines(headers, with_length=status != 204)
    length = nbytes if sent_length is None else sent_length
    if status in _BODILESS or method == "HEAD":
        framing = Framing.NONE
    elif length is not None:
        framing = Framing.SIZED
    else:
        framing = Framing.CLOSED if version == "1.0" else Framing.CHUNKED
    if sent_length is None and length is not None and status not in _BODILESS:
        lines.append(b"content-length: %d" % length)
    if framing is Framing.CHUNKED:
        lines.append(_CHUNKED_LINE)
    if not keep_alive or framing is Framing.CLOSED:
        lines.append(CLOSE)
    elif version == "1.0":
        lines.append(KEEP_ALIVE)
    text = b"\r\n".join((status_line(status), *lines, _date_line(int(time.time()))))
    if not text.count(b"\n") == text.count(b"\r") == len(lines) + 3:
        raise ValueError("a header of a response has a line's end in it")
    return ResponseHead(text, framing, length or 0)


def head_template(head: AnswerHead) -> bytes:
    """Return a complete response's head without length and date, and cache it. Raise ValueError as above."""
    lines = [name + b": " + value for name, value in head.headers]
    text = b"\r\n".join((status_line(head.status), *lines, b"")).replace(b"%", b"%%")
    if not text.count(b"\n") == text.count(b"\r") == len(lines) + 1:
        raise ValueError("a header of a response has a line's end in it")
    start = text.find(b"\n", text.find(b"\n") + 1) + 1 or len(text)
    head.text = text[:start] + b"content-length: %d\r\n" + text[start:]
    return head.text


def _header_lines(headers: Iterable[Header], *, with_length: bool) -> tuple[list[bytes], int | None]:
    lines: list[bytes] = []
    length = None
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
            if not with_length:
                continue
        elif name in _CONNECTION_HEADERS:
            continue
        lines.append(b"%b: %b" % (name, value))
    return lines, length


def error_response(status: int, text: str) -> bytes:
    """Return an error response of the server itself, which closes the connection."""
    body = json.dumps({"error": text}, separators=(",", ":")).encode()
    headers = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)))
    return response_head(status, headers, keep_alive=False).text + body


def with_line(head: bytes, line: bytes) -> bytes:
    """Return a complete head with one more line."""
    return head[:-2] + line + b"\r\n\r\n"


@functools.lru_cache(64)
def status_line(status: int) -> bytes:
    try:
        reason = http.HTTPStatus(status).phrase
    except ValueError:
        reason = ""
    return f"HTTP/1.1 {status} {reason}".encode()


@functools.lru_cache(_REMEMBERED)
def whole_head(template: bytes, nbytes: int, now_s: int) -> bytes:
    """Return a head made of a ``head_template``, with the length and the date."""
    return template % nbytes + _date_line(now_s)


@functools.lru_cache(2)
def _date_line(now_s: int) -> bytes:
    return f"date: {formatdate(now_s, usegmt=True)}\r\n\r\n".encode()
