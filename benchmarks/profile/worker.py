"""A worker's loop for batches of one size: receive, build the arrays, call, write, send.

The real loop behind a real socket pair, whose other end, in this process, sends a batch whenever the loop
asks for one; that end's time is not counted, and nobody is woken. ``python -m benchmarks.profile.worker BATCH
BATCHES`` prints nanoseconds a request.
"""

from __future__ import annotations

import socket
import statistics
import sys
from time import perf_counter_ns
from typing import Any

import numpy as np

from benchmarks.profile.echo import INSTANCE, X, Y, run
from gpuserve.decorators import batch
from gpuserve_worker.execution.device_path import Model
from gpuserve_worker.execution.lifecycle import Reporter
from gpuserve_worker.execution.loop import HostPath, Loop
from gpuserve_worker.inference.model_context import ModelContext
from gpuserve_worker.protocol import datagram, wire
from gpuserve_worker.protocol.link import Link


@batch
def echo(x: np.ndarray) -> dict[str, np.ndarray]:
    """x: [rows, n] FP32, returned as y."""
    return {"y": x}


class FedLink(Link):
    """A link on which a batch lies ready whenever the loop receives; ``taken_ns`` has what each one took."""

    def __init__(self, requests: int, batches: int) -> None:
        ours, self._front = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        self._requests = requests
        self._left = batches
        self._began = 0
        self.taken_ns: list[int] = []

    def receive(self) -> tuple[wire.Message, list[int]] | None:
        """As the link does, and the clock runs until the next one is asked for."""
        self.taken_ns.append(perf_counter_ns() - self._began)
        if self._began:
            answer = wire.WORKER.decode(self._front.recv(datagram.MAX_DATAGRAM_NBYTES))
            assert isinstance(answer, wire.Done), answer
        if not self._left:
            return None
        self._left -= 1
        self._front.send(wire.WORKER.encode(run(self._left, self._requests)))
        self._began = perf_counter_ns()
        return super().receive()


def measure(requests: int, batches: int) -> dict[str, Any]:
    """Nanoseconds a request: the tenth part of the batches took less."""
    context = ModelContext("echo", 1, INSTANCE, "cpu", (X,), (Y,), 64, (), False)
    boot, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = FedLink(requests, batches)
    Loop(link, Model(context, echo, HostPath(), False, False), Reporter(Link(boot))).run()
    return {"batch": statistics.quantiles(link.taken_ns[1:], n=10)[0] / requests}


if __name__ == "__main__":
    print(measure(int(sys.argv[1]), int(sys.argv[2])))
