"""The front's stages for batches of one size: submit, batch and send, read and answer.

A real driver behind a real link, whose other end, in this process, answers what it is asked; that end's time
is not counted. ``python -m benchmarks.profile.front BATCH BATCHES`` prints nanoseconds a request.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import sys
from time import perf_counter_ns

import uvloop

from benchmarks.profile.echo import INSTANCE, SPEC, done, infer_request
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve_worker.protocol import datagram, wire

STAGES = ("submit", "send", "answer")


class FarEnd:
    """The worker's end of the link."""

    def __init__(self, driver: ModelDriver) -> None:
        ours, self._socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life, self._life = os.pipe()
        link = WorkerLink(
            INSTANCE, 1, ours, life, 1, driver.workers.runner.on_messages, lambda _, reason: None
        )
        driver.workers.instance_up(link)
        self._socket.recv(datagram.MAX_DATAGRAM_NBYTES)
        self._socket.send(wire.WORKER.encode(wire.Attached(1)))

    def answer(self, requests: int) -> None:
        run = wire.WORKER.decode(self._socket.recv(datagram.MAX_DATAGRAM_NBYTES))
        assert isinstance(run, wire.Run)
        self._socket.send(wire.WORKER.encode(done(run.batch_id, requests)))


async def measure(requests: int, batches: int) -> dict[str, float]:
    """Nanoseconds a request of each stage: the tenth part of the batches took less."""
    driver = ModelDriver(SPEC, 1 << 20, ModelMetrics("echo", "1", dict))
    far_end = FarEnd(driver)
    for _ in range(4):
        await asyncio.sleep(0)
    answered = 0

    def on_answer(pending: PendingRequest, answer: Answer) -> None:
        nonlocal answered
        answered += 1
        answer.close()  # type: ignore[union-attr]

    samples: list[tuple[int, int, int]] = []
    for _ in range(batches):
        asked = [infer_request() for _ in range(requests)]
        answered = 0
        began = perf_counter_ns()
        for one in asked:
            driver.submit(one, None, on_answer)
        submitted = perf_counter_ns()
        await asyncio.sleep(0)
        sent = perf_counter_ns()
        far_end.answer(requests)
        reading = perf_counter_ns()
        while answered < requests:  # noqa: ASYNC110 - it is there in the next turn or two
            await asyncio.sleep(0)
        samples.append((submitted - began, sent - submitted, perf_counter_ns() - reading))
    columns = zip(*samples, strict=True)
    return {
        name: statistics.quantiles(one, n=10)[0] / requests for name, one in zip(STAGES, columns, strict=True)
    }


if __name__ == "__main__":
    print(uvloop.run(measure(int(sys.argv[1]), int(sys.argv[2]))))
