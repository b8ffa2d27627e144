"""The outputs of a step's responses, stacked for one message."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpuserve_worker.inference.outputs import OutputRules
from gpuserve_worker.protocol.tensor import TensorSpec


def stack(datatype: str, shape: tuple[int, ...], *arrays: Any) -> Any:
    rules = OutputRules("m", [TensorSpec("y", datatype, shape)], batching=False, strict=True, decoupled=True)
    copied = rules.copy([{"y": one} for one in arrays], 1 << 14)
    return None if copied is None else rules.stack(copied)


WIDE = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize("array", [WIDE, WIDE[:, ::2], WIDE.T, np.asfortranarray(WIDE), WIDE[:0]])
def test_any_layout_is_stacked_in_c_order(array: Any) -> None:
    (made,) = stack("FP32", (-1, -1), array, array + 1)
    assert made.shape == (2, *array.shape)
    assert bytes(made.payload) == np.stack([array, array + 1]).tobytes()


def test_a_dtype_without_a_buffer_and_a_scalar() -> None:
    array = np.ones(3, ml_dtypes.bfloat16)
    (made,) = stack("BF16", (3,), array, array)
    assert bytes(made.payload) == array.tobytes() * 2
    (made,) = stack("INT64", (), np.array(7), np.array(8))
    assert (made.shape, bytes(made.payload)) == ((2,), np.array([7, 8]).tobytes())


def test_copies_of_different_arrays_do_not_change_with_them() -> None:
    rules = OutputRules("m", [TensorSpec("y", "FP32", (-1, -1))], batching=False, strict=True, decoupled=True)
    arrays = [WIDE.copy(), WIDE[:, ::2].copy().T, WIDE[:0].copy(), WIDE.astype(np.float64)]
    expected = [one.copy() for one in arrays]
    copied = rules.copy([{"y": one} for one in arrays], 1 << 14)
    for array in arrays:
        array[:] = -1
    assert copied is not None
    assert rules.stack(copied) is None
    for one, array in zip(copied.mappings(), expected, strict=True):
        np.testing.assert_array_equal(one["y"], array, strict=True)


@pytest.mark.parametrize(
    "arrays", [(WIDE, WIDE[:2]), (WIDE, WIDE.astype(np.float64)), (WIDE, [[1.0]]), (np.zeros((9, 999), "f"),)]
)
def test_responses_that_differ_or_are_large_are_not_stacked(arrays: Any) -> None:
    assert stack("FP32", (-1, -1), *arrays) is None
