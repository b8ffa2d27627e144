"""What requests hear when the driver of their model is closed: as the server ends, or the model alone."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

import pytest

from gpuserve.core.errors import RequestError, Stopping
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.inference import InferRequest, InputTensor
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec

SPEC = ModelSpec(
    "m",
    (TensorSpec("x", "FP32", (-1,)),),
    (TensorSpec("y", "FP32", (-1,)),),
    1,
    (InstanceSpec("cpu#0", "cpu", {}),),
)
STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"
REMOVED = "model 'm' is not served any more"


def submit(driver: ModelDriver) -> PendingRequest:
    tensor = InputTensor("x", "FP32", (1, 1), struct.pack("f", 1.0))
    return driver.submit(InferRequest("m", "", "", {}, [tensor], (), None))


def connect(driver: ModelDriver) -> socket.socket:
    """Bring up an instance that never answers; its end of the link."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    life, take = os.pidfd_open(os.getpid()), driver.workers.runner.on_messages
    link = WorkerLink("cpu#0", 1, ours, life, 1, take, lambda *_: None)
    driver.workers.instance_up(link)
    return theirs


@pytest.mark.parametrize(("is_end", "text"), [(True, STOPPING), (False, REMOVED)])
@pytest.mark.parametrize("instances", [0, 1])
async def test_why_a_request_gets_no_answer(is_end: bool, text: str, instances: int) -> None:
    """Two that were accepted, of which one runs where there is an instance, and one that comes too late."""
    heard: list[RequestError] = []
    driver = ModelDriver(SPEC, 1 << 20, ModelMetrics("m", "1", dict))
    workers = [connect(driver) for _ in range(instances)]
    accepted = [submit(driver) for _ in range(2)]
    await asyncio.sleep(0)  # the first goes to the instance
    assert driver.statistics().running_requests == instances
    if is_end:
        driver.stop_accepting()
    driver.close()
    for one in accepted:
        with pytest.raises(RequestError) as told:
            await one.answer
        heard.append(told.value)
    with pytest.raises(RequestError) as refused:
        submit(driver)
    heard.append(refused.value)
    for worker in workers:
        worker.close()
    assert [str(one) for one in heard] == [text] * 3
    assert [isinstance(one, Stopping) for one in heard] == [is_end] * 3
