"""A worker whose callable asks other models. The test is its front, which answers, or does not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_process import LARGE, TIMEOUT_S, WorkerProcess, floats, loaded, model, output

from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import decode_bytes

TELLS = {"outputs": (("y", "BYTES", (-1,), False),)}
BOTH = pytest.mark.parametrize("path", ["asking_hard.py:tells", "asking_hard.py:tells_async"])


def asked(worker: WorkerProcess) -> wire.Call:
    """The next message, which is a question."""
    call = worker.hear(worker.link)
    assert isinstance(call, wire.Call), call
    return call


def answer(worker: WorkerProcess, call: wire.Call, *values: float) -> None:
    worker.link.send(wire.Answer(call.call_id, 0, (floats("y", values),), {}, None, True))


def told(worker: WorkerProcess, done: Any) -> str:
    """The one string that a model answered."""
    assert isinstance(done, wire.Done), done
    assert done.outputs is not None
    return decode_bytes(worker.read(done.outputs[0][3]), 1)[0].decode()


# ---- questions and answers -------------------------------------------------------------------


def test_large_inputs_lie_in_its_arena_until_they_are_freed() -> None:
    with loaded(model("asking_hard.py:tells", **TELLS)) as worker:
        x = np.arange(LARGE // 4, dtype=np.float32).reshape(1, -1)
        for batch_id in range(1, 50):
            worker.start([worker.in_arena("x", "FP32", x.shape, x.tobytes())], batch_id=batch_id)
            call = asked(worker)
            (tensor,) = wire.tensors(call.inputs)
            assert isinstance(tensor.payload, wire.Ref)
            assert worker.read(tensor.payload) == x.tobytes()
            worker.link.send(wire.Free((tensor.payload[:2],)))
            answer(worker, call, 1)
            assert told(worker, worker.answer()) == "[1.0]"
            assert tensor.payload.segment == 0  # the same memory each time


def test_who_gives_up_in_an_event_loop_of_its_own_goes_on_with_the_echo() -> None:
    with loaded(model("asking_hard.py:gives_up")) as worker:
        for batch_id in range(1, 4):
            worker.start([floats("x", [1])], batch_id=batch_id)
            call = asked(worker)
            assert worker.hear(worker.link) == wire.CancelCall(call.call_id)
            worker.link.send(wire.Answer(call.call_id, 0, None, {}, None, True))
            assert output(worker, worker.answer()).tolist() == [[0]]


@pytest.mark.parametrize(
    ("path", "waits"),
    [
        ("asking_hard.py:tells", True),
        ("asking.py:asks_blocking", True),
        ("asking_hard.py:tells_async", False),
        ("asking_hard.py:asks_in_a_thread", False),
    ],
)
def test_the_front_is_told_whether_the_worker_does_nothing_else_meanwhile(path: str, waits: bool) -> None:
    with loaded(model(path, **TELLS)) as worker:
        worker.start([floats("x", [1])])
        assert asked(worker).waits is waits


def test_nobody_is_asked_before_a_server_calls() -> None:
    with WorkerProcess(model("asking_hard.py:AsksWhileItLoads")) as worker:
        text = worker.load_failure().text
        assert "no other model can be asked before a server calls this callable" in text


def test_a_warm_up_that_asks_is_told_so_and_the_model_is_served() -> None:
    warmup = (("w", 1, 1, (("x", "FP32", (1,), "zero", ""),)),)
    with WorkerProcess(model("asking.py:asks", warmup=warmup)) as worker:
        heard = []
        while not isinstance(message := worker.hear(worker.boot), wire.Ready):
            heard.append(message)
        (log,) = (one for one in heard if isinstance(one, wire.Log))
        assert "no other model can be asked before a server calls this callable" in log.text
        worker.attach(1)
        worker.start([floats("x", [1])])
        answer(worker, asked(worker), 4)
        assert output(worker, worker.answer()).tolist() == [[5]]


@BOTH
def test_an_answer_that_breaks_the_protocol_ends_the_worker_and_not_the_call(path: str) -> None:
    with loaded(model(path, **TELLS), stderr=subprocess.PIPE) as worker:
        worker.start([floats("x", [1])])
        nowhere = wire.WireTensor("y", "FP32", (1, 1), wire.Loan(99, 0, 4))
        worker.link.send(wire.Answer(asked(worker).call_id, 1, (nowhere,), {}, None, True))
        assert worker.exit_status() == 1
        assert "no 4 bytes at 0 of segment 99" in worker.error_text()


# ---- another front ---------------------------------------------------------------------------


@BOTH
def test_a_front_that_is_replaced_fails_the_call_and_hears_nothing_of_its_batch(path: str) -> None:
    with loaded(model(path, **TELLS)) as worker:
        for epoch in range(2, 5):
            worker.start([floats("x", [1])], batch_id=1)
            asked(worker)
            worker.new_front(epoch)
            worker.start([floats("x", [2])], batch_id=7)
            call = asked(worker)  # and no answer to the batch of the front before
            answer(worker, call, 5)
            done = worker.answer()
            assert (done.batch_id, told(worker, done)) == (7, "[5.0]")


def test_a_batch_that_runs_while_another_thread_hears_of_a_new_front_is_answered_to_nobody(
    tmp_path: Path,
) -> None:
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    with loaded(model("asking_hard.py:Gated", kwargs={"fifo": str(fifo)})) as worker:
        before = 0
        worker.start([floats("x", [0])], batch_id=1)
        assert {type(worker.hear(worker.link)) for _ in range(2)} == {wire.Call, wire.Done}
        for epoch in range(2, 6):
            # Its thread waits for an answer, and receives for all.
            worker.start([floats("x", [1])], batch_id=1)
            with open(fifo, "wb"):  # the callable runs
                worker.new_front(epoch)
                worker.start([worker.in_arena("x", "FP32", (1, LARGE), bytes(4 * LARGE))], batch_id=2)
                assert asked(worker).call_id > 0  # the thread asks the new front
            done = worker.answer()
            assert (done.batch_id, output(worker, done).shape) == (2, (1, LARGE))
            before = before or worker.descriptors()
        assert worker.descriptors() == before
        assert worker.process.poll() is None


def test_a_batch_that_another_thread_received_is_not_left_lying(tmp_path: Path) -> None:
    """The thread waits for an answer that never comes, so nothing but the batches themselves arrives."""
    with loaded(model("asking_hard.py:Gated", kwargs={"fifo": str(tmp_path)})) as worker:
        worker.start([floats("x", [0])], batch_id=0)
        assert {type(worker.hear(worker.link)) for _ in range(2)} == {wire.Call, wire.Done}
        sent = 0
        for answered in range(1500):
            while sent < answered + 2:
                worker.start([floats("x", [0])], batch_id=sent)
                sent += 1
            assert worker.answer().batch_id == answered


def test_a_worker_that_is_told_to_stop_leaves_no_thread_waiting(tmp_path: Path) -> None:
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    with loaded(model("asking_hard.py:Gated", kwargs={"fifo": str(fifo)})) as worker:
        worker.start([floats("x", [0])])
        heard = {type(one): one for one in (worker.hear(worker.link), worker.hear(worker.link))}
        assert output(worker, heard[wire.Done]).tolist() == [[0]]
        assert wire.Call in heard
        worker.boot.send(wire.Stop())
        assert worker.process.wait(TIMEOUT_S) == 0
