"""Tensors that pass from worker to worker on the GPU: real worker processes, driven message by message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from gpu_machine import GpuMachine, RealMachine
from worker_process import WorkerProcess, floats, loaded, model, output, values

from gpuserve_worker.protocol import wire

pytestmark = pytest.mark.thorough

Machine = GpuMachine | RealMachine
X = ("x", "FP32", (-1,), False, "gpu")
WIDTH = 1 << 16


@contextmanager
def on_gpu(machine: Machine, path: str, uuid: str = "", **changes: Any) -> Iterator[WorkerProcess]:
    given: dict[str, Any] = {"device": "cuda:0", "instance": "cuda:0#0", "array": "cupy", "inputs": (X,)}
    environ = {"CUDA_VISIBLE_DEVICES": uuid} if uuid else {}
    init = model(f"on_device.py:{path}", **(given | changes))
    with loaded(init, environ=machine.environ | environ) as worker:
        yield worker


def start(worker: WorkerProcess) -> wire.ExportSegment:
    """Have a worker keep outputs: the first segment that it has for them."""
    worker.link.send(wire.StartExports())
    segment = worker.hear(worker.link)
    assert isinstance(segment, wire.ExportSegment)
    return segment


def keep(worker: WorkerProcess, array: Any, batch_id: int = 1) -> list[Any]:
    """Run a batch, one request a row, whose outputs stay where they are: the output of each request."""
    tensor = worker.in_arena("x", "FP32", array.shape, array.tobytes())
    request = wire.WireRequest(1, {}, ("y",), kept=("y",))
    worker.link.send(wire.Run(batch_id, (request,) * len(array), (tensor,)))
    done = worker.answer()
    assert isinstance(done, wire.Done), done
    return [wire.tensors(one)[0].payload for one in done.responses]  # type: ignore[arg-type]


def lend(worker: WorkerProcess, segment: wire.ExportSegment, number: int = 1) -> str:
    """Lend a segment to a worker: why it cannot open it."""
    worker.link.send(wire.LendExport(number, segment.nbytes, segment.handle))
    opened = worker.hear(worker.link)
    assert isinstance(opened, wire.ExportOpened)
    assert opened.segment == number
    return opened.problem


def loan(place: Any, *, in_place: bool = False, number: int = 1) -> wire.DeviceLoan:
    assert isinstance(place, wire.Exported), place
    return wire.DeviceLoan(number, place.offset, place.nbytes, in_place=in_place)


def read(worker: WorkerProcess, payload: Any, rows: int = 1, batch_id: int = 1) -> Any:
    """Run a batch on what was lent; its ``Done``."""
    return worker.run([wire.WireTensor("x", "FP32", (rows, WIDTH), payload)], (1,) * rows, batch_id)


def rows(*firsts: float) -> Any:
    return np.array(firsts, np.float32)[:, None] + np.arange(WIDTH, dtype=np.float32)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("read_only", [True, False])
def test_a_tensor_passes_without_the_host(
    shared_gpu_machine: Machine, in_place: bool, read_only: bool
) -> None:
    with (
        on_gpu(shared_gpu_machine, "doubled") as owner,
        on_gpu(shared_gpu_machine, "doubled", read_only_inputs=read_only) as reader,
    ):
        segment = start(owner)
        assert lend(reader, segment) == ""
        (place,) = keep(owner, rows(1))
        done = read(reader, loan(place, in_place=in_place))
        assert np.array_equal(output(reader, done), rows(1) * 4)
        if not done.inputs_free:
            assert in_place
            assert reader.hear(reader.link) == wire.Released((1,))
        owner.link.send(wire.FreeExports((place[:2],)))
        assert keep(owner, rows(2), 2) == [place]  # the memory is used again


def test_a_batch_joins_what_several_requests_were_lent(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "doubled") as owner, on_gpu(shared_gpu_machine, "doubled") as reader:
        lend(reader, start(owner))
        places = keep(owner, rows(1, 2, 3))
        other = rows(9)
        parts = wire.Parts((*map(loan, places), other.tobytes()))
        done = read(reader, parts, 4)
        assert np.array_equal(output(reader, done), np.concatenate([rows(1, 2, 3) * 2, other]) * 2)
        assert done.inputs_free


def test_arrays_that_the_callable_keeps_keep_the_memory(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "doubled") as owner, on_gpu(shared_gpu_machine, "Keeps") as reader:
        lend(reader, start(owner))
        first, second = keep(owner, rows(1, 2))
        done = read(reader, loan(first, in_place=True))
        assert not done.inputs_free
        reader.link.send(wire.UnlendExport(1))
        lend(reader, start(owner), 2)
        done = read(reader, loan(second, number=2), batch_id=2)
        assert np.array_equal(output(reader, done), rows(1) * 2 + rows(2) * 2)


def test_a_worker_reads_what_it_made_itself(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "doubled") as worker:
        assert lend(worker, start(worker)) == ""
        (place,) = keep(worker, rows(1))
        assert np.array_equal(
            output(worker, read(worker, loan(place, in_place=True), batch_id=2)), rows(1) * 4
        )


def test_small_outputs_and_those_on_the_host_are_sent(shared_gpu_machine: Machine) -> None:
    request = wire.WireRequest(1, {}, ("y",), kept=("y",))
    with on_gpu(shared_gpu_machine, "doubled") as worker:
        start(worker)
        worker.link.send(wire.Run(1, (request,), (floats("x", [1, 2]),)))
        (tensor,) = worker.answer().responses[0]
        assert values(worker, tensor).tolist() == [[2, 4]]
    with on_gpu(shared_gpu_machine, "Answers", kwargs={"form": "on_host"}) as worker:
        start(worker)
        (payload,) = keep(worker, rows(1))
        assert isinstance(payload, wire.Ref)


def test_nothing_is_kept_for_a_front_that_has_not_asked(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "doubled") as worker:
        (payload,) = keep(worker, rows(1))
        assert isinstance(payload, wire.Ref)
        start(worker)
        (first,) = keep(worker, rows(1), 2)
        worker.new_front(2)
        (payload,) = keep(worker, rows(1))
        assert isinstance(payload, wire.Ref)
        start(worker)
        (second,) = keep(worker, rows(1), 2)
        assert isinstance(second, wire.Exported)
        assert second != first  # which somebody may still be reading


def test_a_tensor_of_a_worker_that_has_died_is_still_read(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "doubled") as reader:
        with on_gpu(shared_gpu_machine, "doubled") as owner:
            segment = start(owner)
            lend(reader, segment)
            (place,) = keep(owner, rows(1))
        assert np.array_equal(output(reader, read(reader, loan(place))), rows(1) * 4)
        reader.link.send(wire.UnlendExport(1))
        assert lend(reader, segment, 2)  # nobody can open it any more
        failed = read(reader, loan(place, number=2), batch_id=3)
        assert isinstance(failed, wire.Failed)
        assert wire.WireFailure(*failed.failure).code == "UNAVAILABLE"
        done = read(reader, wire.Parts((loan(place, number=2), rows(5).tobytes())), 2, batch_id=4)
        gone, there = done.responses
        assert gone[0] == "UNAVAILABLE"
        assert "cannot be read on this device" in gone[1]
        assert np.array_equal(values(reader, there[0]), rows(5) * 2)


def test_garbage_handles_are_refused_and_nothing_else_happens(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "doubled") as reader:
        assert lend(reader, wire.ExportSegment(0, 1 << 25, b"\x55" * 64))
        assert lend(reader, wire.ExportSegment(0, 1 << 25, b"short"), 2)
        assert output(reader, reader.run([floats("x", [1])])).tolist() == [[2]]


def test_an_export_is_as_large_as_it_was_said_to_be(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "doubled") as owner, on_gpu(shared_gpu_machine, "doubled") as reader:
        problem = lend(reader, start(owner)._replace(nbytes=1 << 40))
        assert "expected at most" in problem


@pytest.mark.parametrize("peer_access", [True, False])
def test_another_device(two_gpus: GpuMachine, peer_access: bool) -> None:
    two_gpus.change(peer_access=peer_access)
    ours, theirs = two_gpus.uuids
    with on_gpu(two_gpus, "doubled", ours) as owner, on_gpu(two_gpus, "doubled", theirs) as reader:
        problem = lend(reader, start(owner))
        assert bool(problem) is not peer_access
        if peer_access:
            (place,) = keep(owner, rows(1))
            done = read(reader, loan(place, in_place=True))  # and is copied all the same
            assert done.inputs_free
            assert np.array_equal(output(reader, done), rows(1) * 4)
