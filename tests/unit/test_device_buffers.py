"""The bookkeeping of device buffers, and how the inputs of a batch are laid out in one. No CUDA."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve_worker.cuda.copies.cuda_session import SMALL_NBYTES, Piece, layout, runs
from gpuserve_worker.cuda.device.arrays import ALIGNMENT, SizedCache, size_class
from gpuserve_worker.protocol import wire


def test_the_smallest_that_fits_and_of_those_the_longest_unused() -> None:
    shelf: SizedCache[str] = SizedCache(1000)
    for nbytes, name in ((300, "large"), (100, "old"), (100, "new"), (50, "small")):
        shelf.put(nbytes, name)
    assert [shelf.pop(90), shelf.pop(90), shelf.pop(90)] == ["old", "new", "large"]
    assert shelf.pop(90) is None
    assert shelf.nbytes == 50


def test_what_is_far_too_large_is_left_for_others() -> None:
    shelf: SizedCache[str] = SizedCache(10_000)
    shelf.put(1000, "large")
    assert shelf.pop(100) is None
    assert shelf.pop(300) == "large"


def test_what_is_over_the_limit_goes_the_longest_unused_first() -> None:
    shelf: SizedCache[int] = SizedCache(250)
    for number in range(4):
        shelf.put(100, number)
    assert shelf.surplus() == [0, 1]
    assert shelf.surplus() == []
    assert shelf.empty() == [2, 3]
    assert shelf.nbytes == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1 << 20)), max_size=60))
def test_nothing_is_given_twice_and_nothing_is_lost(steps: list[tuple[bool, int]]) -> None:
    shelf: SizedCache[int] = SizedCache(4 << 20)
    sizes: list[int] = []
    inside: set[int] = set()
    for puts, nbytes in steps:
        if puts:
            inside.add(len(sizes))
            shelf.put(nbytes, len(sizes))
            sizes.append(nbytes)
            dropped = set(shelf.surplus())
            assert dropped <= inside
            inside -= dropped
        elif (item := shelf.pop(nbytes)) is not None:
            assert sizes[item] >= nbytes
            inside.remove(item)
        assert shelf.nbytes == sum(sizes[item] for item in inside)
    assert set(shelf.empty()) == inside


@given(st.lists(st.integers(1, 1 << 26), max_size=30), st.integers(1, 1 << 26), st.sampled_from([2, 4]))
def test_the_smallest_fitting_buffer_is_given_and_wastes_little(
    there: list[int], wanted: int, slack: int
) -> None:
    """By the sizes that are asked for, a block of 32 MiB is never given to who wants 64 KiB."""
    shelf: SizedCache[int] = SizedCache(1 << 40, slack)
    for number, nbytes in enumerate(there):
        shelf.put(size_class(nbytes), number)
    given = shelf.pop(size_class(wanted))
    fitting = [
        size_class(nbytes)
        for nbytes in there
        if size_class(wanted) <= size_class(nbytes) <= slack * size_class(wanted)
    ]
    if given is None:
        assert not fitting
    else:
        size = size_class(there[given])
        assert size == min(fitting)
        assert wanted <= size <= slack * max(64 << 10, wanted + wanted // 8 + 1)


@given(st.integers(0, 1 << 40))
def test_a_size_class_is_little_more_than_what_was_asked_for(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size <= max(64 << 10, nbytes + nbytes // 8 + 1)
    assert size_class(size) == size


def place(nbytes: int) -> wire.Ref:
    return wire.Ref(0, 0, nbytes)


def test_tensors_begin_on_a_boundary_and_parts_follow_each_other() -> None:
    parts = wire.Parts((b"1234", place(40_000), b"5678"))
    tensors = [
        wire.WireTensor("a", "INT8", (3,), b"abc"),
        wire.WireTensor("b", "FP32", (10_002,), parts),
        wire.WireTensor("c", "FP32", (0,), b""),
    ]
    offsets, pieces, nbytes = layout(tensors)
    assert offsets == [0, ALIGNMENT, -(-(ALIGNMENT + 40_008) // ALIGNMENT) * ALIGNMENT]
    assert nbytes == offsets[2]
    assert [(one.offset, one.nbytes, one.request) for one in pieces] == [
        (0, 3, None),
        (ALIGNMENT, 4, 0),
        (ALIGNMENT + 4, 40_000, 1),
        (ALIGNMENT + 40_004, 4, 2),
        (offsets[2], 0, None),
    ]


def test_a_tensor_that_is_not_what_it_says() -> None:
    with pytest.raises(ValueError, match=r"input 'a' of shape \(3,\) has 8 bytes"):
        layout([wire.WireTensor("a", "FP32", (3,), bytes(8))])


def test_what_the_host_copies_first_travels_together() -> None:
    small, far = place(SMALL_NBYTES), place(SMALL_NBYTES + 1)
    region = wire.Place(1, 0, 10 * SMALL_NBYTES)
    sources: list[Any] = [b"x", small, far, far, region, b"y"]
    pieces = [Piece(0, one[2] if not isinstance(one, bytes) else 1, one, "INT8", None) for one in sources]
    together = [[piece.source for piece in run] for run in runs(pieces)]
    assert together == [[b"x", small], [far], [far], [region, b"y"]]
