"""A real worker process over its two sockets. The test is its supervisor and its front."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from worker_process import LARGE, TIMEOUT_S, WorkerProcess, floats, large, loaded, model, output, values

from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import decode_bytes, encode_bytes

BYTES_MODEL = {"inputs": (("x", "BYTES", (-1,), False),), "outputs": (("y", "BYTES", (-1,), False),)}


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
        assert worker.load_failure().text == "the supervisor speaks protocol 99, this worker protocol 11"


def test_it_is_not_started_by_hand() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuserve_worker"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
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


def test_a_model_that_does_not_batch() -> None:
    scalar = ("x", "FP32", (), b"\x00\x00\x80?")
    declared = {"inputs": (("x", "FP32", (), False),), "outputs": (("x", "FP32", (), False),)}
    with loaded(model("echo.py:single", max_batch_size=0, **declared)) as worker:
        done = worker.run([wire.WireTensor(*scalar)])
        assert done.outputs == (scalar,)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=str)
def test_tensors_without_elements(shape: tuple[int, ...]) -> None:
    with loaded(model("echo.py:batched")) as worker:
        done = worker.run([wire.WireTensor("x", "FP32", shape, b"")], rows=[shape[0]])
        assert done.outputs == (("y", "FP32", shape, b""),)


@pytest.mark.parametrize("datatype", ["BF16", "FP16", "BOOL", "UINT64", "INT8"])
def test_datatypes_come_back_bit_for_bit(datatype: str) -> None:
    nbytes = {"BF16": 2, "FP16": 2, "UINT64": 8}.get(datatype, 1)
    payload = b"\x01\x00" * (2 * nbytes)
    declared = {name: ((one, datatype, (-1,), False),) for name, one in (("inputs", "x"), ("outputs", "y"))}
    with loaded(model("echo.py:batched", **declared)) as worker:
        done = worker.run([wire.WireTensor("x", datatype, (1, 4), payload)])
        assert done.outputs == (("y", datatype, (1, 4), payload),)


@pytest.mark.parametrize("size", [2, LARGE], ids=["inline", "arena"])
def test_byte_strings(size: int) -> None:
    elements = [b"ab" + b"\x00" * size, "é".encode(), b""]
    with loaded(model("byte_strings.py:reverse", **BYTES_MODEL)) as worker:
        data = encode_bytes(elements)
        if size > 2:
            tensor = worker.in_arena("x", "BYTES", (3, 1), data)
        else:
            tensor = wire.WireTensor("x", "BYTES", (3, 1), data)
        done = worker.run([tensor], rows=[1, 2])
        ((_, _, shape, payload),) = done.outputs
        assert shape == (3, 1)
        assert decode_bytes(worker.read(payload), 3) == [one[::-1] for one in elements]
        assert done.inputs_free


def test_outputs_of_any_layout() -> None:
    with loaded(model("large_outputs.py:transposed")) as worker:
        array, tensor = large(worker)
        done = worker.run([tensor], rows=[2])
        np.testing.assert_array_equal(output(worker, done), array[:, ::-1])


def test_requests_may_be_answered_in_different_shapes() -> None:
    with loaded(model("large_outputs.py:uneven")) as worker:
        done = worker.run([floats("x", [2], [5000], [1])], rows=[1, 1, 1])
        shapes = [tensors[0][2] for tensors in done.responses]
        assert shapes == [(1, 2), (1, 5000), (1, 1)]
        assert values(worker, done.responses[1][0]).tolist() == [[5000] * 5000]


def test_a_batch_that_is_larger_than_a_datagram() -> None:
    with loaded(model("echo.py:raw")) as worker:
        before = worker.descriptors()
        for _ in range(3):
            requests = tuple(wire.WireRequest(1, {"text": "x" * 20_000}, ()) for _ in range(32))
            rows = floats("x", *([one] for one in range(32)))
            worker.link.send(wire.Run(1, requests, (rows,)))
            assert output(worker, worker.answer()).ravel().tolist() == list(range(32))
        assert worker.descriptors() == before


def test_only_what_was_asked_for_is_sent() -> None:
    declared = (("y", "FP32", (-1,), False), ("z", "FP32", (-1,), False))
    two = [floats("x", [1]), floats("w", [2])]
    with loaded(model("echo.py:batched", outputs=declared)) as worker:
        assert [one[0] for one in worker.run(two).outputs] == ["y", "z"]
        assert [one[0] for one in worker.run(two, requested=[("z",)]).outputs] == ["z"]


# ---- failures -------------------------------------------------------------------------------


def test_what_a_callable_raises_reaches_the_client_without_its_secrets() -> None:
    with loaded(model("raises.py:always")) as worker:
        failed = worker.run([large(worker)[1]], rows=[2])
        assert failed.failure == ("INTERNAL", "the weights in 'weights.bin' are spoiled")
        assert failed.inputs_free
        record = worker.log_record()
        assert record.level == 40
        assert "'/secret/dir with space/weights.bin'" in record.text
        assert 'raises.py", line' in record.traceback
        assert "gpuserve_worker" not in record.traceback


def test_a_failure_with_text_that_is_not_unicode_is_told_and_the_worker_lives() -> None:
    with loaded(model("raises.py:half_a_pair")) as worker:
        for batch_id in (1, 2):
            failed = worker.run([floats("x", [1])], batch_id=batch_id)
            assert wire.WireFailure(*failed.failure).text == "there is no caf\\udce9"
        assert "there is no caf\\udce9" in worker.log_record().text


def test_one_request_fails_and_its_neighbours_do_not() -> None:
    with loaded(model("raises.py:negative")) as worker:
        done = worker.run([floats("x", [1], [-2], [3])], rows=[1, 1, 1])
        first, failed, last = wire.responses(done.responses)
        assert failed == wire.WireFailure("INTERNAL", "-2 is negative")
        assert [values(worker, one[0]).tolist() for one in (first, last)] == [[[1]], [[3]]]


def test_nonsense_is_refused_and_the_worker_goes_on() -> None:
    with loaded(model("wrong_outputs.py:Answer", kwargs={"answer": [{"y": [["text"]]}]})) as worker:
        failed = worker.run([floats("x", [1])])
        assert isinstance(failed, wire.Failed)
        assert "Output 'y' of model 'tested' must be FP32 (float32)" in failed.failure[1]
        assert worker.log_record().text == failed.failure[1]
        assert isinstance(worker.run([floats("x", [1])], batch_id=2), wire.Failed)


def test_strict_is_strict() -> None:
    with loaded(model("echo.py:single", max_batch_size=0)) as worker:
        failed = worker.run([floats("x", [1])])
        assert failed.failure[1] == "Output 'x' is not declared; model 'tested' declares 'y'"


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
