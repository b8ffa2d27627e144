"""The region table of a front and a real worker: device memory that cannot be opened is refused at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import pytest
from worker_process import TIMEOUT_S, WorkerProcess, model

from gpuserve.core.errors import InvalidArgument, Unavailable
from gpuserve.front.ipc.shared_memory import RegionKind, RegionTable
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve_worker.protocol import wire

#: No device memory anywhere has this handle.
HANDLE = bytes(range(64))


class Front:
    """A link to a worker, and the regions that are registered."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.table = RegionTable(lambda device: [self.link] if device == "cuda:0" else [])
        sock, pidfd = worker.link_socket.dup(), os.pidfd_open(worker.process.pid)
        self.link = WorkerLink("cuda:0#0", 1, sock, pidfd, 1, self._hear, lambda link, _: link.close())
        self.heard: list[wire.Message] = []

    def _hear(self, link: WorkerLink, messages: Sequence[wire.Message]) -> bool:
        self.heard += messages
        for message in messages:
            if isinstance(message, wire.RegionOpened):
                self.table.opened(link, message.region, message.problem)
        return False

    def close(self) -> None:
        self.table.close()
        self.link.close()


def test_memory_that_the_worker_cannot_open_is_refused_with_its_reason() -> None:
    async def main(worker: WorkerProcess) -> None:
        front = Front(worker)
        front.link.open()
        for name in ("g", "g", "h"):  # nothing of a refusal is left
            with pytest.raises(InvalidArgument) as refused:
                await asyncio.wait_for(front.table.register_cuda(name, HANDLE, 0, 64), TIMEOUT_S)
            text = str(refused.value)
            assert text.startswith(f"failed to register CUDA shared memory region: '{name}': ")
            assert "the server has no cupy" in text or "CUDA could not open its handle" in text
            assert front.table.status(RegionKind.CUDA) == []
        assert sum(isinstance(one, wire.RegionOpened) for one in front.heard) == 3
        front.close()

    with WorkerProcess(model("echo.py:batched")) as worker:
        while not isinstance(worker.hear(worker.boot), wire.Ready):
            pass
        asyncio.run(main(worker))


def test_a_worker_that_dies_over_it_is_told() -> None:
    async def main(worker: WorkerProcess) -> None:
        front = Front(worker)
        front.link.open()
        worker.process.kill()
        with pytest.raises(Unavailable, match="the worker that was to open the region died"):
            await asyncio.wait_for(front.table.register_cuda("g", HANDLE, 0, 64), TIMEOUT_S)
        front.close()

    with WorkerProcess(model("echo.py:batched")) as worker:
        while not isinstance(worker.hear(worker.boot), wire.Ready):
            pass
        asyncio.run(main(worker))
