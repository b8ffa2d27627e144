"""Heads and chunks of HTTP/1 responses: values to bytes, and how a body is framed. Pure but for the date."""

from __future__ import annotations

import enum
import functools
import http
import json
import time
from collections.abc import Iterable
from email.utils import formatdate
from typing import Final, NamedTuple

from gpuserve.front.exchange.exchange import AnswerHead, Header

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
CLOSE: Final = b"connection: close"
KEEP_ALIVE: Final = b"connection: keep-alive"
_CHUNKED: Final = b"transfer-encoding: chunked"
#: Of the connection: what they say is told here.
_OWN: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding"})
_BODILESS: Final = frozenset({204, 304})


class Framing(enum.Enum):
    """How a client finds the end of a body."""

    NONE = "there is no body, whatever the head says"
    SIZED = "by its length"
    CHUNKED = "by its last chunk"
    CLOSED = "by the end of the connection"


class ResponseHead(NamedTuple):
    """An encoded head. ``nbytes``: of the body, where it is sized."""

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
    """The head of a response.

    Args:
        status: the status.
        headers: names in lower case; those of the connection are left out.
        version: the client's.
        method: the request's.
        nbytes: the length of the body where the headers do not tell it; None: nobody knows it yet.
        keep_alive: the connection goes on, unless only its end can tell the body's.

    Raises:
        ValueError: a header has a line's end in it, or a length that is none.
    """
    lines, told = _lines(headers, with_length=status != 204)
    length = nbytes if told is None else told
    framing = _framing(status, method, version, length)
    if told is None and length is not None and status not in _BODILESS:
        lines.append(b"content-length: %d" % length)
    if framing is Framing.CHUNKED:
        lines.append(_CHUNKED)
    if not keep_alive or framing is Framing.CLOSED:
        lines.append(CLOSE)
    elif version == "1.0":
        lines.append(KEEP_ALIVE)
    text = b"\r\n".join((status_line(status), *lines, _date_line(int(time.time()))))
    if not text.count(b"\n") == text.count(b"\r") == len(lines) + 3:
        raise ValueError("a header of a response has a line's end in it")
    return ResponseHead(text, framing, length or 0)


def head_text(head: AnswerHead) -> bytes:
    """A whole response's head as a template with a place for the length; ValueError: a bad header."""
    lines = [name + b": " + value for name, value in head.headers]
    text = b"\r\n".join((status_line(head.status), *lines, b"")).replace(b"%", b"%%")
    if not text.count(b"\n") == text.count(b"\r") == len(lines) + 1:
        raise ValueError("a header of a response has a line's end in it")
    start = text.find(b"\n", text.find(b"\n") + 1) + 1 or len(text)
    head.text = text[:start] + b"content-length: %d\r\n" + text[start:]
    return head.text


def _framing(status: int, method: str, version: str, length: int | None) -> Framing:
    if status in _BODILESS or method == "HEAD":
        return Framing.NONE
    if length is not None:
        return Framing.SIZED
    return Framing.CLOSED if version == "1.0" else Framing.CHUNKED


def _lines(headers: Iterable[Header], *, with_length: bool) -> tuple[list[bytes], int | None]:
    lines: list[bytes] = []
    length = None
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
            if not with_length:
                continue
        elif name in _OWN:
            continue
        lines.append(b"%b: %b" % (name, value))
    return lines, length


def refusal(status: int, text: str) -> bytes:
    """An error that the server itself answers, after which it closes the connection."""
    body = json.dumps({"error": text}, separators=(",", ":")).encode()
    headers = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)))
    return response_head(status, headers, keep_alive=False).text + body


def with_line(head: bytes, line: bytes) -> bytes:
    """A complete head with one more line."""
    return head[:-2] + line + b"\r\n\r\n"


@functools.lru_cache(64)
def status_line(status: int) -> bytes:
    try:
        reason = http.HTTPStatus(status).phrase
    except ValueError:
        reason = ""
    return f"HTTP/1.1 {status} {reason}".encode()


@functools.lru_cache(256)
def whole_head(template: bytes, nbytes: int, now_s: int) -> bytes:
    """A head out of ``head_text``, with the length and the date."""
    return template % nbytes + _date_line(now_s)


@functools.lru_cache(2)
def _date_line(now_s: int) -> bytes:
    """The last line of a head, which is the date, with the end of the head."""
    return f"date: {formatdate(now_s, usegmt=True)}\r\n\r\n".encode()
