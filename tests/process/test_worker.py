"""A real worker process over its two sockets. The test is its supervisor and its front."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from models.stepped import WIDE_AT
from processes import finished
from worker_process import TIMEOUT_S, WorkerProcess, floats, large, loaded, model, output

from gpuserve_worker.protocol import wire

# ---- loading --------------------------------------------------------------------------------


def test_it_says_how_loading_goes() -> None:
    with WorkerProcess(model("loads.py:Scale", kwargs={"factor": 2.0})) as worker:
        heard = [worker.hear(worker.boot) for _ in range(3)]
        assert heard[:2] == [wire.Phase("importing"), wire.Phase("loading")]
        assert isinstance(heard[2], wire.Ready)
        assert 0 <= heard[2].load_s < TIMEOUT_S


@pytest.mark.parametrize(
    ("path", "text", "traceback"),
    [
        ("loads.py:make_failing", "make_failing raised RuntimeError: no weights for cpu", "loads.py"),
        ("broken_import.py:x", "importing broken_import.py raised ModuleNotFoundError", "broken_import.py"),
        ("loads.py:Scael", "loads.py has no attribute 'Scael'; did you mean", ""),
        ("loads.py:generator", "the model is not decoupled", ""),
    ],
)
def test_what_cannot_be_loaded_is_told_and_the_process_ends(path: str, text: str, traceback: str) -> None:
    with WorkerProcess(model(path)) as worker:
        failed = worker.load_failure()
        assert text in failed.text
        assert traceback in failed.traceback
        assert worker.exit_status() == 1


def test_another_protocol_is_refused() -> None:
    with WorkerProcess(model("echo.py:raw", protocol=99)) as worker:
        text = f"the supervisor speaks protocol 99, this worker protocol {wire.PROTOCOL}"
        assert worker.load_failure().text == text


def test_it_is_not_started_by_hand() -> None:
    done = finished([sys.executable, "-m", "gpuserve_worker"])
    assert done.returncode == 2
    assert "started by the supervisor" in done.stderr


# ---- batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["echo.py:batched", "echo.py:raw", "echo.py:listed", "echo.py:Echo"])
def test_small_tensors_travel_in_the_message(path: str) -> None:
    outputs = (("x" if path.endswith("listed") else "y", "FP32", (-1,), False),)
    with loaded(model(path, outputs=outputs)) as worker:
        done = worker.run([floats("x", [1, 2], [3, 4], [5, 6])], rows=[1, 2])
        assert output(worker, done).tolist() == [[1, 2], [3, 4], [5, 6]]
        assert done.inputs_free
        assert done.batch_id == 1
        assert min(done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns) >= 0


def test_large_tensors_travel_through_the_arenas() -> None:
    with loaded(model("echo.py:batched")) as worker:
        array, tensor = large(worker)
        done = worker.run([tensor], rows=[1, 1])
        np.testing.assert_array_equal(output(worker, done), array)
        assert done.inputs_free
        assert not isinstance(done.outputs[0][3], bytes)


def test_output_blocks_are_used_again_once_they_are_freed() -> None:
    with loaded(model("echo.py:batched")) as worker:
        places = []
        for batch_id in range(3):
            done = worker.run([large(worker)[1]], rows=[2], batch_id=batch_id)
            segment, offset, _ = done.outputs[0][3]
            places.append((segment, offset))
            if batch_id == 1:
                worker.link.send(wire.Free(((segment, offset),)))
        assert places[1] != places[0]
        assert places[2] == places[1]


def test_a_batch_that_is_larger_than_a_datagram() -> None:
    with loaded(model("echo.py:raw")) as worker:
        before = worker.descriptors()
        for _ in range(3):
            requests = tuple(wire.WireRequest(1, {"text": "x" * 20_000}, ()) for _ in range(32))
            rows = floats("x", *([one] for one in range(32)))
            worker.link.send(wire.Run(1, requests, (rows,)))
            assert output(worker, worker.answer()).ravel().tolist() == list(range(32))
        assert worker.descriptors() == before


# ---- failures -------------------------------------------------------------------------------


def test_a_failure_with_text_that_is_not_unicode_is_told_and_the_worker_lives() -> None:
    with loaded(model("raises.py:half_a_pair")) as worker:
        for batch_id in (1, 2):
            failed = worker.run([floats("x", [1])], batch_id=batch_id)
            assert wire.WireFailure(*failed.failure).text == "there is no caf\\udce9"
        assert "there is no caf\\udce9" in worker.log_record().text


def test_an_answer_that_no_machine_could_hold() -> None:
    with loaded(model("large_outputs.py:boundless")) as worker:
        failed = worker.run([floats("x", [1])])
        assert failed.failure[1] == "There is no memory for the outputs of model 'tested'"
        assert "over its limit" in worker.log_record().text


def test_a_callable_that_ends_the_process() -> None:
    with loaded(model("exits.py:now")) as worker:
        worker.start([floats("x", [1])])
        assert worker.hear(worker.link) is None
        assert worker.exit_status() == 7


@pytest.mark.parametrize(
    "message",
    [wire.Free(((3, 0),)), wire.DropSegment(3), wire.Released((1,))],
    ids=lambda one: type(one).__name__,
)
def test_a_front_that_breaks_the_protocol_ends_the_worker(message: wire.Message) -> None:
    with loaded(model("echo.py:raw"), stderr=subprocess.PIPE) as worker:
        worker.link.send(message)
        assert worker.hear(worker.link) is None
        assert worker.exit_status() == 1
        assert "Traceback" in worker.error_text()


# ---- the step loop -------------------------------------------------------------------------------


VALUE = ("INT32", (-1,), False)


def buffered(**kwargs: Any) -> wire.Init:
    return model(
        "stepped.py:Buffered",
        decoupled=True,
        max_active=64,
        max_batch_size=0,
        inputs=(("n", "INT32", (1,), False),),
        outputs=(("value", *VALUE),),
        kwargs=kwargs,
    )


class Front:
    """The values of each batch in the order of their arrival, and its end. Credit is given as it is used."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self.values: dict[int, list[int]] = defaultdict(list)
        self.failures: dict[int, wire.WireFailure] = {}
        self.ends: dict[int, wire.Message] = {}

    def start(self, batch_id: int, wanted: int) -> None:
        tensor = wire.WireTensor("n", "INT32", (1,), np.array([wanted], np.int32).tobytes())
        self._worker.link.send(wire.Run(batch_id, (1,), (tensor,)))

    def hear(self) -> None:
        message = self._worker.hear(self._worker.link)
        if isinstance(message, wire.Stepped) and message.batch_ids:
            for batch_id, value in zip(message.batch_ids, _values(message), strict=True):
                assert batch_id not in self.ends
                self.values[batch_id].append(value)
            self._worker.link.send(wire.Credit(tuple([(one, 1) for one in message.batch_ids])))
        elif isinstance(message, wire.Yield):
            ((failure,),) = (wire.responses(message.responses or ()),)
            assert isinstance(failure, wire.WireFailure)
            self.failures[message.batch_id] = failure
        elif isinstance(message, wire.Done | wire.Failed):
            self.ends[message.batch_id] = message


