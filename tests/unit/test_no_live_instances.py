"""Requests to a model without a live instance: when they wait, and when they are refused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import struct
from collections.abc import AsyncIterator

import driver_scene
import pytest
from driver_scene import Scene

from gpuserve.core.errors import Unavailable
from gpuserve.front.models import instances, model_workers
from gpuserve.front.models.instances import PATIENCE_S
from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.inference import InferRequest, InputTensor, RegionSlice
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec

LONG_S, SOON_S = PATIENCE_S * 2, PATIENCE_S / 2
NO_INSTANCE = "model 'm' has no live instance"
SPEC = ModelSpec(
    name="m",
    version=1,
    inputs=(TensorSpec("x", "FP32", (-1,), False),),
    outputs=(TensorSpec("y", "FP32", (-1,), False),),
    max_batch_size=8,
    instances=tuple(InstanceSpec(name, "cpu", {}) for name in ("a", "b")),
)


@contextlib.asynccontextmanager
async def opened(spec: ModelSpec = SPEC) -> AsyncIterator[ModelDriver]:
    driver = ModelDriver(spec, 1 << 20, ModelMetrics("m", "1", dict))
    try:
        yield driver
    finally:
        driver.close()


def request(device: str = "") -> InferRequest:
    """One that names memory of a device, where one is given."""
    data: bytes | RegionSlice = struct.pack("f", 1.0)
    regions: tuple[RegionSlice, ...] = ()
    if device:
        data = RegionSlice("r", 0, 4)
        data.device, regions = device, (data,)
    return InferRequest("m", "", "", {}, [InputTensor("x", "FP32", (1, 1), data)], (), None, regions=regions)


async def test_requests_are_refused_once_every_instance_is_down_for_long() -> None:
    async with opened() as driver:
        driver.submit(request())
        assert driver.unfinished == 1, "requests wait while instances load for the first time"
        driver.workers.instance_down("a", "it died", LONG_S)
        assert driver.unfinished == 1
        driver.workers.instance_down("b", "it died", LONG_S)
        assert driver.unfinished == 0
        with pytest.raises(Unavailable, match=NO_INSTANCE):
            driver.submit(request())


async def test_requests_wait_while_any_instance_is_due_soon() -> None:
    async with opened() as driver:
        driver.workers.instance_down("a", "it died", LONG_S)
        driver.workers.instance_down("b", "it died", SOON_S)
        driver.submit(request())
        assert driver.unfinished == 1
        driver.workers.instance_down("b", "it died", SOON_S)
        driver.workers.instance_down("a", "it died", LONG_S)  # the order in which they die does not matter
        assert driver.unfinished == 1


async def test_what_must_run_on_a_device_is_refused_once_its_instances_are_down_for_long() -> None:
    devices = (InstanceSpec("a", "cuda:0", {}), InstanceSpec("b", "cuda:1", {}))
    async with opened(dataclasses.replace(SPEC, instances=devices)) as driver:
        for device in ("", "cuda:0", "cuda:1", "cuda:1"):
            driver.submit(request(device))
        driver.workers.instance_down("b", "it died", SOON_S)
        assert driver.unfinished == 4
        driver.workers.instance_down("b", "it died", LONG_S)
        assert driver.unfinished == 2
        with pytest.raises(Unavailable, match="model 'm' has no live instance on cuda:1"):
            driver.submit(request("cuda:1"))
        driver.submit(request("cuda:0"))
        driver.submit(request())
        assert driver.unfinished == 4
        driver.workers.instance_down("a", "it died", LONG_S)
        assert driver.unfinished == 0


@contextlib.asynccontextmanager
async def without_workers(monkeypatch: pytest.MonkeyPatch, spec: ModelSpec) -> AsyncIterator[Scene]:
    """A model whose workers died, and that waits for little time."""
    monkeypatch.setattr(instances, "PATIENCE_S", 0.05)
    monkeypatch.setattr(model_workers, "_RECHECK_S", 0.06)
    scene = Scene(driver_scene.SPEC)
    scene.driver.resize(spec)
    try:
        for worker in scene.workers:
            worker.die()
        await scene.settle()
        yield scene
    finally:
        scene.driver.close()


async def test_requests_are_refused_when_nobody_says_when_an_instance_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its supervisor is stopped, or the program that serves it; or its load takes long."""
    async with without_workers(monkeypatch, driver_scene.SPEC) as scene:
        scene.driver.workers.instance_down("a", "it died", 0.0)  # its load begins, and does not end
        scene.submit(1, 1.0, None)
        with pytest.raises(Unavailable, match=NO_INSTANCE):
            await asyncio.wait_for(scene.pending[0].answer, 1)
        with pytest.raises(Unavailable, match=NO_INSTANCE):
            scene.driver.submit(driver_scene.request(1, 1.0))
        await scene.revive(0)
        scene.submit(1, 1.0, None)
        assert scene.driver.unfinished == 1
        scene.workers[0].die()


async def test_a_new_instance_that_does_not_come_is_waited_for_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = (*SPEC.instances, InstanceSpec("c", "cpu", {}))
    async with without_workers(monkeypatch, dataclasses.replace(driver_scene.SPEC, instances=new)) as scene:
        scene.submit(1, 1.0, None)
        with pytest.raises(Unavailable, match=NO_INSTANCE):
            await asyncio.wait_for(scene.pending[0].answer, 1)
