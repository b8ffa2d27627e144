"""Header compression of HTTP/2 (RFC 7541): a decoder with its dynamic table, and an encoder without. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

from gpuserve.front.exchange.exchange import Header
from gpuserve.front.server.http2 import huffman

#: The table's size that a decoder allows, which is the protocol's own default.
TABLE_NBYTES: Final = 4096
#: What a block begins with to say that the table is empty from now on.
NO_TABLE: Final = b"\x20"
#: What a field counts beside its strings, in tables and in limits.
FIELD_OVERHEAD_NBYTES: Final = 32
#: A number of more bytes than this is far larger than anything here.
_LONGEST_NUMBER: Final = 5
_STATIC: Final[tuple[Header, ...]] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
)
_N_STATIC: Final = len(_STATIC)


class HpackError(ValueError):
    """A block does not decode. The connection is lost with it, as both ends' tables differ from now on."""


class HeadTooLarge(HpackError):
    """The decoded fields are over the limit."""


class Decoder:
    """Decodes the blocks of one connection, in order. ``revision`` changes with the dynamic table."""

    def __init__(self, limit_nbytes: int) -> None:
        self.revision = 0
        self._limit_nbytes = limit_nbytes
        #: The newest at the end.
        self._dynamic: list[Header] = []
        self._nbytes = 0
        self._most_nbytes = TABLE_NBYTES

    def decode(self, block: bytes) -> list[Header]:
        """The fields of a block; HpackError: it is malformed, or too large."""
        try:
            return self._decode(block)
        except IndexError:
            raise HpackError("a header block ends in the middle of a field") from None
        except huffman.HuffmanError as error:
            raise HpackError(f"a header string is not Huffman-coded right: {error}") from None

    def _decode(self, block: bytes) -> list[Header]:
        fields: list[Header] = []
        position, room = 0, self._limit_nbytes
        while position < len(block):
            first = block[position]
            if first & 0x80:
                index, position = _number(block, position, 0x7F)
                field = self._entry(index)
            elif first & 0xE0 == 0x20:
                position = self._resize(block, position, begun=bool(fields))
                continue
            else:
                field, position = self._literal(block, position, keep=bool(first & 0x40))
            room -= len(field[0]) + len(field[1]) + FIELD_OVERHEAD_NBYTES
            if room < 0:
                raise HeadTooLarge(f"the request head is over the limit of {self._limit_nbytes} bytes")
            fields.append(field)
        return fields

    def _entry(self, index: int) -> Header:
        if 0 < index <= _N_STATIC:
            return _STATIC[index - 1]
        if _N_STATIC < index <= _N_STATIC + len(self._dynamic):
            return self._dynamic[_N_STATIC - index]
        raise HpackError(f"a header field has index {index}, which no table has")

    def _literal(self, block: bytes, position: int, *, keep: bool) -> tuple[Header, int]:
        index, position = _number(block, position, 0x3F if keep else 0x0F)
        if index:
            name = self._entry(index)[0]
        else:
            name, position = _string(block, position)
        value, position = _string(block, position)
        field = name, value
        if keep:
            self._keep(field)
        return field, position

    def _keep(self, field: Header) -> None:
        self.revision += 1
        self._dynamic.append(field)
        self._nbytes += len(field[0]) + len(field[1]) + FIELD_OVERHEAD_NBYTES
        self._evict()

    def _evict(self) -> None:
        while self._nbytes > self._most_nbytes:
            name, value = self._dynamic.pop(0)
            self._nbytes -= len(name) + len(value) + FIELD_OVERHEAD_NBYTES

    def _resize(self, block: bytes, position: int, *, begun: bool) -> int:
        size, position = _number(block, position, 0x1F)
        if begun or size > TABLE_NBYTES:
            raise HpackError(f"the size of the header table is set to {size} where it cannot be")
        self.revision += 1
        self._most_nbytes = size
        self._evict()
        return position


def _number(block: bytes, position: int, mask: int) -> tuple[int, int]:
    number = block[position] & mask
    position += 1
    if number < mask:
        return number, position
    for shift in range(0, 7 * _LONGEST_NUMBER, 7):
        byte = block[position]
        position += 1
        number += (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise HpackError("a number in a header block is too large")


def _string(block: bytes, position: int) -> tuple[bytes, int]:
    coded = block[position] & 0x80
    nbytes, position = _number(block, position, 0x7F)
    end = position + nbytes
    if end > len(block):
        raise HpackError("a header string is longer than its block")
    text = block[position:end]
    return (huffman.decode(text) if coded else text), end


# ---- encoding -----------------------------------------------------------------------------


def encode(fields: Iterable[Header]) -> bytes:
    """A block that changes no table: whole fields of the static one by their index, others literally."""
    return b"".join(map(_encoded, fields))


def status_field(status: int) -> Header:
    return b":status", b"%d" % status


def _encoded(field: Header) -> bytes:
    return _remembered(field) if len(field[1]) <= 64 else _encode(field)


def _encode(field: Header) -> bytes:
    name, value = field
    index = _indices().get(field)
    if index is not None:
        return bytes((0x80 | index,))
    index = _name_indices().get(name)
    start = b"\x00" + _length(name) + name if index is None else _prefixed(index, 0x0F)
    return start + _length(value) + value


_remembered = functools.lru_cache(maxsize=1024)(_encode)


def _length(text: bytes) -> bytes:
    return _prefixed(len(text), 0x7F)


def _prefixed(number: int, mask: int) -> bytes:
    if number < mask:
        return bytes((number,))
    number -= mask
    encoded = bytearray((mask,))
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


@functools.cache
def _indices() -> dict[Header, int]:
    return {field: index for index, field in enumerate(_STATIC, 1)}


@functools.cache
def _name_indices() -> dict[bytes, int]:
    return {name: index for index, (name, _) in reversed(list(enumerate(_STATIC, 1)))}
