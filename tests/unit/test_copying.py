"""Copies of large tensors: every byte arrives, also where source and target overlap or are no plain block."""

from __future__ import annotations

import numpy as np
import pytest

from gpuserve_worker.memory.client_regions import COPY_STEP_NBYTES, copy, copy_bytes

#: Below the size from which it goes in steps, a whole number of steps, and with a rest.
SIZES = (0, 1, 4 * COPY_STEP_NBYTES - 1, 4 * COPY_STEP_NBYTES, 6 * COPY_STEP_NBYTES + 13)


def noise(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_byte_arrives_and_no_other_changes(nbytes: int) -> None:
    source, around = noise(nbytes), np.full(nbytes + 2, 7, np.uint8)
    copy(around[1:-1], source)
    assert np.array_equal(around[1:-1], source)
    assert around[0] == around[-1] == 7
    target = bytearray(nbytes)
    copy_bytes(memoryview(target), memoryview(source.tobytes()))
    assert target == source.tobytes()


@pytest.mark.parametrize("shift", [-COPY_STEP_NBYTES, -3, 0, 3, COPY_STEP_NBYTES])
def test_overlapping_memory_is_copied_as_if_it_were_not(shift: int) -> None:
    nbytes = 5 * COPY_STEP_NBYTES
    whole = bytearray(noise(nbytes + 2 * COPY_STEP_NBYTES).tobytes())
    start = COPY_STEP_NBYTES
    expected = bytes(whole[start : start + nbytes])
    view = memoryview(whole)
    copy_bytes(view[start + shift : start + shift + nbytes], view[start : start + nbytes])
    assert whole[start + shift : start + shift + nbytes] == expected


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "?"])
def test_arrays_of_any_layout_are_copied(dtype: str) -> None:
    rows = noise(8 * COPY_STEP_NBYTES).reshape(2048, -1)
    source = (rows > 100).astype(dtype)
    for layout in (source, source[::2], source.T, source[:, 1:]):
        target = np.zeros(layout.shape, dtype)
        copy(target, layout)
        assert np.array_equal(target, layout)
