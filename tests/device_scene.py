"""The workers of an ``ensemble_scene`` with a GPU each: memory that others open by its handle, for real
tensors. They write to what they are given in place, as callables may.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from ensemble_scene import Worker
from graphs import MEMBERS, tensors

from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.cuda.device.ipc_memory import ExportPool
from gpuserve_worker.inference.outputs import BatchAnswers, CheckedOutput
from gpuserve_worker.protocol import wire

LIMIT_NBYTES = 1 << 30


def on_gpu(spec: ModelSpec, device: str = "cuda:0", memory: str = "gpu", **more: Any) -> ModelSpec:
    """The same model on a GPU."""
    inputs = tuple(one._replace(memory=memory) for one in spec.inputs)
    instances = (InstanceSpec("a", device, {}),)
    return dataclasses.replace(spec, inputs=inputs, instances=instances, **more)


ON_GPU = {name: on_gpu(spec) for name, spec in MEMBERS.items()}


class Gpus:
    """All memory of GPUs that there is, by its handle."""

    def __init__(self) -> None:
        self.memory: dict[bytes, bytearray] = {}
        #: What no worker can open.
        self.out_of_reach = False
        self._addresses = 0

    def runtime(self) -> Runtime:
        """That of one process."""
        return Runtime(self)

    def new_address(self) -> int:
        self._addresses += 1
        return self._addresses << 40

    def worker(self, driver: ModelDriver) -> DeviceWorker:
        """A worker with a GPU."""
        return DeviceWorker(driver, self)


class Runtime:
    """What the pool needs of CUDA."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self.handles: set[bytes] = set()

    def allocate(self, nbytes: int) -> int:
        address = self._gpus.new_address()
        handle = self.export_memory(address)
        self._gpus.memory[handle] = bytearray(nbytes)
        self.handles.add(handle)
        return address

    def free(self, address: int) -> None:
        self._gpus.memory.pop(self.export_memory(address), None)

    def export_memory(self, address: int) -> bytes:
        return (address >> 40 << 40).to_bytes(64, "little")


class DeviceWorker(Worker):
    """``lent`` is what was lent to it; None: it could not be opened."""

    def __init__(self, driver: ModelDriver, gpus: Gpus) -> None:
        self._gpus = gpus
        self._runtime = gpus.runtime()
        runtime: Any = self._runtime
        self.pool = ExportPool(runtime, LIMIT_NBYTES)
        self.lent: dict[int, bytearray | None] = {}
        super().__init__(driver)

    def obey(self, message: wire.Message, fds: list[int]) -> None:
        match message:
            case wire.StartExports():
                self.pool.start(self._announce)
            case wire.FreeExports(blocks):
                self.pool.free(blocks)
            case wire.LendExport(number, nbytes, handle):
                memory = None if self._gpus.out_of_reach else self._gpus.memory.get(handle)
                assert memory is None or len(memory) == nbytes
                self.lent[number] = memory
                self.say(wire.ExportOpened(number, "" if memory is not None else "it is gone"))
            case wire.UnlendExport(number):
                del self.lent[number]
            case _:
                super().obey(message, fds)

    def _announce(self, segment: wire.ExportSegment) -> None:
        self.say(segment)

    def answer(self, *, well: bool) -> None:
        """As any worker; badly where it was lent what it cannot read."""
        payloads = [wire.payload(one[3]) for one in self.runs[0].inputs]
        parts = [part for one in payloads for part in (one.parts if isinstance(one, wire.Parts) else (one,))]
        gone = [one for one in parts if isinstance(one, wire.DeviceLoan) and self.lent[one.segment] is None]
        super().answer(well=well and not gone)

    def arrays(self, run: wire.Run) -> list[Any]:
        assert run.fills == ()
        return [self._array(one) for one in wire.tensors(run.inputs)]

    def _array(self, tensor: wire.WireTensor) -> Any:
        payload = tensor.payload
        if isinstance(payload, wire.DeviceLoan) and payload.in_place:
            memory = self._lent(payload)
        else:
            parts = payload.parts if isinstance(payload, wire.Parts) else (payload,)
            memory = memoryview(bytearray().join([self._bytes(one) for one in parts]))
        return np.frombuffer(memory, np.float32).reshape(tensor.shape)

    def _lent(self, loan: wire.DeviceLoan) -> memoryview:
        memory = self.lent[loan.segment]
        assert memory is not None
        return memoryview(memory)[loan.offset : loan.offset + loan.nbytes]

    def _bytes(self, payload: Any) -> Any:
        match payload:
            case bytes():
                return payload
            case wire.DeviceLoan():
                return self._lent(payload)
            case wire.Loan(segment, offset, nbytes):
                return self.session.loans.view(segment, offset, nbytes)
            case _:
                return self.session.mapping.view(*payload)

    def done(
        self, run: wire.Run, outputs: list[CheckedOutput], requests: tuple[wire.WireRequest, ...]
    ) -> wire.Done:
        if not any(one.kept for one in requests):
            return super().done(run, outputs, requests)
        responses, start = [], 0
        for request in requests:
            rows = [self._cut(one, start, request) for one in outputs]
            responses.append(tuple(rows))
            start += request.rows
        return wire.Done(run.batch_id, None, tuple(responses), True, 1, 1, 1)

    def _cut(self, output: CheckedOutput, start: int, request: wire.WireRequest) -> wire.WireTensor:
        part = np.ascontiguousarray(output.parts[0][start : start + request.rows])
        block = None
        if output.name in request.kept and part.nbytes > wire.INLINE_NBYTES:
            block = self.pool.allocate(part.nbytes, self._announce)
        if block is None:
            one = CheckedOutput(output.name, "FP32", part.shape, part.nbytes, part.dtype, [part])
            written = self.session.writer.write(BatchAnswers([one], None), ())
            assert written.outputs is not None
            return written.outputs[0]
        memory = self._gpus.memory[self._runtime.export_memory(block.address)]
        memory[block.place.offset : block.place.offset + part.nbytes] = part.tobytes()
        return wire.WireTensor(output.name, "FP32", part.shape, block.place)

    def blocks(self) -> int:
        return super().blocks() + len(self.pool._lent)

    def die(self) -> None:
        for handle in self._runtime.handles:
            self._gpus.memory.pop(handle, None)
        super().die()


def ensemble(*steps: Any, outputs: str = "y") -> ModelSpec:
    """From x."""
    return ModelSpec("e", tensors(["x"]), tensors(outputs.split()), 4, (), steps=steps)
