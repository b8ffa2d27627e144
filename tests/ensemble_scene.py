"""An ensemble and its models with workers in this process, behind real links and with real memory. They write
to their inputs, as callables may.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
from driver_scene import FAILURE, LinkedWorker
from graphs import MEMBERS, expected
from worker_process import raised

from gpuserve.core.errors import NotFound, RequestError
from gpuserve.front.ipc.shared_memory import RegionTable
from gpuserve.front.models.ensemble_driver import EnsembleDriver
from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.inference import InferRequest, InferResponse, InputTensor
from gpuserve.front.requests.statistics import FailureReason
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.execution.batch_inputs import copy_fills
from gpuserve_worker.execution.loop import HostPath
from gpuserve_worker.execution.session import FrontSession
from gpuserve_worker.inference.outputs import BatchAnswers, CheckedOutput
from gpuserve_worker.protocol import wire

ARENA_NBYTES = 1 << 28
SMALL, LARGE = 4, 1 << 13


class Worker(LinkedWorker):
    """The one instance of a model: the other end of a link, which answers as it is told."""

    def __init__(self, driver: ModelDriver) -> None:
        super().__init__(driver, "a", 1, 60.0)
        self._spec = driver.spec
        self.session = FrontSession(
            self._link, HostPath(), raised, read_only_inputs=driver.spec.read_only_inputs
        )
        self.heard: list[wire.Run] = []

    def on_message(self, message: wire.Message, fds: list[int]) -> None:
        match message:
            case wire.Run():
                self.runs.append(message)
                self.heard.append(message)
            case wire.Attach() | wire.Cancel():
                pass
            case _:
                self.obey(message, fds)

    def obey(self, message: wire.Message, fds: list[int]) -> None:
        """Take a message about memory."""
        self.session.process_memory_message(message, fds)

    def answer(self, *, well: bool) -> None:
        """Answer the batch at hand: with sums, or as a failure."""
        run = self.runs.pop(0)
        self.session.leases.begin(run.batch_id)
        if well:
            self.session.reply(self._done(run))
        else:
            self.session.reply(wire.Failed(run.batch_id, FAILURE, True))

    def arrays(self, run: wire.Run) -> list[Any]:
        """The inputs of a batch."""
        if run.fills:
            copy_fills(run, self.session.mapping, self.session.regions, self.session.loans)
        return list(self.session.inputs.arrays(run.batch_id, wire.tensors(run.inputs)).values())

    def done(
        self, run: wire.Run, outputs: list[CheckedOutput], requests: tuple[wire.WireRequest, ...]
    ) -> wire.Done:
        """The answer to a batch."""
        written = self.session.writer.write(BatchAnswers(outputs, None), requests)
        return wire.Done(run.batch_id, written.outputs, None, True, 1, 1, 1)

    def _done(self, run: wire.Run) -> wire.Done:
        arrays = self.arrays(run)
        total = sum(arrays) + np.float32(1)
        for one in arrays:
            one[:] = -1  # whoever else reads this must not see it
        outputs = []
        for number, spec in enumerate(self._spec.outputs):
            made = total + np.float32(number)
            outputs.append(CheckedOutput(spec.name, "FP32", made.shape, made.nbytes, made.dtype, [made]))
        requests = wire.requests(run.requests)
        wanted = {name for one in requests for name in one.requested_outputs}
        outputs = [one for one in outputs if one.name in wanted]
        return self.done(run, outputs, requests)

    def blocks(self) -> int:
        """What it has not been given back."""
        return self.session.writer._arena.statistics().blocks  # type: ignore[no-any-return]

    def die(self) -> None:
        """The process ends."""
        super().die()
        self.session.close()


class Scene:
    """An ensemble, its models with a worker each, and every request that there was."""

    def __init__(
        self,
        spec: ModelSpec,
        members: Sequence[ModelSpec] = tuple(MEMBERS.values()),
        worker: Callable[[ModelDriver], Worker] = Worker,
    ) -> None:
        self.spec = spec
        self.new_worker = worker
        self.drivers: dict[str, Any] = {one.name: _driver(one) for one in members}
        self.workers = {name: worker(driver) for name, driver in self.drivers.items()}
        self.metrics = ModelMetrics(spec.name, "1", dict)
        self.ensemble = EnsembleDriver(spec, ARENA_NBYTES, self.metrics, self.model, RegionTable())
        self.drivers[spec.name] = self.ensemble
        self.asked: list[tuple[PendingRequest, dict[str, Any], tuple[str, ...]]] = []
        self.submitted = self.answered = self.failed = self.gone = 0

    def model(self, name: str, version: str) -> Any:
        if name not in self.drivers:
            raise NotFound(f"no {name}")
        return self.drivers[name]

    async def settle(self) -> None:
        """Let everything happen that is due."""
        for _ in range(3):
            for _ in range(4):
                await asyncio.sleep(0)
            for worker in self.workers.values():
                worker.hear()

    def submit(self, rows: int, width: int, value: int, outputs: tuple[str, ...] = ()) -> PendingRequest:
        given_: dict[str, Any] = {}
        inputs = []
        for number, one in enumerate(self.spec.inputs):
            array = np.full((rows, width), value + 10 * number, np.float32)
            given_[one.name] = array
            inputs.append(InputTensor(one.name, "FP32", array.shape, self._data(array)))
        pending = self.ensemble.submit(InferRequest(self.spec.name, "", "", {}, inputs, outputs, None))
        self.submitted += 1
        self.asked.append((pending, given_, outputs))
        return pending

    def _data(self, array: Any) -> Any:
        """Place the input like the protocol handlers: in the arena if the input is large."""
        block = self.ensemble.arena.allocate(array.nbytes) if array.nbytes > wire.INLINE_NBYTES else None
        if block is None:
            return array.tobytes()
        block.view[:] = array.tobytes()
        return block

    def cancel(self, number: int) -> None:
        if self.asked:
            pending, *_ = self.asked.pop(number % len(self.asked))
            done = pending.answer.done()
            pending.cancel()
            if done:
                self.failed += pending.answer.exception() is not None
                self.answered += pending.answer.exception() is None
            else:
                self.gone += 1
                pending.answer.cancel()

    async def finish(self, *, well: bool = True) -> None:
        """Let the workers answer all that they have, and all that comes of it."""
        for _ in range(100):
            await self.settle()
            busy = [worker for worker in self.workers.values() if worker.runs]
            if not busy:
                return
            for worker in busy:
                worker.answer(well=well)
        raise AssertionError("it never ends")

    def look(self) -> None:
        """At every answer: it is right, and has been read."""
        for pending, given_, outputs in self.asked:
            assert pending.answer.done()
            if pending.answer.exception() is not None:
                assert isinstance(pending.answer.exception(), RequestError)
                self.failed += 1
                continue
            response: InferResponse = pending.answer.result()
            right = expected(self.spec, given_)
            names = outputs or tuple(one.name for one in self.spec.outputs)
            assert tuple(one.name for one in response.outputs) == names
            for one in response.outputs:
                found = np.frombuffer(one.data, np.float32).reshape(one.shape)
                np.testing.assert_array_equal(found, right[one.name])
                del found
            response.close()
            self.answered += 1
        self.asked.clear()

    async def check_nothing_is_left(self) -> None:
        await self.settle()
        assert [driver.arena.statistics().blocks for driver in self.drivers.values()] == [0] * len(
            self.drivers
        )
        assert [worker.blocks() for worker in self.workers.values()] == [0] * len(self.workers)
        assert self.ensemble.unfinished == 0
        durations = self.metrics.statistics.durations()
        assert (durations["success"].times, durations["fail"].times) == (
            self.answered,
            self.failed + self.gone,
        )
        assert self.submitted == self.answered + self.failed + self.gone
        failures = self.metrics.statistics.failures
        assert failures[FailureReason.CANCELED] == self.gone
        assert failures[FailureReason.OTHER] == self.failed

    def close(self) -> None:
        for driver in self.drivers.values():
            driver.close()
        for worker in self.workers.values():
            worker.die()


def _driver(spec: ModelSpec) -> ModelDriver:
    metrics = ModelMetrics(spec.name, "1", dict)
    return ModelDriver(
        spec, ARENA_NBYTES, metrics, on_other=lambda link, message: link.exports.receive(message)
    )


@contextlib.asynccontextmanager
async def played(spec: ModelSpec, **more: Any) -> AsyncIterator[Scene]:
    """A scene at whose end every answer is right and nothing is left."""
    scene = Scene(spec, **more)
    try:
        await scene.settle()
        yield scene
        scene.look()
        await scene.check_nothing_is_left()
    finally:
        scene.close()
        await asyncio.sleep(0)
