"""What requests hear when the driver of their model is closed, or when they are cancelled meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket

import pytest
from driver_scene import SPEC as TWO
from driver_scene import request

from gpuserve.core.errors import RequestError, Stopping
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.inference import InferResponse

SPEC = dataclasses.replace(TWO, max_batch_size=1, instances=TWO.instances[:1])
STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"
REMOVED = "model 'm' is not served any more"


def submit(driver: ModelDriver) -> PendingRequest:
    return driver.submit(request(1, 1.0))


def connect(driver: ModelDriver) -> socket.socket:
    """Bring up an instance that never answers; its end of the link."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    life, take = os.pidfd_open(os.getpid()), driver.workers.runner.on_messages
    link = WorkerLink(SPEC.instances[0].name, 1, ours, life, 1, take, lambda *_: None)
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


async def infer(driver: ModelDriver) -> None:
    """Await the answer like a protocol handler: cancel the request if the task is cancelled."""
    pending = submit(driver)
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
    pending = submit(driver)
    pending.answer.set_result(InferResponse("m", "1", "", {}, [], lambda: closed.append("outputs")))
    pending.cancel()
    driver.close()
    assert (closed, metrics.outcomes.cancellations) == (["outputs"], 0)
