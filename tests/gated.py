"""A model that runs one request at a time, when the test lets it, and the calls of it over both protocols."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc
from bound import InBackground
from processes import wait_until

from gpuserve import ModelConfig, Server, Tensor
from gpuserve.decorators import batch

NUMBER = Tensor((1,), np.int32)


class Gate:
    """A model that remembers what it runs, and ends a run when it is let."""

    def __init__(self, server: Server, name: str, **settings: Any) -> None:
        self.server = server
        self.name = name
        self.seen: list[int] = []
        self._let = threading.Semaphore(0)
        config = ModelConfig(max_batch_size=1, **settings)
        server.bind(name, self._run, [NUMBER], [NUMBER], config=config, isolation="thread")

    @batch
    def _run(self, INPUT_1: Any) -> Any:
        self.seen.append(int(INPUT_1[0, 0]))
        assert self._let.acquire(timeout=30)
        return [INPUT_1]

    def let(self, count: int) -> None:
        self._let.release(count)

    def send(self, call: Callable[..., None], *arguments: Any) -> InBackground:
        """A request that is running or queued when this returns, or was refused."""
        before = self._accepted()
        asked = InBackground(call, self, *arguments)
        wait_until(lambda: self._accepted() > before or not asked.thread.is_alive(), f"{arguments} is there")
        return asked

    def grpc(self) -> tritonclient.grpc.InferenceServerClient:
        return tritonclient.grpc.InferenceServerClient(self.server.addresses["grpc"].rpartition("/")[2])

    def _accepted(self) -> float:
        """How many requests wait, run or have come to an end."""
        return self.metric(
            "queue_requests", "running_requests", "requests_success_total", "requests_failure_total"
        )

    def metric(self, *names: str) -> float:
        with urllib.request.urlopen(self.server.addresses["metrics"], timeout=10) as page:
            lines = page.read().decode().splitlines()
        starts, label = tuple(f"gpuserve_{name}{{" for name in names), f'model="{self.name}"'
        found = [float(one.rsplit(" ", 1)[1]) for one in lines if one.startswith(starts) and label in one]
        assert len(found) >= len(names)
        return sum(found)


def grpc_input(number: int) -> Any:
    sent = tritonclient.grpc.InferInput("INPUT_1", [1, 1], "INT32")
    sent.set_data_from_numpy(np.full((1, 1), number, np.int32))
    return sent
