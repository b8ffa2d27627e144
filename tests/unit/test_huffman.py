"""Huffman-coded strings, against another implementation."""

from __future__ import annotations

import time

import pytest
from hpack.exceptions import HPACKDecodingError
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.huffman_table import decode_huffman as decode_by_hpack
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.net.http2_hpack import HuffmanError, decode_huffman

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
def test_what_is_nearly_right_is_read_as_elsewhere(
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