def _values(message: wire.Stepped) -> list[int]:
    if message.outputs is not None:
        return np.frombuffer(wire.tensors(message.outputs)[0].payload, np.int32).tolist()  # type: ignore[arg-type]
    found: list[int] = []
    for one in wire.responses(message.responses or ()):
        assert isinstance(one, tuple)
        found += np.frombuffer(one[0].payload, np.int32).tolist()  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(("busy_s", "step_s"), [(0.0, 0.005), (0.002, 0.0), (0.0, 0.0)])
def test_an_array_that_the_next_step_overwrites_is_sent_as_it_was(busy_s: float, step_s: float) -> None:
    """A thread sends the responses while the next step runs, unless the step keeps the interpreter's lock."""
    lengths = {1: 60, 2: 7, 3: 31, 4: 59}
    with loaded(buffered(busy_s=busy_s, step_s=step_s)) as worker:
        front = Front(worker)
        for batch_id, wanted in lengths.items():
            front.start(batch_id, wanted)
        while len(front.ends) < len(lengths):
            front.hear()
    assert {one: list(range(1, n + 1)) for one, n in lengths.items()} == dict(front.values)
    assert all(isinstance(one, wire.Done) for one in front.ends.values())


def test_a_wrong_response_fails_its_request_alone() -> None:
    with loaded(buffered()) as worker:
        front = Front(worker)
        for batch_id, wanted in ((1, WIDE_AT), (2, 20)):
            front.start(batch_id, wanted)
        while len(front.ends) < 2:
            front.hear()
    assert front.values[2] == list(range(1, 21))
    assert front.values[1][:2] == [1, 2]
    assert "FP64" in front.failures[1].text or "float64" in front.failures[1].text
    assert isinstance(front.ends[1], wire.Failed)
