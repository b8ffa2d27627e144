"""Handles of other processes while CUDA is busy opening or closing them: who needs them waits, nobody else. A
real worker process, driven message by message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cuda_exporter import DeviceMemory, Exporter
from gpu_machine import GpuMachine
from test_device_inputs import on_gpu
from worker_process import WorkerProcess, floats, output

from gpuserve_worker.protocol import wire

ROW = np.arange(8, dtype=np.float32).reshape(1, 8)
MIB = 1 << 20
PATHS = ["doubled", pytest.param("doubled_async", marks=pytest.mark.thorough)]


@pytest.fixture
def exporter(stand_in: GpuMachine) -> Iterator[Exporter]:
    with Exporter(stand_in.environ) as one:
        yield one


@pytest.fixture
def memory(exporter: Exporter) -> DeviceMemory:
    made = exporter.make(2 * MIB)
    made.put(ROW.tobytes())
    return made


@contextmanager
def held(machine: GpuMachine) -> Iterator[None]:
    """Whatever is opened or closed meanwhile takes until the end of this."""
    machine.change(handles_held=True)
    try:
        yield
    finally:
        machine.change(handles_held=False)


def tell_of(worker: WorkerProcess, memory: DeviceMemory, number: int = 1) -> None:
    worker.link.send(wire.CudaRegion(number, 0, memory.nbytes, memory.handle))


def start_in_region(worker: WorkerProcess, batch_id: int, number: int = 1) -> None:
    tensor = wire.WireTensor("x", "FP32", ROW.shape, wire.Place(number, 0, ROW.nbytes))
    worker.link.send(wire.Run(batch_id, (wire.WireRequest(1, {}, ()),), (tensor,)))


def check_that_it_serves(worker: WorkerProcess) -> None:
    for number in range(10, 15):
        done = worker.run([floats("x", [number])], batch_id=number)
        assert output(worker, done).tolist() == [[2.0 * number]]


def heard(worker: WorkerProcess, count: int) -> list[Any]:
    return [worker.hear(worker.link) for _ in range(count)]


@pytest.mark.parametrize("path", PATHS)
def test_batches_go_on_while_a_region_is_opened(
    stand_in: GpuMachine, memory: DeviceMemory, path: str
) -> None:
    with on_gpu(stand_in, path) as worker:
        with held(stand_in):
            tell_of(worker, memory)
            check_that_it_serves(worker)
        assert worker.hear(worker.link) == wire.RegionOpened(1, "")


@pytest.mark.parametrize("path", PATHS)
def test_a_batch_waits_for_the_region_that_it_names(
    stand_in: GpuMachine, memory: DeviceMemory, path: str
) -> None:
    with on_gpu(stand_in, path) as worker:
        with held(stand_in):
            worker.start([floats("x", [3])], batch_id=2)
            tell_of(worker, memory)
            start_in_region(worker, 3)
            assert output(worker, worker.answer()).tolist() == [[6]]
            if path == "doubled_async":  # which keeps no order
                check_that_it_serves(worker)
        told, done = heard(worker, 2)
        assert told == wire.RegionOpened(1, "")
        assert np.array_equal(output(worker, done), ROW * 2)


def test_batches_go_on_while_a_region_is_closed(stand_in: GpuMachine, memory: DeviceMemory) -> None:
    with on_gpu(stand_in, "doubled") as worker:
        tell_of(worker, memory)
        start_in_region(worker, 2)
        heard(worker, 2)
        with held(stand_in):
            worker.link.send(wire.DropRegion(1))
            check_that_it_serves(worker)
            tell_of(worker, memory, 2)  # once more, while it is being closed
            start_in_region(worker, 20, 2)
        told, done = heard(worker, 2)
        assert told == wire.RegionOpened(2, "")
        assert np.array_equal(output(worker, done), ROW * 2)


@pytest.mark.thorough
def test_a_region_that_is_dropped_while_it_is_opened_is_closed(
    stand_in: GpuMachine, memory: DeviceMemory
) -> None:
    with on_gpu(stand_in, "doubled") as worker:
        with held(stand_in):
            for number in (1, 2):
                tell_of(worker, memory, number)
                worker.link.send(wire.DropRegion(number))
            check_that_it_serves(worker)
        assert heard(worker, 2) == [wire.RegionOpened(1, ""), wire.RegionOpened(2, "")]
        tell_of(worker, memory, 3)
        start_in_region(worker, 2, 3)
        told, done = heard(worker, 2)
        assert told == wire.RegionOpened(3, "")
        assert np.array_equal(output(worker, done), ROW * 2)


@pytest.mark.thorough
def test_a_region_that_cannot_be_opened_fails_the_batch_that_waits_for_it(
    stand_in: GpuMachine, exporter: Exporter
) -> None:
    gone = exporter.make(2 * MIB)
    gone.free()
    with on_gpu(stand_in, "doubled") as worker:
        with held(stand_in):
            tell_of(worker, gone)
            start_in_region(worker, 2)
            worker.start([floats("x", [4])], batch_id=3)
        told, failed, done = heard(worker, 3)
        assert told.problem.startswith("CUDA could not open its handle: ")
        text = f"a region of CUDA memory is not there: {told.problem}"
        assert wire.WireFailure(*failed.failure).text == text
        assert output(worker, done).tolist() == [[8]]


@pytest.mark.thorough
def test_a_front_that_is_gone_before_its_region_is_open_leaves_a_worker_that_serves(
    stand_in: GpuMachine, memory: DeviceMemory
) -> None:
    with on_gpu(stand_in, "doubled") as worker:
        with held(stand_in):
            for epoch in (2, 3):
                tell_of(worker, memory)
                worker.new_front(epoch)
                check_that_it_serves(worker)
        tell_of(worker, memory)
        start_in_region(worker, 7)
        told, done = heard(worker, 2)
        assert told == wire.RegionOpened(1, "")
        assert np.array_equal(output(worker, done), ROW * 2)


@pytest.mark.thorough
def test_a_worker_that_dies_while_it_opens_a_region_leaves_nothing_behind(
    stand_in: GpuMachine, memory: DeviceMemory
) -> None:
    for _ in range(2):
        with held(stand_in), on_gpu(stand_in, "doubled") as worker:
            tell_of(worker, memory)
            start_in_region(worker, 1)
            worker.process.kill()
            assert worker.hear(worker.link) is None
    with on_gpu(stand_in, "doubled") as worker:
        tell_of(worker, memory)
        start_in_region(worker, 1)
        told, done = heard(worker, 2)
        assert told == wire.RegionOpened(1, "")
        assert np.array_equal(output(worker, done), ROW * 2)


@pytest.mark.thorough
@pytest.mark.parametrize("path", ["doubled", "doubled_async"])
def test_a_lost_device_that_a_handle_finds_ends_the_worker_and_blames_no_batch(
    stand_in: GpuMachine, memory: DeviceMemory, path: str
) -> None:
    with on_gpu(stand_in, path) as worker:
        stand_in.change(failures={"ipcOpenMemHandle": 719, "deviceSynchronize": 719})
        tell_of(worker, memory)
        assert worker.hear(worker.link) is None
        assert worker.exit_status() != 0


@pytest.mark.thorough
def test_batches_go_on_while_what_another_worker_keeps_is_opened(stand_in: GpuMachine) -> None:
    array = np.arange(1 << 16, dtype=np.float32)[None]
    with on_gpu(stand_in, "doubled") as owner, on_gpu(stand_in, "doubled") as reader:
        owner.link.send(wire.StartExports())
        segment = owner.hear(owner.link)
        assert isinstance(segment, wire.ExportSegment)
        request = wire.WireRequest(1, {}, ("y",), kept=("y",))
        owner.link.send(wire.Run(1, (request,), (owner.in_arena("x", "FP32", array.shape, array.tobytes()),)))
        (place,) = [wire.tensors(one)[0].payload for one in owner.answer().responses]
        assert isinstance(place, wire.Exported), place
        with held(stand_in):
            reader.link.send(wire.LendExport(1, segment.nbytes, segment.handle))
            check_that_it_serves(reader)
            loan = wire.DeviceLoan(1, place.offset, place.nbytes, in_place=False)
            reader.start([wire.WireTensor("x", "FP32", array.shape, loan)], batch_id=2)
        told, done = heard(reader, 2)
        assert told == wire.ExportOpened(1, "")
        assert np.array_equal(output(reader, done), array * 4)
