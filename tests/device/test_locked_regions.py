"""Clients' system shared memory that a worker on a GPU page-locks, so that the GPU copies from and to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from cuda_server import client_of, serve, tensor
from cuda_server import model as cuda_model
from gpu_machine import GpuMachine, RealMachine
from test_device_inputs import device_model, on_gpu
from test_host_memory import look_at
from worker_process import LARGE, MODELS, WorkerProcess, loaded, values

from gpuserve_worker.protocol import wire

Machine = GpuMachine | RealMachine

WIDTH = LARGE // 4
ROW = 4 * WIDTH
LIMIT = 64 << 20


@pytest.fixture
def file() -> Iterator[int]:
    """The memory of a client: two rows of inputs, and two of outputs, of which nothing is there yet."""
    fd = os.memfd_create("client")
    os.ftruncate(fd, 4 * ROW)
    yield fd
    os.close(fd)


def register(worker: WorkerProcess, fd: int, number: int = 1, nbytes: int = 4 * ROW) -> None:
    worker.link.send(wire.Region(number, 0, nbytes), (fd,))


def fill(fd: int, seed: int) -> Any:
    """New inputs in a client's memory."""
    rows = np.random.default_rng(seed).random((2, WIDTH), np.float32)
    os.pwrite(fd, rows.tobytes(), 0)
    return rows


def start(worker: WorkerProcess, sources: Sequence[Any], places: Sequence[Any], batch_id: int = 1) -> None:
    """A batch of a row a request, each from its source, and to its place if it has one."""
    payload = sources[0] if len(sources) == 1 else wire.Parts(tuple(sources))
    tensor = wire.WireTensor("x", "FP32", (len(sources), WIDTH), payload)
    requests = tuple(wire.WireRequest(1, {}, (), (("y", at),) if at else ()) for at in places)
    worker.link.send(wire.Run(batch_id, requests, (tensor,)))


def answers(worker: WorkerProcess) -> list[Any]:
    done = worker.answer()
    assert isinstance(done, wire.Done), done
    return [
        one if isinstance(one, wire.WireFailure) else one[0] for one in wire.responses(done.responses or ())
    ]


def in_region(row: int) -> wire.Place:
    return wire.Place(1, row * ROW, ROW)


def ask(worker: WorkerProcess, fd: int, seed: int) -> None:
    """Both rows from the region and to it, beside a request that has nothing to do with it."""
    rows = fill(fd, seed)
    own = np.full((1, WIDTH), seed, np.float32)
    block = worker.in_arena("x", "FP32", (1, WIDTH), own.tobytes()).payload
    start(worker, [in_region(0), block, in_region(1)], [in_region(2), None, in_region(3)], seed)
    first, other, second = answers(worker)
    assert (wire.payload(first[3]), wire.payload(second[3])) == (in_region(2), in_region(3))
    assert np.array_equal(np.frombuffer(os.pread(fd, 2 * ROW, 2 * ROW), np.float32), 2 * rows.ravel())
    assert np.array_equal(values(worker, other), 2 * own)


def test_they_are_copied_from_at_once_when_they_are_locked(shared_gpu_machine: Machine) -> None:
    """Not those of a BOOL, which are looked at first."""
    found = look_at(shared_gpu_machine, "regions_as_inputs")
    assert found == [[False, True], [True, True], [False, True]]


def test_they_are_copied_to_at_once_when_they_are_locked(shared_gpu_machine: Machine) -> None:
    assert look_at(shared_gpu_machine, "regions_for_outputs") == [[False, True], [True, True]]


def test_those_over_the_limit_are_copied_by_the_host(shared_gpu_machine: Machine) -> None:
    assert look_at(shared_gpu_machine, "regions_over_the_limit") == [[False, True]] * 6


def test_one_that_goes_is_locked_no_more_after_its_copies(stand_in: GpuMachine) -> None:
    stand_in.change(copy_bytes_per_s=10e6)
    found = look_at(stand_in, "regions_that_go")
    assert found == {
        "locked": [True, False],
        "under way": [True, False],
        "mapped": False,
        "there": True,
    }


