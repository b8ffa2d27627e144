"""The BYTES layout: what the fast ways of reading and writing it do is what one step an element does."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from exploring import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuserve_worker.protocol.tensor import (
    bytes_array,
    check_bytes,
    common_length,
    decode_bytes,
    element_ends,
    encode_bytes,
    holds_elements,
)

#: Elements of any lengths, and of one length, among them zeros at the end, which numpy's own strings lose.
MIXED = st.lists(st.binary(max_size=9), max_size=12)
ALIKE = st.integers(0, 300).flatmap(
    lambda length: st.lists(st.binary(min_size=length, max_size=length), min_size=1, max_size=12)
)
STRINGS = st.one_of(MIXED, ALIKE, st.lists(st.sampled_from([b"", b"\0", b"a\0\0", b"abc"]), max_size=400))


def written(elements: list[bytes]) -> bytes:
    """The layout, one step an element."""
    return b"".join(struct.pack("<I", len(one)) + one for one in elements)


def read(data: bytes, count: int) -> list[bytes] | None:
    """The elements of the layout, one step an element; None where they are not exactly ``count``."""
    elements, position = [], 0
    while position < len(data):
        if position + 4 > len(data):
            return None
        end = position + 4 + int.from_bytes(data[position : position + 4], "little")
        if end > len(data):
            return None
        elements.append(data[position + 4 : end])
        position = end
    return elements if len(elements) == count else None


def view_of(data: bytes) -> memoryview:
    return memoryview(data)


@st.composite
def payloads(draw: st.DrawFn) -> tuple[bytes, int]:
    """Bytes, mostly nearly right, and how many elements they should hold."""
    data = bytearray(written(elements := draw(STRINGS)))
    count = len(elements) + draw(st.sampled_from([0, 0, 0, 0, -1, 1, 1 << 40]))
    match draw(st.integers(0, 5)):
        case 0 if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        case 1:
            del data[draw(st.integers(0, len(data))) :]
        case 2:
            data += draw(st.binary(max_size=5))
        case 3:
            data = bytearray(draw(st.binary(max_size=20)))
    return bytes(data), max(count, 0)


@settings(max_examples=examples(400), deadline=None)
@given(payloads())
@example((b"", 0))
@example((b"\0\0\0\0", 0))
@example((b"\4\0\0\0" * 2, 1))
@example((b"\4\0\0\0" * 2, 2))
@example((struct.pack("<I", 0xFFFF_FFFF) + b"abc", 1))
@example((b"\1\0\0\0a" + b"\1\1\0\0a", 2))
def test_any_bytes_are_read_as_one_step_an_element_reads_them(payload: tuple[bytes, int]) -> None:
    data, count = payload
    expected = read(data, count)
    for held in (data, memoryview(data), memoryview(bytearray(data))):
        assert holds_elements(held, count) is (expected is not None)
        assert (check_bytes(held, count) is None) is (expected is not None)
        if expected is None:
            for reader in (decode_bytes, lambda data, count: element_ends(data, [count])):
                with pytest.raises(ValueError, match=r"."):
                    reader(held, count)
            assert common_length(held, count) is None
        else:
            assert decode_bytes(held, count) == expected
            lengths = {len(one) for one in expected}
            assert common_length(held, count) == (lengths.pop() if len(lengths) == 1 else None)


@settings(max_examples=examples(300), deadline=None)
@given(STRINGS)
def test_arrays_hold_what_was_written(elements: list[bytes]) -> None:
    data = encode_bytes(elements)
    assert data == written(elements)
    array = bytes_array(memoryview(bytearray(data)), (len(elements), 1))
    assert array.dtype == object
    assert array.shape == (len(elements), 1)
    assert array.ravel().tolist() == elements
    assert {type(one) for one in array.ravel().tolist()} <= {bytes}
    assert encode_bytes(array.ravel().tolist()) == data


def test_elements_are_their_own_and_can_be_put_elsewhere() -> None:
    memory = bytearray(written([b"ab", b"cd", b"ef", b"gh"]))
    array = bytes_array(memoryview(memory), (2, 2))
    memory[:] = bytes(len(memory))
    assert array.tolist() == [[b"ab", b"cd"], [b"ef", b"gh"]]
    array[0, 0] = b"longer"
    assert array[0, 0] == b"longer"


@pytest.mark.parametrize("length", [0, 1, 1 << 16, (1 << 16) + 1])
def test_elements_of_one_length_of_any_size_are_read(length: int) -> None:
    elements = [bytes([number]) * length for number in range(3)]
    assert bytes_array(written(elements), (3,)).tolist() == elements


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.one_of(MIXED, ALIKE), max_size=6))
def test_the_elements_of_requests_end_where_each_was_written(requests: list[list[bytes]]) -> None:
    parts = [written(elements) for elements in requests]
    ends = element_ends(memoryview(b"".join(parts)), [len(elements) for elements in requests])
    assert ends == [len(b"".join(parts[: number + 1])) for number in range(len(parts))]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=4),
            st.text(max_size=4),
            st.binary(max_size=4).map(bytearray),
            st.binary(max_size=4).map(view_of),
            st.binary(max_size=4).map(np.bytes_),
        ),
        max_size=8,
    )
)
def test_whatever_holds_bytes_is_written_as_its_bytes(elements: list[Any]) -> None:
    plain = [one.encode() if isinstance(one, str) else bytes(one) for one in elements]
    assert encode_bytes(elements) == written(plain)
    assert encode_bytes(iter(elements)) == written(plain)


def test_wide_items_of_a_view_count_as_their_bytes() -> None:
    assert encode_bytes([np.arange(2, dtype="<u4").data]) == written([struct.pack("<II", 0, 1)])


@pytest.mark.parametrize("element", [1, None, 1.5, [b"a"]])
def test_what_is_no_string_is_refused(element: object) -> None:
    with pytest.raises(TypeError, match=f"an element is {type(element).__name__}"):
        encode_bytes([b"a", element])
