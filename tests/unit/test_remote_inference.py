"""Inference through an ingress process: both sides in one loop, with a real socket between them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from present import present

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import InvalidArgument, NoMemory, NotFound, RequestError, Stopping, Unavailable
from gpuserve.front.ingress.channel_messages import AnnounceShutdown, LeasesClosed
from gpuserve.front.ingress.ipc_channel import IpcChannel
from gpuserve.front.ingress.model_replica import IngressService, ModelPublisher
from gpuserve.front.ingress.proxied_requests import ProxiedRequests
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.inference import InferRequest, InferResponse, InputTensor
from gpuserve.front.service.inference_service import inference_service
from gpuserve.model.spec import QueueSpec
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.payloads import Sequence
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


class IngressAndFront:
    """A front with one model, an ingress process, and the answers that the ingress process got."""

    def __init__(self, spec: Any = SPEC) -> None:
        self.lost: list[str] = []
        self._handlers: dict[str, Any] = {}
        self._dead: list[tuple[ProxiedRequests, Scene]] = []
        self.at_ingress = IpcChannel(None, self._take("ingress"), lambda: self.lost.append("ingress"))
        self.ingress = IngressService(ServerSettings(), self.at_ingress)
        self._handlers["ingress"] = self.ingress.handlers
        self.meet_front(spec)
        self.answers: list[Answer] = []

    def meet_front(self, spec: Any) -> None:
        self.scene = Scene(spec, arena_nbytes=64 << 20)
        self.front = inference_service(ServerSettings())
        self.front.models.add(self.scene.driver)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.at_front = IpcChannel(ours, self._take("front"), lambda: self.lost.append("front"))
        receptions = self.front.control.trace.receptions
        self.requests = ProxiedRequests(self.at_front, self.front.inference, receptions)
        self._handlers["front"] = self.requests.handlers
        self.at_front.open()
        self.at_ingress.reopen(theirs)
        control = self.front.control
        self.mirror = ModelPublisher(self.at_front, self.front.models, self.front.health, control.trace)
        self.mirror.open()

    async def front_lost(self) -> None:
        """Kill the front: it sends nothing more."""
        self._dead.append((self.requests, self.scene))
        self.mirror.close()
        self.at_front.close()
        await self.settle()
        assert self.lost == ["ingress"]
        self.lost.clear()
        self.ingress.on_front_died()

    def _take(self, end: str) -> Callable[[Any, list[int]], None]:
        def take(message: Any, fds: list[int]) -> None:
            if fds:
                {"front": self.requests.loans.attach, "ingress": self.ingress.attach}[end](message, fds)
            else:
                self._handlers[end][type(message)](message)

        return take

    def submit(self, asked: InferRequest, on_response: Any = None) -> PendingRequest:
        on_answer = lambda _, one: self.answers.append(one)  # noqa: E731
        return self.ingress.service.inference.submit(asked, on_response, on_answer)

    @property
    def responses(self) -> list[InferResponse]:
        """Return the answers; all must be responses."""
        assert all(isinstance(one, InferResponse) for one in self.answers), self.answers
        return [one for one in self.answers if isinstance(one, InferResponse)]

    async def settle(self) -> None:
        for _ in range(20):
            await self.scene.settle()
            self.at_ingress.flush()  # deferred messages as well

    @property
    def worker(self) -> Worker:
        """The first worker that has something to run."""
        return present(self.scene.busy(0))

    async def use_large_worker(self) -> _LargeWorker:
        """Replace the workers by one that answers with a block of an arena."""
        self.let_workers_die()
        await self.settle()
        worker = _LargeWorker(self.scene.driver, "a")
        self.scene.workers = [worker]
        return worker

    async def replace_front(self, spec: Any) -> None:
        self.meet_front(spec)
        self.ingress.resume()
        await self.settle()

    def let_workers_die(self) -> None:
        while self.scene.workers:
            self.scene.workers.pop().die()

    async def run_all(self, well: bool = True) -> None:
        """Let the workers answer every request."""
        await self.settle()
        while (worker := self.scene.busy(0)) is not None:
            worker.answer([well])
            await self.settle()

    def close(self) -> None:
        self.mirror.close()
        self.requests.close()
        self.ingress.close()
        self.at_ingress.close()
        self.at_front.close()
        for requests, scene in self._dead:
            requests.close()
            scene.close()
        self.scene.close()


@contextlib.asynccontextmanager
async def connected(spec: Any = SPEC) -> AsyncIterator[IngressAndFront]:
    found = IngressAndFront(spec)
    try:
        await found.settle()
        yield found
        assert found.lost == []
    finally:
        found.close()


async def test_a_request_is_run_by_the_front() -> None:
    async with connected() as there:
        asked = request(2, 1.5)
        asked.id = "seven"
        there.submit(asked)
        await there.settle()
        (tensor,) = wire.tensors(there.worker.runs[0].inputs)
        assert tensor.payload == struct.pack("2f", 1.5, 1.5)
        await there.run_all()
        (answer,) = there.responses
        assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "seven")
        (output,) = answer.outputs
        assert (output.name, output.shape, bytes(output.data)) == ("y", (2, 1), bytes(8))


async def test_a_request_is_given_the_outputs_that_it_asks_for() -> None:
    two = dataclasses.replace(SPEC, outputs=(*SPEC.outputs, TensorSpec("z", "FP32", (1,))))
    async with connected(two) as there:
        asked = request(1, 1.0, timeout_s=60.0)
        asked.outputs = ("z",)
        there.submit(asked)
        there.submit(request(1, 2.0))
        await there.settle()
        worker = there.worker
        run = worker.runs.pop(0)
        whole = [wire.WireTensor(name, "FP32", (2, 1), name.encode() * 8) for name in ("y", "z")]
        assert [one[0] for one in wire.requests(run.requests)] == [1, 1]
        worker.say(wire.Done(run.batch_id, tuple(whole), None, True, 1, 2, 3))
        await there.settle()
        found = [[(one.name, bytes(one.data)) for one in answer.outputs] for answer in there.responses]
        assert found == [[("z", b"zzzz")], [("y", b"yyyy"), ("z", b"zzzz")]]


async def test_the_front_refuses_and_counts_wrong_requests_and_reports_failures() -> None:
    async with connected() as there:
        there.submit(request(9, 1.0))
        await there.settle()
        refused = there.answers.pop()
        assert isinstance(refused, InvalidArgument)
        assert (refused.untried, "batch" in str(refused)) == (True, True)
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


async def test_a_full_queue_answers_with_a_refusal() -> None:
    async with connected(dataclasses.replace(SPEC, queue=QueueSpec(1))) as there:
        for _ in range(8):
            there.submit(request(4, 1.0))
        await there.settle()
        refused = [one for one in there.answers if isinstance(one, Unavailable)]
        assert refused
        assert "queue" in str(refused[0])
        await there.run_all()
        assert len(there.answers) == 8


async def test_a_cancelled_request_is_never_run_and_never_answered() -> None:
    async with connected() as there:
        there.let_workers_die()
        await there.settle()
        pending = there.submit(request(1, 1.0))
        await there.settle()
        assert there.scene.driver.unfinished == 1
        pending.cancel()
        pending.cancel()
        await there.settle()
        assert there.scene.driver.unfinished == 0
        assert there.answers == []


class _LargeWorker(Worker):
    """A worker with an arena that answers with a block of the arena."""

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


def large_request(data: Any) -> InferRequest:
    nbytes = len(data if isinstance(data, bytes) else data.view)
    return InferRequest("m", "", "", {}, [InputTensor("x", "UINT8", (nbytes,), data)], (), None)


def taking(nbytes: int) -> Any:
    return dataclasses.replace(LARGE_SPEC, inputs=(TensorSpec("x", "UINT8", (nbytes,)),))


@pytest.mark.parametrize("nbytes", [LARGE, 20 * LARGE])
async def test_a_large_tensor_is_lent_both_ways_and_released(nbytes: int) -> None:
    """The largest tensors are copied over several loop iterations."""
    async with connected(taking(nbytes)) as there:
        worker = await there.use_large_worker()
        there.submit(large_request(b"\7" * nbytes))
        for _ in range(4):
            await there.settle()
        (tensor,) = wire.tensors(worker.runs[0].inputs)
        assert isinstance(tensor.payload, wire.Loan)
        arena = there.ingress.service.models.find("m").arena
        assert arena.statistics().blocks == 1
        assert there.scene.driver.arena.statistics().allocated == 0, "the front copies no input"
        worker.answer_large(b"\x08")
        await there.settle()
        assert arena.statistics().blocks == 0, "the body is free once the batch is through"
        (answer,) = there.responses
        (output,) = answer.outputs
        assert isinstance(output.data, memoryview)
        assert bytes(output.data) == b"\x08" * LARGE
        assert there.requests.loans.n_leased == 1
        output.data.release()
        answer.close()
        await there.settle()
        assert there.requests.loans.n_leased == 0
        worker.arena.close()


@pytest.mark.parametrize("how", ["cancel", "front dies", "no room"])
async def test_a_large_tensor_that_is_copied_when_its_request_ends(how: str) -> None:
    async with connected(taking(20 * LARGE)) as there:
        arena = there.ingress.service.models.find("m").arena
        if how == "no room":
            arena.limit_nbytes = LARGE
        pending = there.submit(large_request(b"\7" * 20 * LARGE))
        if how == "cancel":
            pending.cancel()
        elif how == "front dies":
            there.ingress.on_front_died()
        for _ in range(4):
            await there.settle()
        assert arena.statistics().blocks == 0
        assert [type(one) for one in there.answers] == ([NoMemory] if how == "no room" else [])


async def test_responses_of_a_stream_come_one_by_one_until_its_end() -> None:
    async with connected(STREAM_SPEC) as there:
        came: list[InferResponse] = []
        there.submit(request(1, 1.0), came.append)
        await there.settle()
        worker = there.worker
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


async def test_a_dead_ingress_process_leaves_nothing() -> None:
    there = IngressAndFront()
    await there.settle()
    there.submit(request(1, 1.0))
    there.submit(request(4, 1.0))
    await there.settle()
    assert there.scene.driver.unfinished == 2
    there.at_ingress.close()
    await there.settle()
    assert there.lost == ["front"]
    there.requests.close()
    await there.run_all()
    assert there.scene.driver.unfinished == 0
    there.close()


async def test_a_new_front_runs_small_requests_again_and_refuses_large_ones() -> None:
    async with connected() as there:
        there.submit(request(1, 1.0))
        placed = request(1, 2.0)
        placed.sequence = Sequence(7, True, True)
        there.submit(placed)
        await there.settle()
        await there.front_lost()
        (refused,) = there.answers
        assert isinstance(refused, Unavailable), "of a sequence only the front knew"
        late = request(1, 3.0, timeout_s=60.0)
        there.submit(late)
        there.submit(request(1, 4.0)).cancel()
        await there.replace_front(dataclasses.replace(SPEC, version=2))
        assert [one.spec.version for one in there.ingress.service.models.of("m")] == [2]
        assert late.timeout_s is not None
        assert late.timeout_s < 60.0
        there.answers.clear()
        await there.run_all()
        assert [one.model_version for one in there.responses] == ["2", "2"]
        there.submit(request(1, 5.0))
        await there.settle()
        for _ in range(2):
            await there.front_lost()
            await there.replace_front(SPEC)
        assert isinstance(there.answers[-1], Unavailable), "it was in two fronts that died"


async def test_memory_is_shared_with_each_front_anew() -> None:
    async with connected(LARGE_SPEC) as there:
        workers = [await there.use_large_worker()]
        there.submit(large_request(b"\1" * LARGE))
        await there.settle()
        workers[0].answer_large(b"\1")
        await there.settle()
        arena = there.ingress.service.models.find("m").arena
        block = arena.allocate(LARGE)  # a body that comes while the front dies
        block.view[:] = b"\2" * LARGE
        await there.front_lost()
        await there.replace_front(LARGE_SPEC)
        (first,) = there.responses
        assert bytes(first.outputs[0].data) == b"\1" * LARGE, "it is still being written"
        workers.append(await there.use_large_worker())
        there.submit(large_request(block))
        await there.settle()
        (tensor,) = wire.tensors(workers[-1].runs[0].inputs)
        assert isinstance(tensor.payload, wire.Loan)
        workers[-1].answer_large(b"\3")
        await there.settle()
        assert bytes(there.responses[-1].outputs[0].data) == b"\3" * LARGE
        assert there.requests.loans.n_leased == 1
        first.close()  # a lease of the front before, whose number is in use again
        await there.settle()
        assert there.requests.loans.n_leased == 1
        there.responses[-1].close()
        await there.settle()
        assert there.requests.loans.n_leased == 0
        assert arena.statistics().blocks == 0
        for one in there.responses:
            for output in one.outputs:
                assert isinstance(output.data, memoryview)
                output.data.release()
        for worker in workers:
            worker.arena.close()


async def test_pending_model_updates_are_read_before_a_request_is_refused() -> None:
    async with connected() as there:
        other = dataclasses.replace(SPEC, name="n")
        driver, successor = (
            ModelDriver(one, 1 << 20, ModelMetrics(one.name, "1", dict))
            for one in (other, dataclasses.replace(SPEC, max_batch_size=64))
        )
        there.front.models.add(driver)
        there.at_front.flush()  # the update is in the socket, unread by the ingress process
        asked = request(1, 1.0)
        asked.model_name = "n"
        there.submit(asked)
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


async def test_an_ingress_process_learns_that_the_front_drains_and_ends() -> None:
    async with connected() as there:
        health = there.ingress.service.health
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


@pytest.mark.parametrize("with_another", [True, False])
async def test_a_deferred_message_is_sent_with_the_next_message_or_soon(with_another: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    end = IpcChannel(ours, lambda message, fds: None, lambda: None)
    end.open()
    end.call_at_next(lambda: end.post(LeasesClosed((1,))))
    if with_another:
        end.post(AnnounceShutdown(1))
    await asyncio.sleep(0)
    with theirs:
        if with_another:
            assert theirs.recv(1)
        else:
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(theirs, 1), 5)
        end.close()
