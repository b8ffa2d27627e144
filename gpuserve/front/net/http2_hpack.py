"""HTTP/2 header compression (RFC 7541): Huffman coding, decoder and encoder with dynamic tables. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

from gpuserve.front.net.exchange import AnswerHead, Header

#: The code length of each symbol in bits, one base-36 digit a symbol; the last symbol is the end of string
#: (RFC 7541, appendix B).
_CODE_LENGTHS: Final = (
    "dnsssssssoussussssssssusssssssss6aacd68baa8b8666555666666678f6ca"
    "d67777777777777777777777878djde6f56565666577666567655677777fbeds"
    "kmkkmmmnmnnnnnonoomnonnnnlmnmnnomlkmmnnlnmmolmnnllmlnmnnkmmmnmmn"
    "qqkjmnmpqqqrrqopjlqrrqrollqqsrrrkoklmllnmmppooqnqrqqrrrrrsrrrrrq"
    "u"
)
_EOS: Final = 256
#: Huffman strings up to this size are cached: clients send the same few.
_REMEMBERED_STRING_NBYTES: Final = 128


class HuffmanError(ValueError):
    """Bytes that are not a valid Huffman-coded string."""


def decode_huffman(coded: bytes) -> bytes:
    """Return the decoded string. Raise HuffmanError for invalid padding or an end-of-string symbol."""
    return _remembered_huffman(coded) if len(coded) <= _REMEMBERED_STRING_NBYTES else _decode_huffman(coded)


class _HuffmanNode(dict[int, "tuple[bytes, _HuffmanNode]"]):
    """A node of the code tree, of 256. Maps a byte to the symbols that end in it and the node after it.

    Entries are computed on first use; the whole table stays below 10 MB.
    """

    __slots__ = ("children", "is_padding", "symbol")

    def __init__(self, is_padding: bool) -> None:
        self.children: list[_HuffmanNode] = []
        #: Whether a string may end here: padding is at most seven ones.
        self.is_padding = is_padding
        self.symbol = -1

    def __missing__(self, byte: int) -> tuple[bytes, _HuffmanNode]:
        node, text = self, b""
        for bit in range(7, -1, -1):
            node = node.children[byte >> bit & 1]
            if node.symbol == _EOS:
                raise HuffmanError("it contains the end of string")
            if node.symbol >= 0:
                node, text = _huffman_tree(), text + bytes((node.symbol,))
        self[byte] = text, node
        return text, node


def _decode_huffman(coded: bytes) -> bytes:
    node = _huffman_tree()
    texts = []
    for byte in coded:
        text, node = node[byte]
        texts.append(text)
    if not node.is_padding:
        raise HuffmanError("its padding is wrong")
    return b"".join(texts)


_remembered_huffman = functools.lru_cache(maxsize=1024)(_decode_huffman)


@functools.cache
def _huffman_tree() -> _HuffmanNode:
    """Return the root of the canonical code tree: on each level the codes of that length come first."""
    lengths = [int(digit, 36) for digit in _CODE_LENGTHS]
    root = _HuffmanNode(is_padding=True)
    level = [root]
    for depth in range(1, max(lengths) + 1):
        for node in level:
            node.children = [_HuffmanNode(False), _HuffmanNode(node.is_padding and depth <= 7)]
        level = [child for node in level for child in node.children]
        for symbol in [symbol for symbol, length in enumerate(lengths) if length == depth]:
            level.pop(0).symbol = symbol
    return root


# ---- decoding -----------------------------------------------------------------------------

#: The maximum table size of a decoder, which is the protocol's default.
TABLE_NBYTES: Final = 4096
#: The start of a block that empties the table.
_NO_TABLE: Final = b"\x20"
#: Response headers with few different values. No other field enters a client's table.
_REPEATED: Final = frozenset(
    b"content-type grpc-accept-encoding grpc-encoding grpc-status inference-header-content-length".split()
)
#: Response heads, and trailers, whose encoded blocks a connection keeps.
_LASTING: Final = 16
_SHORT_NBYTES: Final = 64
#: The size of a field in tables and limits beside its strings.
FIELD_OVERHEAD_NBYTES: Final = 32
#: The maximum length of an encoded number in bytes; longer numbers are larger than any valid value.
_LONGEST_NUMBER: Final = 5
#: The static table: a name, and the value after ``=``.
_STATIC: Final[tuple[Header, ...]] = tuple(
    (name, value)
    for name, _, value in (
        entry.partition(b"=")
        for entry in (
            b":authority|:method=GET|:method=POST|:path=/|:path=/index.html|:scheme=http|:scheme=https|"
            b":status=200|:status=204|:status=206|:status=304|:status=400|:status=404|:status=500|"
            b"accept-charset|accept-encoding=gzip, deflate|accept-language|accept-ranges|accept|"
            b"access-control-allow-origin|age|allow|authorization|cache-control|content-disposition|"
            b"content-encoding|content-language|content-length|content-location|content-range|content-type|"
            b"cookie|date|etag|expect|expires|from|host|if-match|if-modified-since|if-none-match|if-range|"
            b"if-unmodified-since|last-modified|link|location|max-forwards|proxy-authenticate|"
            b"proxy-authorization|range|referer|refresh|retry-after|server|set-cookie|"
            b"strict-transport-security|transfer-encoding|user-agent|vary|via|www-authenticate"
        ).split(b"|")
    )
)
#: The first index of each field, and of each name.
_INDICES: Final = {field: index for index, field in enumerate(_STATIC, 1)}
_NAME_INDICES: Final = {name: index for index, (name, _) in reversed(list(enumerate(_STATIC, 1)))}
_N_STATIC: Final = len(_STATIC)
#: A head over the limit by more than this multiple of the limit is not decoded to its end.
_LARGEST_SKIPPED: Final = 1


class HpackError(ValueError):
    """A block that does not decode. The connection fails, because the tables of both ends differ then."""


class HeadTooLarge(ValueError):
    """Decoded fields over the limit. The block was decoded, so the tables of both ends still agree."""


class Decoder:
    """The decoder of one connection. ``revision`` changes whenever the dynamic table changes."""

    def __init__(self, limit_nbytes: int) -> None:
        self.revision = 0
        self._limit_nbytes = limit_nbytes
        #: The dynamic table, newest entry last.
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
        except HuffmanError as error:
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
            self.revision += 1
            self._dynamic.append(field)
            self._nbytes += len(name) + len(value) + FIELD_OVERHEAD_NBYTES
            self._evict()
        return field, position

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
    return (decode_huffman(text) if coded else text), end


# ---- encoding -----------------------------------------------------------------------------


class Encoder:
    """The encoder of one connection. Repeated headers enter the client's table until the table is full.

    No entry is evicted, so ``heads`` and ``tails``, encoded blocks, stay valid until a field is added.
    """

    __slots__ = ("_fields", "_prefix", "_references", "_room_nbytes", "_table_nbytes", "heads", "tails")

    def __init__(self, table_nbytes: int = TABLE_NBYTES) -> None:
        self.heads: dict[AnswerHead, bytes] = {}
        self.tails: dict[AnswerHead, bytes] = {}
        #: The client's table, newest first, and the encoded index of each field.
        self._fields: list[Header] = []
        self._references: dict[Header, bytes] = {}
        self._table_nbytes = self._room_nbytes = table_nbytes
        #: The required start of the next block.
        self._prefix = b""

    def encode(self, fields: Iterable[Header]) -> bytes:
        """Return the next block. Fields in a table are indexed, other fields are literal."""
        block = b"".join([self._references.get(field) or self._added(field) for field in fields])
        if self._prefix:
            block, self._prefix = self._prefix + block, b""
        return block

    def head(self, answer: AnswerHead) -> bytes:
        """Return the next block: the head of a complete response."""
        return self._lasting(self.heads, answer, (status_field(answer.status), *answer.headers))

    def tail(self, answer: AnswerHead) -> bytes:
        """Return the next block: the trailers of a complete response."""
        return self._lasting(self.tails, answer, answer.trailers)

    def resize(self, nbytes: int) -> None:
        """Set the size of the client's table. Empty our copy of the table if its size changes."""
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
        """Return the encoding of a field, and add the field to the client's table if it is repeated."""
        nbytes = len(field[0]) + len(field[1]) + FIELD_OVERHEAD_NBYTES
        if field[0] not in _REPEATED or nbytes > self._room_nbytes or field in _INDICES:
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
    name, value = field
    index = _INDICES.get(field)
    if index is not None:
        return bytes((0x80 | index,))
    index = _NAME_INDICES.get(name)
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
