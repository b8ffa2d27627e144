"""A device that runs out of memory, or cannot be used any more: who is told what, and who goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_machine import GPU_0, GpuMachine, RealMachine
from worker_process import WorkerProcess, floats, loaded, model, output, values

from gpuserve_worker.execution import lifecycle
from gpuserve_worker.protocol import wire

pytestmark = pytest.mark.thorough

Machine = GpuMachine | RealMachine

X = ("x", "FP32", (-1,), False, "gpu")
POISON = 13.0
LOST = "the device of instance 'cuda:0#0' of model 'tested' failed while it ran this request: "


@contextmanager
def on_gpu(machine: Machine, path: str, **changes: Any) -> Iterator[WorkerProcess]:
    given: dict[str, Any] = {"device": "cuda:0", "instance": "cuda:0#0", "array": "cupy", "inputs": (X,)}
    with loaded(model(f"pipelined.py:{path}", **(given | changes)), environ=machine.environ) as worker:
        yield worker


def start(worker: WorkerProcess, batch_id: int, *values: float) -> None:
    worker.start([floats("x", *[[value] for value in values])], [1] * len(values), batch_id)


def run(worker: WorkerProcess, batch_id: int, *values: float) -> Any:
    start(worker, batch_id, *values)
    return last_word(worker)


def last_word(worker: WorkerProcess) -> Any:
    """The next answer, after whatever else is said."""
    while not isinstance(message := worker.hear(worker.link), wire.Done | wire.Failed):
        assert message is not None
    return message


def failure(failed: Any) -> wire.WireFailure:
    """What a batch failed with as a whole."""
    assert isinstance(failed, wire.Failed), failed
    return wire.WireFailure(*failed.failure)


def outcomes(worker: WorkerProcess, done: Any) -> list[Any]:
    """The value in the answer to each request, or the code that it failed with."""
    assert isinstance(done, wire.Done), done
    if done.outputs is not None:
        return list(output(worker, done)[:, 0])
    found: list[Any] = []
    for one in wire.responses(done.responses or ()):
        assert one is not None
        found.append(one.code if isinstance(one, wire.WireFailure) else float(values(worker, one[0])[0, 0]))
    return found


# ---- out of memory --------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["Hungry", "hungry_async"])
def test_a_batch_that_does_not_fit_is_run_in_two_halves(shared_gpu_machine: Machine, path: str) -> None:
    with on_gpu(shared_gpu_machine, path) as worker:
        start(worker, 1, *range(8))
        assert worker.hear(worker.link) == wire.Split(1)
        assert outcomes(worker, last_word(worker)) == [number + 1 for number in range(8)]
        log = worker.log_record()
        assert "a batch of 8 rows of model 'tested': it is run in two halves" in log.text
        assert outcomes(worker, run(worker, 2, 1.0, 2.0)) == [2, 3]


@pytest.mark.parametrize("path", ["Hungry", "hungry_async"])
def test_a_request_that_does_not_fit_fails_alone_and_the_next_one_works(
    shared_gpu_machine: Machine, path: str
) -> None:
    with on_gpu(shared_gpu_machine, path) as worker:
        failed = worker.run([floats("x", *[[1.0]] * 6)], (6,))
        assert failed.failure == wire.WireFailure(
            "RESOURCE_EXHAUSTED", "The memory of the device does not suffice for 6 rows of model 'tested'"
        )
        assert failed.inputs_free
        assert outcomes(worker, run(worker, 2, 1.0)) == [2]


@pytest.mark.parametrize("path", ["Hoards", "HoardsAndAwaits"])
def test_inputs_for_which_a_library_keeps_the_memory_are_taken_in_again(
    stand_in: GpuMachine, path: str
) -> None:
    with on_gpu(stand_in, path) as worker:
        for width in (10, 2 << 20):
            array = np.full((1, width), width, np.float32)
            worker.start([worker.in_arena("x", "FP32", array.shape, array.tobytes())], batch_id=width)
            assert outcomes(worker, last_word(worker)) == [width]


def test_inputs_that_make_room_for_themselves_disturb_no_answer_on_its_way(tmp_path: Path) -> None:
    """The second batch's do not fit beside the first's, which nobody reads any more by then."""
    mib = 1 << 20
    gpu = replace(GPU_0, memory=GPU_0.context_memory + 36 * mib)
    with on_gpu(GpuMachine(tmp_path / "gpus", [gpu], copy_bytes_per_s=100e6, wake_s=0.05), "heads") as worker:
        for number, nbytes in enumerate([12 * mib, 24 * mib]):
            array = np.full((1, nbytes // 4), number, np.float32)
            worker.start([worker.in_arena("x", "FP32", array.shape, array.tobytes())], batch_id=number)
        done = [last_word(worker) for _ in range(2)]
        assert [set(output(worker, one)[0]) for one in done] == [{0.0}, {2.0}]


def test_a_half_that_fails_again_fails_and_the_other_is_answered(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "greedy") as worker:
        done = run(worker, 1, 1, 2, 3, POISON)
        assert outcomes(worker, done) == [2, 4, "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]
        assert outcomes(worker, run(worker, 2, 5)) == [10]


def test_where_both_halves_fail_the_batch_does(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "greedy") as worker:
        assert failure(run(worker, 1, POISON, POISON)).code == "RESOURCE_EXHAUSTED"
        assert outcomes(worker, run(worker, 2, 5)) == [10]


def test_it_is_cut_by_rows_and_no_request_is(shared_gpu_machine: Machine, tmp_path: Path) -> None:
    attempts = tmp_path / "attempts"
    with on_gpu(shared_gpu_machine, "Hungry", kwargs={"attempts": str(attempts)}) as worker:
        worker.start([floats("x", *[[number] for number in range(7)])], (1, 2, 4), 1)
        assert isinstance(last_word(worker), wire.Done)
    assert attempts.read_text().split() == ["7", "3", "4"]


def test_other_batches_are_not_harmed_by_one_that_does_not_fit(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "Hungry") as worker:
        for number in range(6):
            start(worker, number, *[float(number)] * (8 if number == 2 else 1))
        done = [last_word(worker) for _ in range(6)]
        assert [one.batch_id for one in done] == list(range(6))
        assert all(set(outcomes(worker, one)) == {one.batch_id + 1} for one in done)


@pytest.mark.parametrize(("read_only", "code"), [(True, ""), (False, "RESOURCE_EXHAUSTED")])
def test_large_inputs_on_the_host_are_run_again_only_where_nobody_writes_to_them(
    shared_gpu_machine: Machine, read_only: bool, code: str
) -> None:
    changes: dict[str, Any] = {"array": "numpy", "inputs": (("x", "FP32", (-1,)),)}
    with on_gpu(shared_gpu_machine, "HungryOnHost", read_only_inputs=read_only, **changes) as worker:
        array = np.ones((8, 2000), np.float32)
        worker.start([worker.in_arena("x", "FP32", array.shape, array.tobytes())], [1] * 8, 1)
        done = last_word(worker)
    assert (failure(done).code if isinstance(done, wire.Failed) else "") == code


# ---- a device that is lost ------------------------------------------------------------------


@pytest.mark.parametrize("path", ["breaks", "breaks_later", "breaks_async"])
def test_the_batch_that_breaks_the_device_is_told_and_the_process_ends(
    shared_gpu_machine: Machine, path: str
) -> None:
    with on_gpu(shared_gpu_machine, path) as worker:
        assert outcomes(worker, run(worker, 1, 1.0)) == [2]
        code, text = failure(run(worker, 2, POISON))
        assert (code, text[: len(LOST)]) == ("INTERNAL", LOST)
        assert "illegal" in text
        assert "\n" not in text
        assert worker.exit_status() == lifecycle.EXIT_DEVICE
        texts = last_log(worker)
        assert any("can be used by this process no more, which ends: " in text for text in texts), texts


def last_log(worker: WorkerProcess) -> list[str]:
    """All that the worker has written into the log."""
    texts = []
    while (message := worker.hear(worker.boot)) is not None:
        if isinstance(message, wire.Log):
            texts.append(message.text)
    return texts


@pytest.mark.parametrize("path", ["breaks", "breaks_later"])
def test_no_other_batch_fails_with_it(shared_gpu_machine: Machine, path: str) -> None:
    with on_gpu(shared_gpu_machine, path) as worker:
        for number, value in enumerate([1.0, 2.0, POISON, 3.0, 4.0, 5.0]):
            start(worker, number, value)
        answers: list[Any] = []
        while (message := worker.hear(worker.link)) is not None:
            answers.append(message)
        assert worker.exit_status() == lifecycle.EXIT_DEVICE
    assert [one.batch_id for one in answers if isinstance(one, wire.Failed)] in ([2], [])
    assert {one.batch_id for one in answers if isinstance(one, wire.Done)} <= {0, 1}


def test_a_batch_is_not_blamed_for_the_one_behind_that_breaks_the_device_as_it_ends(
    stand_in: GpuMachine,
) -> None:
    """A thread that sleeps until a batch has computed wakes up when the next one has failed."""
    with on_gpu(stand_in, "breaks_later") as worker:
        assert outcomes(worker, run(worker, 1, 1.0)) == [2]
        stand_in.change(kernel_s=0.02, wake_s=0.1)
        for number, value in enumerate([1.0, 1.0, POISON, 3.0], 2):
            start(worker, number, value)
        answers: list[Any] = []
        while (message := worker.hear(worker.link)) is not None:
            answers.append(message)
    assert [one.batch_id for one in answers if isinstance(one, wire.Failed)] in ([4], [])


def test_a_client_of_mps_that_another_one_ends_blames_no_batch(stand_in: GpuMachine) -> None:
    stand_in.change(mps=True)
    with on_gpu(stand_in, "breaks") as other, on_gpu(stand_in, "breaks") as worker:
        assert outcomes(worker, run(worker, 1, 1.0)) == [2]
        assert failure(run(other, 1, POISON)).text.startswith(LOST)
        start(worker, 2, 3.0)
        assert worker.exit_status() == lifecycle.EXIT_DEVICE
        assert not isinstance(worker.hear(worker.link), wire.Done | wire.Failed)
    with on_gpu(stand_in, "breaks") as successor:
        assert outcomes(successor, run(successor, 2, 3.0)) == [6]


def test_a_device_that_stays_in_an_error_is_lost_whatever_the_error(stand_in: GpuMachine) -> None:
    with on_gpu(stand_in, "raises") as worker:
        assert failure(run(worker, 1, POISON)).text == "as the test wants"
        stand_in.change(failures={"deviceSynchronize": 46})
        assert failure(run(worker, 2, POISON)).text.startswith(LOST)
        assert worker.exit_status() == lifecycle.EXIT_DEVICE


def test_an_error_that_passes_is_the_callables_own(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "moves_away") as worker:
        failures = [failure(run(worker, number, 1.0)) for number in range(3)]
    assert [one.code for one in failures] == ["INTERNAL"] * 3
    assert "invalid device ordinal" in failures[0].text
