"""A driver and its workers in this process, behind real links, which do as they are told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from gpuserve.core.errors import QueueFull
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.models.response_cache import ResponseCache
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.inference import InferRequest, InputTensor
from gpuserve.model.spec import InstanceSpec, ModelSpec, QueueSpec
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.protocol import datagram, wire
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.tensor import TensorSpec

EPOCH, ROOM = 1, 6
SPEC = ModelSpec(
    "m",
    (TensorSpec("x", "FP32", (1,)),),
    (TensorSpec("y", "FP32", (1,)),),
    4,
    (InstanceSpec("a", "cpu", {}), InstanceSpec("b", "cpu", {})),
    queue=QueueSpec(ROOM),
)
FAILURE = wire.WireFailure("INTERNAL", "no")
PHASES = 10, 20, 30


def request(rows: int, value: float, timeout_s: float | None = None) -> InferRequest:
    data = struct.pack(f"{rows}f", *[value] * rows)
    return InferRequest("m", "", "", {}, [InputTensor("x", "FP32", (rows, 1), data)], (), timeout_s)


class LinkedWorker:
    """The other end of a link of a driver, in this process."""

    def __init__(self, driver: ModelDriver, instance: str, slots: int, *down_for_s: float) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life, self._life = os.pipe()
        self._socket = theirs
        self._link = Link(theirs)
        self.instance = instance
        self.runs: list[wire.Run] = []
        on_down: Callable[[WorkerLink, str], None] = lambda link, why: driver.workers.instance_down(  # noqa: E731
            link.instance, why, *down_for_s
        )
        driver.workers.instance_up(
            WorkerLink(instance, slots, ours, life, EPOCH, driver.workers.runner.on_messages, on_down)
        )
        self._link.send(wire.Attached(EPOCH))

    def hear(self) -> None:
        """Take what has been sent."""
        if self._socket.fileno() < 0:
            return
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while (received := self._link.receive()) is not None:
                message, fds = received
                self.on_message(message, fds)
                for fd in fds:
                    os.close(fd)
        self._socket.setblocking(True)

    def on_message(self, message: wire.Message, fds: list[int]) -> None:
        raise NotImplementedError

    def say(self, message: wire.Message) -> None:
        """Send anything."""
        self._link.send(message)

    def die(self) -> None:
        """The process ends."""
        self.runs.clear()
        os.close(self._life)
        self._socket.close()


class Worker(LinkedWorker):
    """A worker that answers as it is told."""

    def __init__(self, driver: ModelDriver, instance: str) -> None:
        super().__init__(driver, instance, driver.spec.max_active or 1)
        self.credits: list[wire.Credit] = []

    def on_message(self, message: wire.Message, fds: list[int]) -> None:
        if isinstance(message, wire.Run):
            self.runs.append(message)
        elif isinstance(message, wire.Credit):
            self.credits.append(message)

    def answer(self, well: list[bool]) -> None:
        """Answer the batch at hand: each request well or not; an empty list fails it as a whole."""
        run = self.runs.pop(0)
        if not well:
            self._link.send(wire.Failed(run.batch_id, FAILURE, True))
            return
        responses = tuple(
            (wire.WireTensor("y", "FP32", (one[0], 1), bytes(4 * one[0])),) if good else FAILURE
            for one, good in zip(wire.requests(run.requests), well * len(run.requests), strict=False)
        )
        self._link.send(wire.Done(run.batch_id, None, responses, True, *PHASES))

    def answer_at_length(self, nbytes: int) -> None:
        """Answer each request of the batch at hand with a row of so many bytes, in an arena."""

        def announce(number: int, fd: int, size: int) -> None:
            self._link.send(wire.Segment(number, size), [fd])

        arena = Arena(1 << 30, announce, lambda number: None)
        run = self.runs.pop(0)
        blocks = [arena.allocate(nbytes) for _ in run.requests]
        places = [wire.Ref(one.segment, one.offset, nbytes) for one in blocks]
        responses = tuple((wire.WireTensor("y", "FP32", (1, nbytes // 4), place),) for place in places)
        self._link.send(wire.Done(run.batch_id, None, responses, True, *PHASES))
        arena.close()

    def give(self, responses: list[bool | None]) -> None:
        """Give the requests of a stream's batch a response each: well, not, or none."""
        run = self.runs[0]
        given_out: tuple[Any, ...] = tuple(
            None if good is None else (wire.WireTensor("y", "FP32", (), bytes(4)),) if good else FAILURE
            for _, good in zip(run.requests, responses * len(run.requests), strict=False)
        )
        self._link.send(wire.Yield(run.batch_id, None, given_out))

    def end(self) -> None:
        """The stream's batch is at its end."""
        run = self.runs.pop(0)
        self._link.send(wire.Done(run.batch_id, None, None, True, *PHASES))

    def compute(self, number: int) -> None:
        """The call of one of the batches at hand is over."""
        self.say(wire.Computed((self.runs[number].batch_id,)))

    def receive_one(self) -> list[wire.Message]:
        """The messages of the next datagram, of which there is one; the batches are to be answered."""
        while True:
            data, fds = datagram.receive(self._socket, datagram.receive_buffer())
            messages = wire.WORKER.decode_all(data)
            datagram.close_all(fds)
            if isinstance(messages[0], wire.Run):
                self.runs += messages
                return messages

    def send_raw(self, data: bytes) -> None:
        """Send a datagram as it is."""
        self._socket.send(data)

    def claim(self, phase: Any) -> None:
        """Answer the batch at hand, and say that it took this long."""
        run = self.runs.pop(0)
        self._link.send(wire.Done(run.batch_id, (), None, True, phase, 0, 0))


