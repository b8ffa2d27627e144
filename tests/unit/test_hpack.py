"""Header blocks, against another implementation; tables, limits, and blocks made to break something."""

from __future__ import annotations

import time

import hpack
import pytest
from fuzzing.header_blocks import FIELDS
from fuzzing.header_blocks import LIMIT_NBYTES as LIMIT
from hpack.exceptions import HPACKDecodingError
from hpack.hpack import encode_integer
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.huffman_table import decode_huffman as decode_by_hpack
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.net.exchange import AnswerHead, Header
from gpuserve.front.net.http2_hpack import (
    FIELD_OVERHEAD_NBYTES,
    TABLE_NBYTES,
    Decoder,
    Encoder,
    HeadTooLarge,
    HpackError,
    HuffmanError,
    decode_huffman,
    status_field,
)


def theirs(block: bytes) -> list[Header]:
    return [(bytes(name), bytes(value)) for name, value in hpack.Decoder().decode(block, raw=True)]


@given(st.lists(st.tuples(FIELDS, st.booleans(), st.none() | st.integers(0, TABLE_NBYTES)), max_size=12))
def test_blocks_of_one_connection_decode_again(blocks: list[tuple[list[Header], bool, int | None]]) -> None:
    encoder, decoder = hpack.Encoder(), Decoder(LIMIT)
    for fields, huffman, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        assert decoder.decode(encoder.encode(fields, huffman=huffman)) == fields


class Client:
    """Reads our blocks as the ``hpack`` package does, with tables of the sizes that it announces."""

    def __init__(self) -> None:
        self.encoder = Encoder()
        self._decoder = hpack.Decoder(LIMIT)

    def announce(self, nbytes: int) -> None:
        self._decoder.max_allowed_table_size = nbytes
        self.encoder.resize(nbytes)

    def read(self, block: bytes) -> list[Header]:
        return [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]


REPEATED = st.sampled_from([b"content-type", b"grpc-status", b"grpc-encoding"])
ANSWERED = st.lists(st.tuples(REPEATED, st.binary(max_size=400)), max_size=4).map(tuple)
SIZES = st.sampled_from([0, 33, 60, 100, 500, TABLE_NBYTES, 1 << 16])


@given(st.lists(st.tuples(FIELDS | ANSWERED.map(list), st.none() | SIZES)))
def test_our_blocks_decode_with_any_table(blocks: list[tuple[list[Header], int | None]]) -> None:
    client = Client()
    for fields, size in blocks:
        if size is not None:
            client.announce(size)
        assert client.read(client.encoder.encode(fields)) == fields


@given(st.lists(ANSWERED, min_size=1), st.lists(st.tuples(st.integers(0), st.booleans(), st.none() | SIZES)))
def test_heads_and_trailers_that_are_kept_decode_to_the_same(
    fields: list[tuple[Header, ...]], asked: list[tuple[int, bool, int | None]]
) -> None:
    answers, client = [AnswerHead(200, one, one) for one in fields], Client()
    for number, is_tail, size in asked:
        if size is not None:
            client.announce(size)
        answer, encoder = answers[number % len(answers)], client.encoder
        if is_tail:
            assert client.read(encoder.tails.get(answer) or encoder.tail(answer)) == list(answer.trailers)
        else:
            said = client.read(encoder.heads.get(answer) or encoder.head(answer))
            assert said == [status_field(200), *answer.headers]


def test_what_answers_repeat_takes_a_byte_the_second_time() -> None:
    answer = AnswerHead(200, [(b"content-type", b"application/grpc")], [(b"grpc-status", b"0")])
    encoder = Encoder()
    first = encoder.head(answer), encoder.tail(answer)
    assert [len(one) for one in first] == [19, 15]
    assert answer not in encoder.heads
    assert (encoder.head(answer), encoder.tail(answer)) == (b"\x88\xbf", b"\xbe")
    assert (encoder.heads[answer], encoder.tails[answer]) == (b"\x88\xbf", b"\xbe")


def test_other_fields_stay_out_of_the_table() -> None:
    encoder = Encoder()
    assert encoder.encode([(b"grpc-message", b"a")]) == encoder.encode([(b"grpc-message", b"a")])


