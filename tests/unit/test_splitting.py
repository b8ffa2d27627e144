"""A batch that is run again in two parts: where it is cut, and what becomes of the answers to the
parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve_worker.cuda.device.runtime import CudaError
from gpuserve_worker.cuda.recovery import is_out_of_memory, is_without_library
from gpuserve_worker.execution.batch_inputs import (
    BatchInputs,
    BatchPart,
    join_answers,
    split_batch,
    split_position,
)
from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.inference.outputs import BatchAnswers, CheckedOutput
from gpuserve_worker.protocol.wire import Run, WireFailure, WireRequest

NO_ROOM = WireFailure("RESOURCE_EXHAUSTED", "no room")


def parts_of(*rows: int) -> list[BatchPart]:
    """The parts of a batch of requests of so many rows each, whose elements count up."""
    requests = tuple(WireRequest(count, {}, ()) for count in rows)
    batch = Batch({"x": np.arange(sum(rows))}, requests, ("y",), True)
    failures = {len(rows) - 1: WireFailure("INVALID_ARGUMENT", "its region")}
    return split_batch(Run(1, requests, ()), BatchInputs(batch, failures, ()))


def answer(value: int) -> list[CheckedOutput]:
    array = np.array([value])
    return [CheckedOutput("y", "INT64", (1,), 8, array.dtype, [array])]


@given(st.lists(st.integers(1, 50), min_size=2, max_size=20))
def test_it_is_cut_where_the_larger_part_is_smallest(rows: list[int]) -> None:
    position = split_position(rows)
    larger = max(sum(rows[:position]), sum(rows[position:]))
    assert 0 < position < len(rows)
    assert larger == min(max(sum(rows[:at]), sum(rows[at:])) for at in range(1, len(rows)))


def test_each_part_has_its_requests_its_rows_and_its_failures() -> None:
    parts = parts_of(1, 2, 4)
    assert [one.inputs.batch.rows for one in parts] == [(1, 2), (4,)]
    assert [one.inputs.batch.arrays["x"].tolist() for one in parts] == [[0, 1, 2], [3, 4, 5, 6]]
    assert [list(one.inputs.failures) for one in parts] == [[], [0]]
    assert [len(one.run.requests) for one in parts] == [2, 1]
    (part,) = parts_of(8)
    assert part.inputs.batch.rows == (8,), "one request is not cut"


def joined(rows: tuple[int, ...], *answers: Any) -> BatchAnswers:
    whole = join_answers(parts_of(*rows), answers)
    assert isinstance(whole, BatchAnswers)
    return whole


def test_answers_are_joined_in_their_order_and_a_failed_part_fails_its_requests() -> None:
    second = BatchAnswers(None, [answer(2), answer(3)], ({"a": 1}, {}))
    whole = joined((1, 1, 1), BatchAnswers(None, [answer(1)]), second)
    assert whole.each == [answer(1), answer(2), answer(3)]
    assert whole.parameters == ({}, {"a": 1}, {})
    whole = joined((1, 1, 2), NO_ROOM, BatchAnswers(None, [answer(9)]))
    assert whole.each == [NO_ROOM, NO_ROOM, answer(9)]
    assert join_answers(parts_of(1, 1), [NO_ROOM, NO_ROOM]) == NO_ROOM, "where all failed, the batch did"


def error_of(module: str, name: str, text: str, **fields: Any) -> Exception:
    """An exception of a library that is not installed."""
    made: Exception = type(name, (RuntimeError,), {"__module__": module, **fields})(text)
    return made


CUPY = "cupy_backends.cuda"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (error_of("cupy.cuda.memory", "OutOfMemoryError", "Out of memory allocating"), True),
        (error_of("torch", "OutOfMemoryError", "CUDA out of memory. Tried to"), True),
        (error_of(f"{CUPY}.api.runtime", "CUDARuntimeError", "cudaErrorMemoryAllocation: out"), True),
        (error_of(f"{CUPY}.api.driver", "CUDADriverError", "CUDA_ERROR_OUT_OF_MEMORY: out"), True),
        (error_of(f"{CUPY}.api.runtime", "CUDARuntimeError", "cudaErrorIllegalAddress: an"), False),
        (error_of(f"{CUPY}.libs.cublas", "CUBLASError", "CUBLAS_STATUS_ALLOC_FAILED"), True),
        (error_of(f"{CUPY}.libs.curand", "CURANDError", "CURAND_STATUS_ALLOCATION_FAILED"), True),
        (error_of(f"{CUPY}.libs.nvrtc", "NVRTCError", "NVRTC_ERROR_INVALID_INPUT (3)"), False),
        (error_of("torch", "RuntimeError", "cuFFT error: CUFFT_ALLOC_FAILED"), True),
        (error_of("torch", "AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors"), True),
        (error_of("torch", "AcceleratorError", "CUDA error: an illegal memory access"), False),
        (RuntimeError("cublas: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (CudaError(2, "out of memory"), True),
        (CudaError(700, "illegal address"), False),
        (ValueError("CUDA out of memory"), False),
        (MemoryError(), False),
    ],
    ids=lambda one: str(one)[:40],
)
def test_what_means_that_the_memory_of_a_device_did_not_suffice(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    wrapped = ValueError("the model failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is expected


def test_what_means_that_cupy_lacks_a_library() -> None:
    library = "DynamicLibNotFoundError"
    assert is_without_library(error_of("cuda.pathfinder._dynamic_libs", library, "Failure finding"))
    assert is_without_library(RuntimeError("CuPy failed to load libnvrtc.so.12: OSError: libnvrtc.so.12"))
    for other in (
        error_of("models", library, "not of CUDA"),
        RuntimeError("a model failed to load"),
        CudaError(999, "unknown error"),
    ):
        assert not is_without_library(other)


def test_a_circle_of_causes_is_looked_at_once() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
