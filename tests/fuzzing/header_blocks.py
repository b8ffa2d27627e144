"""The header blocks of a connection, one after the other: read as the ``hpack`` package reads them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import hpack
from hpack.hpack import encode_integer
from hypothesis import strategies as st

from gpuserve.front.net.http2_hpack import TABLE_NBYTES, Decoder, HeadTooLarge, HpackError

LIMIT_NBYTES = 64 << 10
_NAMES = st.sampled_from(
    [b":path", b":method", b":status", b"te", b"cookie", b"grpc-timeout", b"x-a", b"x-long-er"]
)
_VALUES = st.one_of(st.sampled_from([b"", b"GET", b"200", b"/", b"trailers"]), st.binary(max_size=300))
FIELDS = st.lists(st.tuples(_NAMES, _VALUES), max_size=12)


def integer(number: int, bits: int, pattern: int) -> bytes:
    """A number with a prefix of so many bits, after a pattern."""
    encoded = encode_integer(number, bits)
    encoded[0] |= pattern
    return bytes(encoded)


def _text(one: tuple[bytes, bool]) -> bytes:
    """A string, or one that says that it is Huffman-coded."""
    text, coded = one
    return integer(len(text), 7, 0x80 if coded else 0) + text


_TEXTS = st.tuples(
    st.sampled_from([b"", b"a", b"\x1f", b"\xf8", b"v" * 900]) | st.binary(max_size=40), st.booleans()
)
_INDICES = st.integers(0, 70) | st.sampled_from([127, 200, 1 << 14, 1 << 30])
_PARTS = st.one_of(
    _INDICES.map(lambda n: integer(n, 7, 0x80)),
    st.tuples(_INDICES, _TEXTS).map(lambda one: integer(one[0], 6, 0x40) + _text(one[1])),
    st.tuples(_TEXTS, _TEXTS).map(lambda one: b"\x40" + _text(one[0]) + _text(one[1])),
    st.tuples(_TEXTS, _TEXTS).map(lambda one: b"\x10" + _text(one[0]) + _text(one[1])),
    st.sampled_from([0, 34, 100, TABLE_NBYTES, TABLE_NBYTES + 1]).map(lambda n: integer(n, 5, 0x20)),
    st.binary(max_size=4),
)


@st.composite
def _right(draw: st.DrawFn) -> list[bytes]:
    """What an encoder makes."""
    encoder = hpack.Encoder()
    blocks = []
    for fields in draw(st.lists(FIELDS, max_size=6)):
        if draw(st.integers(0, 3)) == 0:
            encoder.header_table_size = draw(st.integers(0, TABLE_NBYTES))
        blocks.append(encoder.encode(fields, huffman=draw(st.booleans())))
    return blocks


INPUTS = st.one_of(
    _right(),
    st.lists(st.lists(_PARTS, max_size=6).map(b"".join), max_size=5),
    st.lists(st.binary(max_size=200), max_size=2),
).map(lambda blocks: b"".join(struct.pack(">H", len(one)) + one for one in blocks if len(one) < 1 << 16))


def _blocks(data: bytes) -> Iterator[bytes]:
    while len(data) > 2:
        nbytes = int.from_bytes(data[:2])
        yield data[2 : 2 + nbytes]
        data = data[2 + nbytes :]


def check(data: bytes) -> None:
    """Each block is read as elsewhere, until one is refused by both."""
    ours, theirs = Decoder(LIMIT_NBYTES), hpack.Decoder(LIMIT_NBYTES)
    for block in _blocks(data):
        try:
            fields = ours.decode(block)
        except HeadTooLarge:
            return
        except HpackError:
            fields = None
        try:
            expected = [(bytes(name), bytes(value)) for name, value in theirs.decode(block, raw=True)]
        except hpack.HPACKError:
            expected = None
        assert fields == expected
        if fields is None:
            return
