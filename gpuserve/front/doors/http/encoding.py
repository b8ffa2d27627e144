"""Content codings of the HTTP endpoint: gzip and deflate (zlib) of requests and of responses. Pure; zlib
releases the GIL, so a caller may move large bodies to a thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Final

from gpuserve.core.errors import Unimplemented
from gpuserve.front.doors.access.inflation import WINDOW_BITS
from gpuserve.front.exchange.exchange import AnswerHead

#: Goes with the refusal of a coding, so that the client learns what it may use.
ACCEPT_ENCODING: Final = (b"accept-encoding", b"gzip, deflate")
IDENTITY: Final = "identity"
#: The fastest: tensors are mostly floats, where harder work gains next to nothing.
_LEVEL: Final = 1


class UnsupportedCoding(Unimplemented):
    """A request body in a coding that this server does not read."""


def request_coding(content_encoding: str | None) -> str:
    """ "identity", "gzip" or "deflate"; UnsupportedCoding: any other, answered with ``ACCEPT_ENCODING``."""
    coding = (content_encoding or IDENTITY).strip().lower().removeprefix("x-") or IDENTITY
    if coding != IDENTITY and coding not in WINDOW_BITS:
        raise UnsupportedCoding("Unsupported compression type")
    return coding


def negotiate(accept_encoding: str | None) -> str:
    """The coding of a response: the known one with the highest q-value in the header, the first of equals."""
    if not accept_encoding:
        return IDENTITY
    best, best_quality = IDENTITY, 0.0
    for coding, quality in _preferences(accept_encoding):
        known = coding == IDENTITY or coding in WINDOW_BITS
        if known and quality > best_quality:
            best, best_quality = coding, quality
    return best


def compress(
    coding: str, head: AnswerHead, pieces: Iterable[bytes | memoryview]
) -> tuple[AnswerHead, list[bytes]]:
    """Head and body of a response in the coding that ``negotiate`` chose ("gzip" or "deflate")."""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, WINDOW_BITS[coding])
    out = [compressor.compress(piece) for piece in pieces]
    out = [piece for piece in (*out, compressor.flush()) if piece]
    coded = ((b"content-encoding", coding.encode()), (b"vary", b"accept-encoding"))
    return AnswerHead(head.status, (*head.headers, *coded)), out


def _preferences(accept_encoding: str) -> Iterator[tuple[str, float]]:
    for item in accept_encoding.lower().split(","):
        coding, _, parameters = item.partition(";")
        yield coding.strip(), _quality(parameters)


def _quality(parameters: str) -> float:
    """The q-value, 1 where there is none; one that is no number from 0 to 1 counts as refused."""
    key, _, value = parameters.partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        quality = float(value)
    except ValueError:
        return 0.0
    return quality if 0.0 <= quality <= 1.0 else 0.0
