"""A worker process beyond its batches: memory that is kept, another front, stop and death."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from worker_process import TIMEOUT_S, WorkerProcess, floats, large, loaded, model, output

from gpuserve_worker.protocol import wire

#: A worker whose front is rank 0 of its instance.
RANK_1 = {"rank": 1, "ranks": 2, "read_only_inputs": True}

# ---- memory that outlives the call ----------------------------------------------------------


@pytest.mark.parametrize("path", ["keeps_input.py:slices", "keeps_input.py:until_other_thread"])
def test_kept_inputs_are_released_when_the_last_array_dies(path: str) -> None:
    with loaded(model(path)) as worker:
        for batch_id in (1, 2):
            assert not worker.run([large(worker)[1]], rows=[2], batch_id=batch_id).inputs_free
        _, last = large(worker, first=-1)
        worker.start([last], rows=[2], batch_id=3)
        heard = [worker.hear(worker.link) for _ in range(3)]
        released = {one.batch_ids for one in heard if isinstance(one, wire.Released)}
        assert released == {(1,), (2,)}
        (done,) = (one for one in heard if isinstance(one, wire.Done))
        assert (done.batch_id, done.inputs_free) == (3, True)


def test_the_input_before_is_released_while_the_next_is_kept() -> None:
    with loaded(model("keeps_input.py:last_only")) as worker:
        assert not worker.run([large(worker)[1]], rows=[2], batch_id=1).inputs_free
        worker.start([large(worker)[1]], rows=[2], batch_id=2)
        assert worker.hear(worker.link) == wire.Released((1,))
        assert not worker.answer().inputs_free


def test_a_kept_array_keeps_its_values_after_the_segment_is_dropped() -> None:
    with loaded(model("keeps_input.py:slices")) as worker:
        _, tensor = large(worker)
        assert not worker.run([tensor], rows=[2]).inputs_free
        worker.link.send(wire.DropSegment(tensor.payload[0]))
        worker.start([floats("x", [-1, 1])], batch_id=2)
        heard = [worker.hear(worker.link) for _ in range(2)]
        assert wire.Released((1,)) in heard


def test_inputs_may_be_written_to() -> None:
    with loaded(model("writes_input.py:doubled")) as worker:
        array, tensor = large(worker)
        np.testing.assert_array_equal(output(worker, worker.run([tensor], rows=[2])), array * 2)
        assert output(worker, worker.run([floats("x", [1, 2])])).tolist() == [[2, 4]]


def test_read_only_inputs_may_not_and_the_failure_names_the_option() -> None:
    with loaded(model("writes_input.py:doubled", read_only_inputs=True)) as worker:
        array, tensor = large(worker)
        for given, rows in ((tensor, [2]), (floats("x", [1, 2]), [1])):
            failed = worker.run([given], rows)
            assert "read-only" in failed.failure[1]
            assert "read_only_inputs" in failed.failure[1]
        assert worker.arena_bytes(tensor) == array.tobytes()


# ---- another front --------------------------------------------------------------------------


def test_another_front_takes_over_and_the_model_stays() -> None:
    with loaded(model("keeps_input.py:slices")) as worker:
        assert not worker.run([large(worker)[1]], rows=[2]).inputs_free
        before = worker.descriptors()
        worker.new_front(epoch=2)
        # What the callable kept of the first front's memory dies now; it is nothing to the second.
        done = worker.run([large(worker, first=-1)[1]], rows=[2])
        assert done.inputs_free
        assert output(worker, done)[0, 0] == -2
        assert worker.descriptors() <= before


def test_outputs_the_first_front_never_freed_are_given_up() -> None:
    with loaded(model("echo.py:batched")) as worker:
        before = worker.descriptors()
        for epoch in range(2, 6):
            worker.run([large(worker)[1]], rows=[2])
            worker.new_front(epoch)
        assert worker.descriptors() == before


# ---- life and death -------------------------------------------------------------------------


def test_stop_between_batches() -> None:
    with loaded(model("echo.py:raw")) as worker:
        worker.boot.send(wire.Stop())
        assert worker.exit_status() == 0


def test_stop_finishes_the_batch_at_hand(tmp_path: Path) -> None:
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    with loaded(model("blocks.py:Gate", kwargs={"fifo": str(fifo)})) as worker:
        worker.start([floats("x", [1])])
        worker.start([floats("x", [2])], batch_id=2)
        with open(fifo, "wb"):  # opens when the callable has opened it too: the batch is running
            worker.boot.send(wire.Stop())
            while not worker.is_deaf():
                os.sched_yield()
        assert output(worker, worker.answer()).tolist() == [[1]]
        assert worker.hear(worker.link) is None
        assert worker.exit_status() == 0


def test_stop_while_loading(tmp_path: Path) -> None:
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    with (
        WorkerProcess(model("blocks.py:load_slowly", kwargs={"fifo": str(fifo)})) as worker,
        open(fifo, "wb"),  # opens when the factory has opened it too
    ):
        worker.boot.send(wire.Stop())
        assert worker.exit_status() == 0


@pytest.mark.parametrize("when", ["idle", "running"])
def test_a_rank_leaves_it_to_the_supervisor_to_say_why_rank_0_died(tmp_path: Path, when: str) -> None:
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    with loaded(model("blocks.py:Gate", kwargs={"fifo": str(fifo)}, **RANK_1)) as worker:
        if when == "running":
            worker.start([floats("x", [1])])
            with open(fifo, "wb"):  # opens when the callable has opened it too
                worker.link_socket.close()
        else:
            worker.link_socket.close()
        assert worker.hear(worker.boot) == wire.Ending("rank 0 ended")
        assert worker.exit_status() == 1


def test_a_rank_ends_when_rank_0_stops_it() -> None:
    with loaded(model("echo.py:raw", **RANK_1)) as worker:
        worker.link.send(wire.Stop())
        worker.link_socket.close()
        assert worker.exit_status() == 0


@pytest.mark.parametrize("when", ["idle", "running", "loading"])
def test_without_a_supervisor_it_ends_at_once(tmp_path: Path, when: str) -> None:
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    path = "blocks.py:load_slowly" if when == "loading" else "blocks.py:Gate"
    with WorkerProcess(model(path, kwargs={"fifo": str(fifo)})) as worker:
        if when == "idle":
            worker.load()
            worker.boot.close()
            assert worker.exit_status() == 1
            return
        if when == "running":
            worker.load().start([floats("x", [1])])
        with open(fifo, "wb"):
            worker.boot.close()
            assert worker.exit_status() == 1


def test_without_a_front_it_ends_by_itself() -> None:
    with loaded(model("echo.py:raw")) as worker:
        worker.link.close()
        assert worker.exit_status() == 0


def test_ctrl_c_is_not_for_it() -> None:
    with loaded(model("echo.py:raw")) as worker:
        worker.process.send_signal(signal.SIGINT)
        assert output(worker, worker.run([floats("x", [1])])).tolist() == [[1]]


def test_user_code_may_change_all_of_its_process() -> None:
    with loaded(model("prints.py:rude"), stdout=subprocess.DEVNULL) as worker:
        for batch_id in (1, 2):
            done = worker.run([large(worker)[1]], rows=[2], batch_id=batch_id)
            assert output(worker, done)[0, 0] == 1
        worker.boot.send(wire.Stop())
        assert worker.exit_status() == 0


def test_what_user_code_prints_comes_line_by_line() -> None:
    with loaded(model("prints.py:noisy"), stdout=subprocess.PIPE) as worker:
        worker.run([floats("x", [1])])
        assert worker.process.stdout is not None
        assert worker.process.stdout.readline() == b"a line of the user's\n"


@pytest.mark.parametrize("path", ["forks.py:forked", "forks.py:executed"])
def test_a_child_of_user_code_inherits_neither_socket(path: str) -> None:
    with loaded(model(path)) as worker:
        assert output(worker, worker.run([floats("x", [9])])).tolist() == [[0]]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("forks.py:returns", 1),
        ("forks.py:returns_later", 1),
        ("forks.py:raises", 1),
        ("forks.py:exits", 7),
    ],
)
def test_a_forked_child_that_leaves_the_callable_ends_with_one_line(path: str, status: int) -> None:
    with loaded(model(path), stderr=subprocess.PIPE) as worker:
        for batch_id in (1, 2):
            assert output(worker, worker.run([floats("x", [9])], batch_id=batch_id)).tolist() == [[status]]
        worker.boot.send(wire.Stop())
        assert worker.exit_status() == 0
        assert worker.process.stderr is not None
        lines = worker.process.stderr.read().splitlines()
    expected = b"ended a forked process that left the inference callable: expected os._exit() in it"
    assert lines == [expected] * (2 if status == 1 else 0)


def test_the_kernel_knows_its_name() -> None:
    with loaded(model("echo.py:raw", model="m")) as worker:
        assert Path(f"/proc/{worker.process.pid}/comm").read_text() == "gs:m/cpu#0\n"


def test_it_dies_with_its_parent() -> None:
    """The parent is killed while something else holds the sockets open."""
    with loaded(model("echo.py:raw"), under_a_parent=True) as worker:
        pid = worker.worker_pid()
        pidfd = os.pidfd_open(pid)
        try:
            worker.process.kill()
            assert select.select([pidfd], [], [], TIMEOUT_S)[0]
        finally:
            os.close(pidfd)


def test_it_is_small() -> None:
    with loaded(model("echo.py:batched")) as worker:
        worker.run([floats("x", [1])])
        status = Path(f"/proc/{worker.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s*(\d+) kB", status)
        assert found is not None
        assert int(found[1]) < 45_000
