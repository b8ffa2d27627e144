"""Cancellation of a request in the loop iteration in which the request is answered."""

from __future__ import annotations

import asyncio
import struct

import pytest

from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.inference import InferRequest, InferResponse, InputTensor
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec

SPEC = ModelSpec(
    "m",
    (TensorSpec("x", "FP32", (-1,)),),
    (TensorSpec("y", "FP32", (-1,)),),
    8,
    (InstanceSpec("cpu#0", "cpu", {}),),
)


def request() -> InferRequest:
    tensor = InputTensor("x", "FP32", (1, 1), struct.pack("f", 1.0))
    return InferRequest("m", "", "", {}, [tensor], (), None)


async def infer(driver: ModelDriver) -> None:
    """Await the answer like a protocol handler: cancel the request if the task is cancelled."""
    pending = driver.submit(request())
    try:
        await pending.answer
    except asyncio.CancelledError:
        pending.cancel()
        raise


async def test_a_failed_request_is_not_counted_as_cancelled_too() -> None:
    metrics = ModelMetrics("m", "1", dict)
    driver = ModelDriver(SPEC, 1 << 20, metrics)
    call = asyncio.create_task(infer(driver))
    await asyncio.sleep(0)  # the task runs until it waits for the answer
    assert driver.unfinished == 1
    driver.close()  # fails queued requests
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (metrics.outcomes.failures["UNAVAILABLE"], metrics.outcomes.cancellations) == (1, 0)


async def test_an_answer_to_a_cancelled_request_frees_its_memory() -> None:
    metrics = ModelMetrics("m", "1", dict)
    closed: list[str] = []
    driver = ModelDriver(SPEC, 1 << 20, metrics)
    pending = driver.submit(request())
    pending.answer.set_result(InferResponse("m", "1", "", {}, [], lambda: closed.append("outputs")))
    pending.cancel()
    driver.close()
    assert (closed, metrics.outcomes.cancellations) == (["outputs"], 0)