@pytest.mark.parametrize("limit", [0, LIMIT])
def test_values_are_right_before_and_after(shared_gpu_machine: Machine, file: int, limit: int) -> None:
    with on_gpu(shared_gpu_machine, "doubled", lent_limit_nbytes=limit) as worker:
        register(worker, file)
        for seed in range(1, 10):
            ask(worker, file, seed)


def test_memory_that_a_client_only_claims_is_not_filled(shared_gpu_machine: Machine, file: int) -> None:
    nbytes = 512 << 20
    os.ftruncate(file, nbytes)
    with on_gpu(shared_gpu_machine, "doubled", lent_limit_nbytes=2 * nbytes) as worker:
        register(worker, file, nbytes=nbytes)
        for seed in range(1, 6):
            ask(worker, file, seed)
        assert os.fstat(file).st_blocks * 512 <= 4 * ROW + (2 << 20)


def test_who_shrinks_its_file_loses_what_asked_for_it_alone(shared_gpu_machine: Machine, file: int) -> None:
    with on_gpu(shared_gpu_machine, "doubled", lent_limit_nbytes=LIMIT) as worker:
        register(worker, file)
        for seed in range(1, 6):
            ask(worker, file, seed)
        os.ftruncate(file, ROW)
        block = worker.in_arena("x", "FP32", (1, WIDTH), bytes(ROW)).payload
        start(worker, [in_region(0), in_region(1), block, block], [None, None, None, in_region(2)])
        read, not_there, own, not_written = answers(worker)
        assert values(worker, own).max() == 0
        assert wire.payload(read[3]) is not None
        for one in (not_there, not_written):
            assert (one.code, "has shrunk" in one.text) == ("INVALID_ARGUMENT", True)


def test_a_refusal_is_logged_once_and_changes_nothing(stand_in: GpuMachine, file: int) -> None:
    with on_gpu(stand_in, "doubled", lent_limit_nbytes=LIMIT) as worker:
        stand_in.change(failures={"hostRegister": 2})
        register(worker, file)
        for seed in range(1, 6):
            ask(worker, file, seed)
        assert "are not page-locked" in worker.log_record().text
        worker.boot.send(wire.Stop())
        assert worker.hear(worker.boot) is None  # and it was logged no second time


def test_one_that_is_unregistered_is_not_mapped_any_more(shared_gpu_machine: Machine, file: int) -> None:
    with on_gpu(shared_gpu_machine, "doubled", lent_limit_nbytes=LIMIT) as worker:
        register(worker, file)
        for seed in range(1, 6):
            ask(worker, file, seed)
        maps = Path(f"/proc/{worker.process.pid}/maps")
        assert "memfd:client" in maps.read_text()
        worker.link.send(wire.DropRegion(1))
        start(worker, [worker.in_arena("x", "FP32", (1, WIDTH), bytes(ROW)).payload], [None])
        worker.answer()
        assert "memfd:client" not in maps.read_text()


@pytest.mark.parametrize("path", ["doubled", "waits"])
def test_a_front_that_is_replaced_takes_its_regions_along(
    shared_gpu_machine: Machine, file: int, path: str
) -> None:
    init = device_model(path, lent_limit_nbytes=LIMIT, concurrency=4)
    with loaded(init, environ=shared_gpu_machine.environ) as worker:
        for epoch in (2, 3):
            register(worker, file)
            for seed in range(1, 6):
                ask(worker, file, seed)
            worker.new_front(epoch)
            assert "memfd:client" not in Path(f"/proc/{worker.process.pid}/maps").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [None, 5 << 20])
def test_the_limit_is_a_setting_of_the_server(
    shared_gpu_machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    if limit is not None:
        monkeypatch.setenv("GPUSERVE_SERVER__SHARED_MEMORY_LOCKED_NBYTES", str(limit))
    inputs, outputs = [tensor("x", "float32", 1)], [tensor("y", "int64", 1)]
    attribute = f"{MODELS / 'on_device.py'}:LentLimit"
    served = {**cuda_model("limit", "", inputs, outputs), "callable": attribute}
    with serve(shared_gpu_machine, tmp_path, [served]) as server, client_of("http", server) as client:
        x = tritonclient.http.InferInput("x", [1, 1], "FP32")
        x.set_data_from_numpy(np.zeros((1, 1), np.float32))
        found = client.infer("limit", [x]).as_numpy("y")
    assert found.tolist() == [[1 << 30 if limit is None else limit]]