class Scene:
    """A driver, its workers, and every request that there was.

    ``direct``: answers are not awaited, but come by a call, and ``answers`` has them. ``on_answer`` is what a
    client does in such a call.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cache: ResponseCache | None = None,
        *,
        direct: bool = False,
        arena_nbytes: int = 1 << 20,
    ) -> None:
        self.metrics = ModelMetrics("m", "1", dict)
        self.driver = ModelDriver(spec, arena_nbytes, self.metrics, cache)
        self.workers = [Worker(self.driver, one.name) for one in spec.instances]
        self.pending: list[PendingRequest] = []
        self.direct = direct
        self.answers: dict[PendingRequest, list[Answer]] = {}
        self.on_answer: Callable[[PendingRequest], None] = lambda pending: None
        self.refused = 0
        self.responses = 0

    async def settle(self) -> None:
        """Let everything happen that is due."""
        for _ in range(6):
            await asyncio.sleep(0)
        for worker in self.workers:
            worker.hear()

    async def answer(self, well: list[bool]) -> None:
        """Have the first worker answer the batch that it has when everything that is due has happened."""
        await self.settle()
        self.workers[0].answer(well)
        await self.settle()

    def submit(self, rows: int, value: float, timeout_s: float | None) -> None:
        on_response = self._on_response if self.driver.spec.decoupled else None
        on_answer = self._on_answer if self.direct else None
        try:
            asked = request(rows, value, timeout_s)
            self.pending.append(self.driver.submit(asked, on_response, on_answer))
        except QueueFull:
            self.refused += 1

    def _on_answer(self, pending: PendingRequest, answer: Answer) -> None:
        self.answers.setdefault(pending, []).append(answer)
        self.on_answer(pending)

    def _on_response(self, response: Any) -> None:
        self.responses += 1
        response.close()

    def cancel(self, number: int) -> None:
        """Cancel like the protocol handlers: before the answer, after the answer, or more than once."""
        if self.pending:
            one = self.pending[number % len(self.pending)]
            one.cancel()
            if not self.direct:
                one.answer.cancel()

    def busy(self, number: int) -> Worker | None:
        found = [worker for worker in self.workers if worker.runs]
        return found[number % len(found)] if found else None

    def replace(self, number: int) -> None:
        number %= len(self.workers)
        self.workers[number].die()

    async def revive(self, number: int) -> None:
        await self.settle()
        number %= len(self.workers)
        self.workers[number] = Worker(self.driver, self.workers[number].instance)

    def close(self) -> None:
        self.driver.close()
        for worker in self.workers:
            worker.die()
