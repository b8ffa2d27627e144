"""Batches that overlap in one worker process, driven message by message."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_machine import GpuMachine, RealMachine
from worker_process import WorkerProcess, floats, loaded, model, output

from gpuserve_worker.cuda.pipeline import ANNOUNCED_NBYTES
from gpuserve_worker.execution import lifecycle
from gpuserve_worker.protocol import wire

pytestmark = pytest.mark.thorough

Machine = GpuMachine | RealMachine

X = ("x", "FP32", (-1,), False, "gpu")
POISON = 13.0
#: Elements of an output that is large enough to be worth a message.
WIDE = ANNOUNCED_NBYTES // 4


@contextmanager
def on_gpu(
    machine: Machine, path: str, environ: dict[str, str] | None = None, **changes: Any
) -> Iterator[WorkerProcess]:
    given: dict[str, Any] = {"device": "cuda:0", "instance": "cuda:0#0", "array": "cupy", "inputs": (X,)}
    with loaded(
        model(f"pipelined.py:{path}", **(given | changes)), environ={**machine.environ, **(environ or {})}
    ) as worker:
        yield worker


def start(worker: WorkerProcess, batch_id: int, *rows: Sequence[float]) -> None:
    worker.start([floats("x", *rows)], (len(rows),), batch_id=batch_id)


def answers(worker: WorkerProcess, count: int) -> list[Any]:
    """The next answers, with whatever is said between them left out."""
    found: list[Any] = []
    while len(found) < count:
        message = worker.hear(worker.link)
        assert message is not None, found
        if isinstance(message, wire.Done | wire.Failed):
            found.append(message)
    return found


@pytest.mark.parametrize("path", ["waited_for", "started"])
def test_batches_that_come_together_are_answered_in_their_order(
    shared_gpu_machine: Machine, path: str
) -> None:
    with on_gpu(shared_gpu_machine, path) as worker:
        for number in range(20):
            start(worker, number, [number, 1])
        done = answers(worker, 20)
    assert [one.batch_id for one in done] == list(range(20))
    assert all(one.inputs_free for one in done)


def test_each_batch_has_its_own_values(shared_gpu_machine: Machine) -> None:
    generator = np.random.default_rng(0)
    arrays = [generator.random((2, 30_000), np.float32) for _ in range(12)]
    with on_gpu(shared_gpu_machine, "started") as worker:
        for number, array in enumerate(arrays):
            worker.start([worker.in_arena("x", "FP32", array.shape, array.tobytes())], (2,), number)
        for array, done in zip(arrays, answers(worker, len(arrays)), strict=True):
            assert np.array_equal(output(worker, done), array * 2)


def test_a_free_slot_is_told_early_once_for_each_batch_that_others_wait_behind(
    shared_gpu_machine: Machine,
) -> None:
    with on_gpu(shared_gpu_machine, "waited_for") as worker:
        tensor = worker.in_arena("x", "FP32", (1, WIDE), bytes(4 * WIDE))
        for number in range(4):
            worker.start([tensor], batch_id=number)
        said: list[int | tuple[int, ...]] = []
        while 3 not in said:
            message = worker.hear(worker.link)
            assert isinstance(message, wire.Computed | wire.Done), message
            said.append(message.batch_id if isinstance(message, wire.Done) else message.batch_ids)
    assert [one for one in said if isinstance(one, int)] == [0, 1, 2, 3]
    computed = [one for one in said if isinstance(one, tuple)]
    assert 1 <= len(set(computed)) == len(computed) <= 3
    for (number,) in computed:  # before it is answered, and after the one before was
        assert said[said.index((number,)) + 1 :].count(number) == 1
        assert number == 0 or number - 1 in said[: said.index((number,))]


def test_nothing_is_told_early_of_one_batch_at_a_time(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "waited_for") as worker:
        tensor = worker.in_arena("x", "FP32", (1, WIDE), bytes(4 * WIDE))
        for number in range(3):
            assert isinstance(worker.run([tensor], batch_id=number), wire.Done)


@pytest.mark.thorough
def test_the_times_are_those_of_each_batch_however_much_they_overlap(
    stand_in: GpuMachine, tmp_path: Path
) -> None:
    """All are measured while a timeline is written, else one of many."""
    array = np.zeros((1, 50_000), np.float32)
    with on_gpu(stand_in, "started", {"GPUSERVE_CUDA_TIMELINE": str(tmp_path / "lines")}) as worker:
        tensor = worker.in_arena("x", "FP32", array.shape, array.tobytes())
        worker.run([tensor])
        stand_in.change(kernel_s=0.04, copy_bytes_per_s=array.nbytes / 0.02, launch_delay_s=0.0)
        began = time.perf_counter()
        for number in range(2, 10):
            worker.start([tensor], batch_id=number)
        done = answers(worker, 8)
        took_s = time.perf_counter() - began
    total_s = sum(one.compute_input_ns + one.compute_infer_ns + one.compute_output_ns for one in done) / 1e9
    assert took_s < 0.8 * total_s  # they did overlap
    # The middle one: on a machine with other work some batch or other is held up.
    phases = ("compute_input_ns", "compute_infer_ns", "compute_output_ns")
    middle = [statistics.median(getattr(one, phase) for one in done) / 1e9 for phase in phases]
    assert middle == [pytest.approx(expected, abs=0.018) for expected in (0.02, 0.04, 0.02)]


def test_when_another_front_takes_over_what_waited_is_dropped(gpu_machine: Machine) -> None:
    with on_gpu(gpu_machine, "waited_for") as worker:
        gpu_machine.slow(kernel_s=0.1)
        for number in range(4):
            start(worker, number, [1])
        worker.new_front(2)
        gpu_machine.slow(kernel_s=0.0)
        done = worker.run([floats("x", [3])], batch_id=1)
        assert output(worker, done).tolist() == [[6]]


def test_the_end_comes_when_the_batches_that_were_taken_are_answered(stand_in: GpuMachine) -> None:
    with on_gpu(stand_in, "waited_for") as worker:
        stand_in.change(kernel_s=0.05)
        for number in range(3):
            start(worker, number, [number])
        first = answers(worker, 1)
        worker.boot.send(wire.Stop())
        rest = []
        while (message := worker.hear(worker.link)) is not None:
            rest.append(message)
        assert worker.exit_status() == lifecycle.EXIT_STOPPED
    done = [one.batch_id for one in first + rest if isinstance(one, wire.Done)]
    assert done == list(range(len(done)))
    assert len(done) >= 2


def test_a_callable_that_asks_another_model_while_batches_come(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "asks") as worker:
        for number in range(6):
            start(worker, number, [number])
        ended: list[int] = []
        while len(ended) < 6:
            message = worker.hear(worker.link)
            if isinstance(message, wire.Call):
                (tensor,) = wire.tensors(message.inputs)
                answer = wire.WireTensor("y", "FP32", tensor.shape, worker.read(tensor.payload))
                worker.link.send(wire.Answer(message.call_id, 0, (answer,), {}, None, True))
            elif isinstance(message, wire.Done):
                assert output(worker, message).tolist() == [[message.batch_id]]
                ended.append(message.batch_id)
    assert ended == list(range(6))


def test_a_callable_that_ends_the_process_takes_no_finished_batch_with_it(
    shared_gpu_machine: Machine,
) -> None:
    with on_gpu(shared_gpu_machine, "exits") as worker:
        for number, value in enumerate([1.0, 2.0, POISON, 3.0]):
            start(worker, number, [value])
        done = answers(worker, 2)
        assert worker.exit_status() == lifecycle.EXIT_FAILED
    assert [one.batch_id for one in done] == [0, 1]


@pytest.mark.parametrize("path", ["Captures", "CapturesAndAwaits"])
def test_a_callable_that_captures_a_graph_while_batches_come(shared_gpu_machine: Machine, path: str) -> None:
    """What other threads do with the device meanwhile neither fails nor spoils the capture."""
    with on_gpu(shared_gpu_machine, path, concurrency=4) as worker:
        for number in range(8):
            tensor = worker.in_arena("x", "FP32", (1, 20_000), np.full(20_000, number, np.float32).tobytes())
            worker.start([tensor], batch_id=number)
        done = answers(worker, 8)
    assert all(isinstance(one, wire.Done) for one in done), done


def test_a_callable_that_makes_another_device_the_current_one(any_two_gpus: Machine) -> None:
    with on_gpu(any_two_gpus, "moves_away") as worker:
        for number in range(6):
            start(worker, number, [number])
        done = answers(worker, 6)
        assert [output(worker, one).tolist() for one in done] == [[[2.0 * number]] for number in range(6)]
