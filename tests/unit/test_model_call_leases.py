"""The numbers under which a front lends a worker what another model answered."""

from __future__ import annotations

import asyncio
import os
import socket

from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.process.callable_requests import _CallingWorker
from gpuserve.front.requests.inference import InferResponse
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec

TENSOR = TensorSpec("x", "FP32", (-1,))
SPEC = ModelSpec("m", (TENSOR,), (TENSOR,), 8, (InstanceSpec("cpu#0", "cpu", {}),))


def test_what_one_front_lent_is_not_taken_for_what_the_next_one_lends() -> None:
    """A callable may read the responses of a stream, and so return them, after their front has died."""

    def leases(epoch: int) -> set[int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        alive, life = os.pipe()
        link = WorkerLink("cpu#0", 1, ours, alive, epoch, lambda *_: False, lambda *_: None)
        driver = ModelDriver(SPEC, 1 << 20, ModelMetrics("m", "1", dict))
        caller = _CallingWorker(link, driver)
        lent = {caller.lend(InferResponse("m", "1", "", {}, [])) for _ in range(10)}
        caller.close()
        link.close()
        driver.close()
        theirs.close()
        os.close(life)
        return lent

    async def both() -> tuple[set[int], set[int]]:
        return leases(1), leases(2)

    first, second = asyncio.run(both())
    assert len(first) == len(second) == 10
    assert not first & second