def test_a_client_with_a_smaller_table_is_told_once_and_a_full_one_takes_no_more() -> None:
    client = Client()
    client.encoder.encode([(b"grpc-status", b"0")])
    client.announce(50)
    fields = [(b"grpc-status", b"0"), (b"grpc-status", b"5")]
    first, second = client.encoder.encode(fields), client.encoder.encode(fields)
    assert first.startswith(b"\x20" + resized(50))
    assert second[:1] == b"\xbe"
    assert second[1:] == client.encoder.encode(fields[1:]) != b""
    assert Encoder(0).encode(fields) * 2 == Encoder(0).encode(fields * 2)


@given(st.integers(0, 70_000))
def test_lengths_of_every_size(nbytes: int) -> None:
    fields = [(b"x", bytes(nbytes))]
    assert Decoder(1 << 20).decode(Encoder().encode(fields)) == fields


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_decode_as_elsewhere(block: bytes) -> None:
    try:
        fields = Decoder(LIMIT).decode(block)
    except HpackError:
        return
    assert fields == theirs(block)


def test_whole_fields_of_the_static_table_take_a_byte() -> None:
    assert Encoder().encode([status_field(200), (b":method", b"POST")]) == b"\x88\x83"


# ---- the dynamic table ----------------------------------------------------------------------


def kept(name: bytes, value: bytes) -> bytes:
    """A literal field that goes into the table."""
    return b"\x40" + bytes(encode_integer(len(name), 7)) + name + bytes(encode_integer(len(value), 7)) + value


def indexed(index: int) -> bytes:
    block = encode_integer(index, 7)
    block[0] |= 0x80
    return bytes(block)


def resized(nbytes: int) -> bytes:
    block = encode_integer(nbytes, 5)
    block[0] |= 0x20
    return bytes(block)


NEWEST = 62


def test_the_newest_entry_has_the_first_index() -> None:
    decoder = Decoder(LIMIT)
    decoder.decode(kept(b"a", b"1") + kept(b"b", b"2"))
    assert decoder.decode(indexed(NEWEST) + indexed(NEWEST + 1)) == [(b"b", b"2"), (b"a", b"1")]
    with pytest.raises(HpackError, match="index 64"):
        decoder.decode(indexed(NEWEST + 2))


def test_entries_go_when_the_table_is_over_its_size() -> None:
    decoder = Decoder(LIMIT)
    value = bytes(TABLE_NBYTES // 4 - FIELD_OVERHEAD_NBYTES - 1)
    decoder.decode(b"".join(kept(b"%d" % n, value) for n in range(4)))
    assert decoder.decode(indexed(NEWEST + 3))[0][0] == b"0"
    decoder.decode(kept(b"4", value))
    assert decoder.decode(indexed(NEWEST + 3))[0][0] == b"1"


def test_an_entry_that_is_larger_than_the_table_empties_it() -> None:
    decoder = Decoder(LIMIT)
    decoder.decode(kept(b"a", b"1"))
    large = bytes(TABLE_NBYTES)
    assert decoder.decode(kept(b"b", large)) == [(b"b", large)]
    with pytest.raises(HpackError, match="no table has"):
        decoder.decode(indexed(NEWEST))


def test_a_smaller_size_evicts_and_a_larger_one_brings_nothing_back() -> None:
    decoder = Decoder(LIMIT)
    decoder.decode(kept(b"a", b"1") + kept(b"b", b"2"))
    assert decoder.decode(resized(34) + indexed(NEWEST)) == [(b"b", b"2")]
    assert decoder.decode(resized(0) + resized(TABLE_NBYTES) + kept(b"c", b"3")) == [(b"c", b"3")]
    assert decoder.decode(indexed(NEWEST)) == [(b"c", b"3")]
    with pytest.raises(HpackError, match="no table has"):
        decoder.decode(indexed(NEWEST + 1))


def test_the_revision_changes_with_the_table_and_with_nothing_else() -> None:
    decoder = Decoder(LIMIT)
    decoder.decode(Encoder().encode([(b"a", b"1"), (b":method", b"POST")]))
    assert decoder.revision == 0
    decoder.decode(kept(b"a", b"1"))
    decoder.decode(resized(0))
    assert decoder.revision == 2


# ---- blocks that are none -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (indexed(0), "index 0"),
        (indexed(NEWEST), "index 62"),
        (indexed(1 << 30), "no table has"),
        (b"\xff" + b"\xff" * 9 + b"\x01", "too large"),
        (b"\xff" + b"\x80" * 9, "too large"),
        (b"\x7f", "ends in the middle"),
        (b"\x40", "ends in the middle"),
        (b"\x40\x01", "longer than its block"),
        (b"\x40\x01a", "ends in the middle"),
        (b"\x40\x01a\x02b", "longer than its block"),
        (b"\x40\x01a\x81\xff", "Huffman"),
        (b"\x00\xff\xff\xff\xff\x0f", "longer than its block"),
        (resized(TABLE_NBYTES + 1), "set to 4097"),
        (b"\x82" + resized(0), "set to 0"),
    ],
)
def test_malformed_blocks(block: bytes, text: str) -> None:
    with pytest.raises(HpackError, match=text):
        Decoder(LIMIT).decode(block)


