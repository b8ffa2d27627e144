"""Inference of a door that is a process of its own: both sides in one loop, with a real socket in between."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gpuserve.declare.spec import QueueSpec
from gpuserve.errors import InvalidArgument, NotFound, RequestError, Stopping, Unavailable
from gpuserve.front.memory.scatter import Answer
from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.pending import PendingRequest
from gpuserve.front.observe.metrics import ModelMetrics
from gpuserve.front.passage.passage import Passage
from gpuserve.front.remote.mirror import ModelMirror
from gpuserve.front.remote.requests import DoorRequests
from gpuserve.front.remote.service import DoorService
from gpuserve.front.service.service import inference_service
from gpuserve.front.v2.types import InferRequest, InferResponse, InputTensor
from gpuserve.settings.server import ServerSettings
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import TensorSpec
from tests.driver_scene import SPEC, Scene, Worker, request

LARGE = 1 << 20
LARGE_SPEC = dataclasses.replace(
    SPEC,
    inputs=(TensorSpec("x", "UINT8", (LARGE,)),),
    outputs=(TensorSpec("y", "UINT8", (LARGE,)),),
    max_batch_size=0,
)
STREAM_SPEC = dataclasses.replace(SPEC, decoupled=True)


class Doors:
    """A front with one model and one door, and what the door was answered."""

    def __init__(self, spec: Any = SPEC) -> None:
        self.scene = Scene(spec, arena_nbytes=64 << 20)
        self.front = inference_service(ServerSettings())
        self.front.models.add(self.scene.driver)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lost: list[str] = []
        self._obey: dict[str, Any] = {}
        self.at_front = Passage(ours, self._take("front"), lambda: self.lost.append("front"))
        self.at_door = Passage(theirs, self._take("door"), lambda: self.lost.append("door"))
        receptions = self.front.control.trace.receptions
        self.requests = DoorRequests(self.at_front, self.front.inference, receptions)
        self.door = DoorService(ServerSettings(), self.at_door)
        self._obey = {"front": self.requests.obey, "door": self.door.obey}
        self.at_front.open()
        self.at_door.open()
        self.mirror = ModelMirror(
            self.at_front, self.front.models, self.front.health, self.front.control.trace
        )
        self.mirror.open()
        self.answers: list[Answer] = []

    def _take(self, end: str) -> Callable[[Any, list[int]], None]:
        def take(message: Any, fds: list[int]) -> None:
            if fds:
                {"front": self.requests.loans.attach, "door": self.door.attach}[end](message, fds)
            else:
                self._obey[end][type(message)](message)

        return take

    def submit(self, asked: InferRequest, on_response: Any = None) -> PendingRequest:
        return self.door.service.inference.submit(asked, on_response, lambda _, one: self.answers.append(one))

    @property
    def responses(self) -> list[InferResponse]:
        """The answers, all of which are responses."""
        assert all(isinstance(one, InferResponse) for one in self.answers), self.answers
        return [one for one in self.answers if isinstance(one, InferResponse)]

    async def settle(self) -> None:
        for _ in range(20):
            await self.scene.settle()
            self.at_door.flush()  # what is of no hurry as well

    def let_workers_die(self) -> None:
        while self.scene.workers:
            self.scene.workers.pop().die()

    async def run_all(self, well: bool = True) -> None:
        """Have the workers answer all that they are given."""
        await self.settle()
        while (worker := self.scene.busy(0)) is not None:
            worker.answer([well])
            await self.settle()

    def close(self) -> None:
        self.mirror.close()
        self.requests.close()
        self.door.close()
        self.at_door.close()
        self.at_front.close()
        self.scene.close()


@contextlib.asynccontextmanager
async def doors(spec: Any = SPEC) -> AsyncIterator[Doors]:
    found = Doors(spec)
    try:
        await found.settle()
        yield found
        assert found.lost == []
    finally:
        found.close()


def test_a_request_is_run_by_the_front() -> None:
    async def talk() -> None:
        async with doors() as there:
            asked = request(2, 1.5)
            asked.id = "seven"
            there.submit(asked)
            await there.settle()
            worker = there.scene.busy(0)
            assert worker is not None
            (tensor,) = wire.tensors(worker.runs[0].inputs)
            assert tensor.payload == struct.pack("2f", 1.5, 1.5)
            await there.run_all()
            (answer,) = there.answers
            assert isinstance(answer, InferResponse)
            assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "seven")
            (output,) = answer.outputs
            assert (output.name, output.shape, bytes(output.data)) == ("y", (2, 1), bytes(8))

    asyncio.run(talk())


def test_a_request_is_given_the_outputs_that_it_asks_for() -> None:
    async def talk() -> None:
        two = dataclasses.replace(SPEC, outputs=(*SPEC.outputs, TensorSpec("z", "FP32", (1,))))
        async with doors(two) as there:
            asked = request(1, 1.0, timeout_s=60.0)
            asked.outputs = ("z",)
            there.submit(asked)
            there.submit(request(1, 2.0))
            await there.settle()
            worker = there.scene.busy(0)
            assert worker is not None
            run = worker.runs.pop(0)
            whole = [wire.WireTensor(name, "FP32", (2, 1), name.encode() * 8) for name in ("y", "z")]
            assert [one[0] for one in wire.requests(run.requests)] == [1, 1]
            worker.say(wire.Done(run.batch_id, tuple(whole), None, True, 1, 2, 3))
            await there.settle()
            found = [[(one.name, bytes(one.data)) for one in answer.outputs] for answer in there.responses]
            assert found == [[("z", b"zzzz")], [("y", b"yyyy"), ("z", b"zzzz")]]

    asyncio.run(talk())


def test_what_is_wrong_is_refused_and_counted_by_the_front_and_what_fails_is_told() -> None:
    async def talk() -> None:
        async with doors() as there:
            there.submit(request(9, 1.0))
            await there.settle()
            refused = there.answers.pop()
            assert isinstance(refused, InvalidArgument)
            assert refused.untried
            assert "batch" in str(refused)
            assert there.scene.metrics.outcomes.rejections["invalid"] == 1
            unknown = request(1, 1.0)
            unknown.model_name = "nobody"
            with pytest.raises(NotFound, match="unknown model: 'nobody'"):
                there.submit(unknown)
            there.submit(request(1, 1.0))
            await there.run_all(well=False)
            (answer,) = there.answers
            assert isinstance(answer, RequestError)
            assert str(answer) == "no"
            assert there.scene.metrics.statistics  # the front counts what the front has run
            assert there.scene.driver.unfinished == 0

    asyncio.run(talk())


def test_a_full_queue_refuses_and_says_so_as_an_answer() -> None:
    async def talk() -> None:
        async with doors(dataclasses.replace(SPEC, queue=QueueSpec(1))) as there:
            for _ in range(8):
                there.submit(request(4, 1.0))
            await there.settle()
            refused = [one for one in there.answers if isinstance(one, Unavailable)]
            assert refused
            assert "queue" in str(refused[0])
            await there.run_all()
            assert len(there.answers) == 8

    asyncio.run(talk())


def test_what_is_taken_back_is_never_run_and_never_answered() -> None:
    async def talk() -> None:
        async with doors() as there:
            there.let_workers_die()
            await there.settle()
            pending = there.submit(request(1, 1.0))
            await there.settle()
            assert there.scene.driver.unfinished == 1
            pending.take_back()
            pending.take_back()
            await there.settle()
            assert there.scene.driver.unfinished == 0
            assert there.answers == []

    asyncio.run(talk())


class _LargeWorker(Worker):
    """A worker that has an arena, and answers with a block of it."""

    def __init__(self, driver: ModelDriver, instance: str) -> None:
        super().__init__(driver, instance)
        self.arena = Arena(64 << 20, self._tell, lambda segment: self.say(wire.DropSegment(segment)))
        self.lent: dict[int, int] = {}
        self.freed: list[tuple[int, int]] = []

    def _tell(self, segment: int, fd: int, nbytes: int) -> None:
        self._link.send(wire.Segment(segment, nbytes), [fd])

    def answer_large(self, fill: bytes) -> None:
        run = self.runs.pop(0)
        block = self.arena.allocate(LARGE)
        block.view[:] = fill * LARGE
        place = wire.Ref(block.segment, block.offset, block.nbytes)
        outputs = (wire.WireTensor("y", "UINT8", (LARGE,), place),)
        self._link.send(wire.Done(run.batch_id, outputs, None, True, 1, 2, 3))


def test_a_large_tensor_is_lent_both_ways_and_comes_back() -> None:
    async def talk() -> None:
        async with doors(LARGE_SPEC) as there:
            there.let_workers_die()
            await there.settle()
            worker = _LargeWorker(there.scene.driver, "a")
            there.scene.workers = [worker]
            data = b"\7" * LARGE
            there.submit(InferRequest("m", "", "", {}, [InputTensor("x", "UINT8", (LARGE,), data)], (), None))
            await there.settle()
            (tensor,) = wire.tensors(worker.runs[0].inputs)
            assert isinstance(tensor.payload, wire.Loan)
            arena = there.door.service.models.find("m").arena
            assert arena.statistics().blocks == 1
            assert there.scene.driver.arena.statistics().allocated == 0, "the front copies no input"
            worker.answer_large(b"\x08")
            await there.settle()
            assert arena.statistics().blocks == 0, "the body is free once the batch is through"
            (answer,) = there.answers
            assert isinstance(answer, InferResponse)
            (output,) = answer.outputs
            assert isinstance(output.data, memoryview)
            assert bytes(output.data) == b"\x08" * LARGE
            assert there.requests.loans.n_leased == 1
            output.data.release()
            answer.close()
            await there.settle()
            assert there.requests.loans.n_leased == 0
            worker.arena.close()

    asyncio.run(talk())


def test_responses_of_a_stream_come_one_by_one_until_its_end() -> None:
    async def talk() -> None:
        async with doors(STREAM_SPEC) as there:
            came: list[InferResponse] = []
            there.submit(request(1, 1.0), came.append)
            await there.settle()
            worker = there.scene.busy(0)
            assert worker is not None
            for n in range(3):
                worker.give([True])
                await there.settle()
                assert len(came) == n + 1
            assert there.answers == []
            assert there.requests.loans.n_leased == 3, "nobody has written a response yet"
            for one in came:
                one.close()
            await there.settle()
            assert there.requests.loans.n_leased == 0
            worker.end()
            await there.settle()
            assert there.answers == [None]

    asyncio.run(talk())


def test_a_door_that_is_gone_leaves_nothing() -> None:
    async def talk() -> None:
        there = Doors()
        await there.settle()
        there.submit(request(1, 1.0))
        there.submit(request(4, 1.0))
        await there.settle()
        assert there.scene.driver.unfinished == 2
        there.at_door.close()
        await there.settle()
        assert there.lost == ["front"]
        there.requests.close()
        while (worker := there.scene.busy(0)) is not None:
            worker.answer([True])
            await there.settle()
        assert there.scene.driver.unfinished == 0
        there.close()

    asyncio.run(talk())


def test_what_was_said_of_models_is_heard_before_anybody_is_refused() -> None:
    async def talk() -> None:
        async with doors() as there:
            other = dataclasses.replace(SPEC, name="n")
            driver = ModelDriver(other, 1 << 20, ModelMetrics("n", "1", dict))
            there.front.models.add(driver)
            there.at_front.flush()  # it is at the door's socket, and the door has not read it
            asked = request(1, 1.0)
            asked.model_name = "n"
            there.submit(asked)
            wider = dataclasses.replace(SPEC, max_batch_size=64)
            successor = ModelDriver(wider, 1 << 20, ModelMetrics("m", "1", dict))
            there.front.models.serve("m", [successor])
            there.at_front.flush()
            there.submit(request(50, 1.0))
            await there.settle()
            assert driver.unfinished == 1
            assert successor.unfinished == 1
            driver.close()
            successor.close()
            await there.settle()
            assert len(there.answers) == 2

    asyncio.run(talk())


def test_a_door_hears_that_the_front_drains_and_ends() -> None:
    async def talk() -> None:
        async with doors() as there:
            health = there.door.service.health
            assert not health.draining
            there.front.health.drain()
            await there.settle()
            assert health.draining
            there.submit(request(1, 1.0))
            await there.settle()
            (answer,) = there.answers
            assert isinstance(answer, Stopping)
            there.front.health.end()
            await there.settle()
            assert health.ended

    asyncio.run(talk())
