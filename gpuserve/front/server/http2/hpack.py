"""Header compression of HTTP/2 (RFC 7541): a decoder and an encoder, each with its dynamic table. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

from gpuserve.front.exchange.exchange import AnswerHead, Header
from gpuserve.front.server.http2 import huffman

#: The table's size that a decoder allows, which is the protocol's own default.
TABLE_NBYTES: Final = 4096
#: What a block begins with to say that the table is empty from now on.
_NO_TABLE: Final = b"\x20"
#: What answers say again and again, each with few values. No other field is put into a client's table.
_REPEATED: Final = frozenset(
    {
        b"content-type",
        b"grpc-accept-encoding",
        b"grpc-encoding",
        b"grpc-status",
        b"inference-header-content-length",
    }
)
#: Heads, and trailers, of which a connection keeps the blocks.
_LASTING: Final = 16
_SHORT_NBYTES: Final = 64
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
#: A head over the limit by more than so many times the limit is not decoded to its end.
_LARGEST_SKIPPED: Final = 1


class HpackError(ValueError):
    """A block does not decode. The connection is lost with it, as both ends' tables differ from now on."""


class HeadTooLarge(ValueError):
    """The decoded fields are over the limit. The block was decoded, so that the tables do not differ."""


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
        """Return the fields of a block.

        Raises:
            HeadTooLarge: The fields are over the limit.
            HpackError: The block is malformed, or its fields are far over the limit.
        """
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
            if room >= 0:
                fields.append(field)
            elif room < -_LARGEST_SKIPPED * self._limit_nbytes:
                raise HpackError(f"the request head is far over the limit of {self._limit_nbytes} bytes")
        if room < 0:
            raise HeadTooLarge(f"the request head is over the limit of {self._limit_nbytes} bytes")
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


class Encoder:
    """Encodes the blocks of one connection, in the order in which they are sent. What answers repeat goes
    into the client's table until that is full. Nothing is put out of it again, so a field's index changes
    with new fields only; ``heads`` and ``tails`` are blocks that stay the same until then.
    """

    __slots__ = ("_fields", "_prefix", "_references", "_room_nbytes", "_table_nbytes", "heads", "tails")

    def __init__(self, table_nbytes: int = TABLE_NBYTES) -> None:
        self.heads: dict[AnswerHead, bytes] = {}
        self.tails: dict[AnswerHead, bytes] = {}
        #: In the client's table, the newest first, and how each is referred to.
        self._fields: list[Header] = []
        self._references: dict[Header, bytes] = {}
        self._table_nbytes = self._room_nbytes = table_nbytes
        #: What the next block has to begin with.
        self._prefix = b""

    def encode(self, fields: Iterable[Header]) -> bytes:
        """The next block. What is in a table is one number, other fields are literal."""
        block = b"".join([self._references.get(field) or self._added(field) for field in fields])
        if self._prefix:
            block, self._prefix = self._prefix + block, b""
        return block

    def head(self, answer: AnswerHead) -> bytes:
        """The next block is the head of a whole response."""
        return self._lasting(self.heads, answer, (status_field(answer.status), *answer.headers))

    def tail(self, answer: AnswerHead) -> bytes:
        """The next block is the trailers of a whole response."""
        return self._lasting(self.tails, answer, answer.trailers)

    def resize(self, nbytes: int) -> None:
        """The client's table may have so many bytes from now on. Where that changes ours, it begins anew."""
        nbytes = min(nbytes, TABLE_NBYTES)
        if nbytes != self._table_nbytes:
            self._table_nbytes = self._room_nbytes = nbytes
            self._prefix = _NO_TABLE + (_prefixed(nbytes, 0x1F, 0x20) if nbytes else b"")
            for one in (self._fields, self._references, self.heads, self.tails):
                one.clear()

    def _lasting(
        self, known: dict[AnswerHead, bytes], answer: AnswerHead, fields: tuple[Header, ...]
    ) -> bytes:
        n_fields, is_plain = len(self._fields), not self._prefix
        block = self.encode(fields)
        if is_plain and len(self._fields) == n_fields:
            if len(known) >= _LASTING:
                known.clear()
            known[answer] = block
        return block

    def _added(self, field: Header) -> bytes:
        """How a field is sent that is not in the client's table, and maybe is from now on."""
        nbytes = len(field[0]) + len(field[1]) + FIELD_OVERHEAD_NBYTES
        if field[0] not in _REPEATED or nbytes > self._room_nbytes or field in _indices():
            return _literal(field) if len(field[1]) > _SHORT_NBYTES else _remembered(field)
        self._room_nbytes -= nbytes
        self._fields.insert(0, field)
        numbered = enumerate(self._fields, _N_STATIC + 1)
        self._references = {one: _prefixed(index, 0x7F, 0x80) for index, one in numbered}
        self.heads.clear()
        self.tails.clear()
        return _literal(field, 0x3F, 0x40)


def status_field(status: int) -> Header:
    return b":status", b"%d" % status


def _literal(field: Header, mask: int = 0x0F, kind: int = 0) -> bytes:
    """A field that is one of the static table, or else literal, of this kind."""
    name, value = field
    index = _indices().get(field)
    if index is not None:
        return bytes((0x80 | index,))
    index = _name_indices().get(name)
    start = bytes((kind,)) + _length(name) + name if index is None else _prefixed(index, mask, kind)
    return start + _length(value) + value


_remembered = functools.lru_cache(maxsize=1024)(_literal)


def _length(text: bytes) -> bytes:
    return _prefixed(len(text), 0x7F)


def _prefixed(number: int, mask: int, kind: int = 0) -> bytes:
    if number < mask:
        return bytes((kind | number,))
    number -= mask
    encoded = bytearray((kind | mask,))
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