def test_a_block_that_is_cut_off_anywhere_is_refused() -> None:
    block = kept(b"name", b"v" * 200)
    for nbytes in range(1, len(block)):
        with pytest.raises(HpackError):
            Decoder(LIMIT).decode(block[:nbytes])


def test_a_small_block_of_a_large_head_is_refused() -> None:
    """One large entry, and its index again and again."""
    decoder = Decoder(LIMIT)
    block = kept(b"a", bytes(4000)) + indexed(NEWEST) * 16_000
    with pytest.raises(HpackError, match="far over the limit of 65536 bytes"):
        decoder.decode(block)


def test_a_head_over_the_limit_leaves_the_tables_equal() -> None:
    decoder = Decoder(LIMIT)
    block = kept(b"a", bytes(4000)) + indexed(NEWEST) * 20 + kept(b"b", b"c")
    with pytest.raises(HeadTooLarge, match="65536 bytes"):
        decoder.decode(block)
    assert decoder.decode(indexed(NEWEST)) == [(b"b", b"c")]


def test_empty_fields_count() -> None:
    empty = b"\x00\x00\x00"
    assert len(Decoder(320).decode(empty * 10)) == 10
    with pytest.raises(HeadTooLarge):
        Decoder(320).decode(empty * 11)


# ---- huffman ---------------------------------------------------------------------------------


ENCODER = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)


@given(st.binary(max_size=600))
def test_what_was_encoded_is_decoded(text: bytes) -> None:
    assert decode_huffman(ENCODER.encode(text)) == text


def test_every_byte_in_every_phase() -> None:
    """Blocks of a long string end within codes of every length."""
    text = bytes(range(256)) * 3
    for shift in range(16):
        shifted = b"0" * shift + text
        assert decode_huffman(ENCODER.encode(shifted)) == shifted


@given(st.binary(max_size=300))
def test_any_bytes_decode_to_what_encodes_to_them_or_not_at_all(coded: bytes) -> None:
    try:
        text = decode_huffman(coded)
    except HuffmanError:
        return
    assert ENCODER.encode(text) == coded


@given(
    st.lists(st.sampled_from([b"a", b"0", b"\n", b"\xf9", b"\x16", b"Zw"]) | st.binary(max_size=8)),
    st.lists(st.sampled_from([b"\xff", b"\xff\xff\xff", b"\xfc", b"\x00", b"\x7f"]), max_size=3),
    st.integers(0, 300),
)
def test_nearly_right_strings_are_read_as_elsewhere(
    texts: list[bytes], behind: list[bytes], kept: int
) -> None:
    """Cut, and with bits behind it: where it may end, how it may be padded, and what is in it."""
    coded = (ENCODER.encode(b"".join(texts)) + b"".join(behind))[:kept]
    try:
        expected = decode_by_hpack(coded)
    except HPACKDecodingError:
        with pytest.raises(HuffmanError):
            decode_huffman(coded)
    else:
        assert decode_huffman(coded) == expected


@pytest.mark.parametrize(
    "coded",
    [
        b"\xff",  # eight bits of padding
        b"\x1c\x64\xff",
        b"\x18",  # padding of zeros
        b"\xff\xff\xff\xff",  # the end of string
        b"\xff\xff\xff\xfc" * 100,
        b"\xff" * 129,
    ],
)
def test_strings_that_are_none(coded: bytes) -> None:
    with pytest.raises(HuffmanError):
        decode_huffman(coded)


def test_a_long_string_costs_its_length_and_no_more() -> None:
    short, long = (ENCODER.encode(b"a0" * n) for n in (2_000, 32_000))

    def cost_s(coded: bytes) -> float:
        began = time.process_time()
        decode_huffman(coded)
        return time.process_time() - began

    ratio = min(cost_s(long) for _ in range(3)) / min(cost_s(short) for _ in range(5))
    assert ratio < 16 * 2.5
