"""What callables answer with on a GPU: a real worker process, driven message by message."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_machine import GpuMachine, RealMachine
from serving import REPOSITORY
from test_device_inputs import X, device_model, in_segments, noise, on_gpu
from worker_process import LARGE, WorkerProcess, floats, large, loaded, output, values

from gpuserve_worker.protocol import wire

Machine = GpuMachine | RealMachine

#: One that travels in the message, and one that does not.
WIDTHS = (5, LARGE // 4)


def failure_of(answer: Any) -> wire.WireFailure:
    assert isinstance(answer, wire.Failed), answer
    return wire.WireFailure(*answer.failure)


def answers_of(worker: WorkerProcess, message: Any) -> list[Any]:
    """The arrays of a message: of the whole batch, or of each request; a failure is its text."""
    if message.outputs is not None:
        return [values(worker, tensor) for tensor in message.outputs]
    return [
        values(worker, one[0]) if not isinstance(one[0], str) else one[1] for one in message.responses or ()
    ]


def until_done(worker: WorkerProcess) -> list[Any]:
    """The yields of a batch, up to its end."""
    yields = []
    while not isinstance(message := worker.hear(worker.link), wire.Done):
        assert isinstance(message, wire.Yield), message
        yields.append(message)
        worker.link.send(wire.Credit(((message.batch_id, 1),)))
    return yields


@pytest.mark.parametrize(
    "form",
    [
        "as_double",
        "as_integers",
        "strided",
        "every_other",
        "interface",
        "interface_on_a_stream",
        "capsule",
        "on_host",
        "mixed",
    ],
)
def test_every_form_of_answer(shared_gpu_machine: Machine, form: str) -> None:
    with on_gpu(shared_gpu_machine, "Answers", kwargs={"form": form}, strict=False) as worker:
        for number, width in enumerate(WIDTHS, 1):
            array = np.floor(noise(3, width) * 100)
            done = worker.run([in_segments(worker, array)], (1, 2), batch_id=number)
            assert np.array_equal(output(worker, done), array * 2)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("masked", "Output 'y' of model 'tested' cannot be made an array: a masked array cannot be sent"),
        (
            "complex",
            "Output 'y' of model 'tested' must be FP32 (float32), but the callable returned an array of "
            "complex64",
        ),
        (
            "too_long",
            "Output 'y' of model 'tested' must have 1 row on its first axis, as its input has, but its shape "
            "is (2, 2)",
        ),
        ("raises", "as the test wants"),
    ],
)
def test_bad_answers_give_the_sentences_of_the_host(
    shared_gpu_machine: Machine, form: str, text: str
) -> None:
    with on_gpu(shared_gpu_machine, "Answers", kwargs={"form": form}) as worker:
        failed = worker.run([floats("x", [1, 2])])
        assert failure_of(failed) == ("INTERNAL", text)
        assert failed.inputs_free


def test_an_answer_on_another_device_is_refused(any_two_gpus: Machine) -> None:
    with on_gpu(any_two_gpus, "Answers", kwargs={"form": "elsewhere"}) as worker:
        text = failure_of(worker.run([floats("x", [1, 2])])).text
    assert (
        text == "Output 'y' of model 'tested' cannot be made an array: it is on device 1, expected device 0"
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            "as_double",
            "must be FP32 (float32), but the callable returned an array of float64, which is not cast "
            "without being asked: return it as float32, or say strict: false",
        ),
        ("other_shape", "must have shape (-1,) without the batch axis, but the callable returned (1, 1)"),
    ],
)
def test_strict_models_check_arrays_of_the_device(shared_gpu_machine: Machine, form: str, text: str) -> None:
    with on_gpu(shared_gpu_machine, "Answers", kwargs={"form": form}) as worker:
        failed = worker.run([floats("x", [1, 2])])
        assert failure_of(failed).text == f"Output 'y' of model 'tested' {text}"


def test_answers_that_are_the_inputs_themselves(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "unchanged", outputs=(("x", "FP32", (-1,)),)) as worker:
        for number in range(6):
            array = noise(2, LARGE // 4, seed=number)
            done = worker.run([in_segments(worker, array)], (1, 1), batch_id=number + 1)
            assert np.array_equal(output(worker, done), array)


def test_answers_are_read_after_the_kernels_that_make_them(gpu_machine: Machine) -> None:
    gpu_machine.slow(kernel_s=0.02, copy_bytes_per_s=1e7)
    with on_gpu(gpu_machine, "Answers", kwargs={"form": "strided"}) as worker:
        array = noise(2, LARGE // 4)
        done = worker.run([in_segments(worker, array)], (1, 1))
        assert np.array_equal(output(worker, done), array * 2)


@pytest.mark.parametrize("form", ["kept", "part_of_kept"])
def test_a_buffer_that_the_callable_uses_again_is_copied_before_that(gpu_machine: Machine, form: str) -> None:
    gpu_machine.slow(copy_bytes_per_s=2e7)
    with on_gpu(gpu_machine, "Answers", kwargs={"form": form}) as worker:
        arrays = [noise(1, LARGE // 4, seed=number) for number in range(5)]
        for number, array in enumerate(arrays):
            worker.start([in_segments(worker, array)], batch_id=number)
        for number, array in enumerate(arrays):
            done = worker.answer()
            assert done.batch_id == number
            assert np.array_equal(output(worker, done), array * 2)


def test_an_input_that_is_the_answer_and_is_kept_is_copied_before_it_is_written_to(
    gpu_machine: Machine,
) -> None:
    gpu_machine.slow(copy_bytes_per_s=2e7)
    with on_gpu(gpu_machine, "KeepsItsInput") as worker:
        arrays = [noise(1, LARGE // 4, seed=number) for number in range(5)]
        for number, array in enumerate(arrays):
            worker.start([in_segments(worker, array)], batch_id=number)
        for array in arrays:
            assert np.array_equal(output(worker, worker.answer()), array)


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["on_own_stream", "double_on_own_stream", "capsule_on_own_stream"])
def test_a_callable_may_compute_on_a_stream_of_its_own(gpu_machine: Machine, form: str) -> None:
    gpu_machine.slow(kernel_s=0.01, copy_bytes_per_s=2e7)
    with on_gpu(gpu_machine, "Answers", kwargs={"form": form}, strict=False) as worker:
        arrays = [noise(1, LARGE // 4, seed=number) for number in range(4)]
        for number, array in enumerate(arrays):
            worker.start([in_segments(worker, array)], batch_id=number)
        for array in arrays:
            assert np.array_equal(output(worker, worker.answer()), array * 2)


@pytest.mark.thorough
def test_a_kept_buffer_is_copied_before_another_stream_writes_to_it(gpu_machine: Machine) -> None:
    gpu_machine.slow(copy_bytes_per_s=2e7)
    with on_gpu(gpu_machine, "Answers", kwargs={"form": "kept_on_own_stream"}) as worker:
        arrays = [noise(1, LARGE // 4, seed=number) for number in range(5)]
        for number, array in enumerate(arrays):
            worker.start([in_segments(worker, array)], batch_id=number)
        for array in arrays:
            assert np.array_equal(output(worker, worker.answer()), array * 2)


@pytest.mark.thorough
def test_an_answer_without_axes_is_cast_without_one(shared_gpu_machine: Machine) -> None:
    inputs, outputs = ((*X[:4], "gpu"),), (("y", "FP32", ()),)
    changes: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "max_batch_size": 0}
    with on_gpu(shared_gpu_machine, "total", strict=False, **changes) as worker:
        done = worker.run([wire.WireTensor("x", "FP32", (3,), np.arange(3, dtype=np.float32).tobytes())])
        assert isinstance(done, wire.Done), done
        assert answers_of(worker, done)[0].shape == ()
        assert answers_of(worker, done) == [3]


@pytest.mark.thorough
@pytest.mark.parametrize("path", ["counts_up", "counts_up_async"])
@pytest.mark.parametrize("width", WIDTHS)
def test_streams_of_answers(shared_gpu_machine: Machine, path: str, width: int) -> None:
    with on_gpu(shared_gpu_machine, path, decoupled=True) as worker:
        array = noise(1, width)
        worker.start([in_segments(worker, array)])
        yields = until_done(worker)
        assert len(yields) == 3
        for number, message in enumerate(yields):
            (given,) = answers_of(worker, message)
            assert np.array_equal(given, array * number)


def test_blocks_that_come_back_are_used_again(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "doubled") as worker:
        segments = set()
        for number in range(40):
            array, tensor = large(worker, first=number)
            done = worker.run([tensor], (2,), batch_id=number + 1)
            assert np.array_equal(output(worker, done), array * 2)
            place = wire.payload(done.outputs[0][3])
            assert isinstance(place, wire.Ref)
            segments.add(place.segment)
            worker.link.send(wire.Free(((place.segment, place.offset),)))
        assert len(segments) == 1


def test_a_question_to_another_model_takes_arrays_of_the_device(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "asks_doubled") as worker:
        array = noise(1, LARGE // 4)
        worker.start([in_segments(worker, array)])
        call = worker.hear(worker.link)
        assert isinstance(call, wire.Call)
        (tensor,) = call.inputs
        assert np.array_equal(values(worker, tensor), array + 1)
        answered = wire.WireTensor("y", "FP32", (1, 2), np.array([[8, 9]], np.float32).tobytes())
        worker.link.send(wire.Answer(call.call_id, 0, (answered,), {}, None, True))
        assert output(worker, worker.answer()).tolist() == [[8, 9]]


def test_an_error_of_the_device_fails_the_batch(stand_in: GpuMachine) -> None:
    with on_gpu(stand_in, "doubled") as worker:
        assert output(worker, worker.run([floats("x", [1])])).tolist() == [[2]]
        stand_in.change(failures={"eventSynchronize": 2, "eventQuery": 2})
        failure = failure_of(worker.run([floats("x", [1])], batch_id=2))
        assert "memory" in failure.text
        assert "/" not in failure.text
        stand_in.change(failures={})
        assert output(worker, worker.run([floats("x", [3])], batch_id=3)).tolist() == [[6]]


def test_arrays_of_the_device_need_cupy_to_be_taken_from_there(stand_in: GpuMachine) -> None:
    """A worker without a device of ours, whose callable finds one all the same."""
    plain = device_model("numpy_to_device", device="cpu", array="numpy", inputs=(X[:4],))
    with loaded(plain, environ=stand_in.environ) as worker:
        text = failure_of(worker.run([floats("x", [1])])).text
        assert text == (
            "Output 'y' of model 'tested' is on a GPU, from where its instance cannot copy it: expected an "
            "array on the host, or gpuserve[cuda12] or gpuserve[cuda13] installed and an instance on that GPU"
        )


def test_a_batch_of_one_input_and_one_output_makes_few_calls_of_cuda(stand_in: GpuMachine) -> None:
    """At most 12: others than these, and a question whether the device is done, or several and a wait."""
    outputs = (("y", "FP32", (-1,)), ("calls", "INT64", (2,)))
    counts = []
    with on_gpu(stand_in, "CountsCalls", outputs=outputs) as worker:
        stand_in.change(launch_delay_s=0.0)
        for number in range(24):
            array = noise(1, LARGE // 4)
            done = worker.run([in_segments(worker, array)], batch_id=number + 1)
            assert np.array_equal(values(worker, done.outputs[0]), array * 2)
            counts.append(values(worker, done.outputs[1], np.dtype(np.int64))[0])
    queries, others = np.array(counts)[-5:].T
    assert np.median(others) <= 10
    assert max(others) <= 11
    assert min(queries + others) >= 8, "they are counted"


def test_what_is_asked_of_the_device_is_no_error_of_the_callables_kernels(stand_in: GpuMachine) -> None:
    """Of a library that shares CUDA's runtime, in which a question that comes too early leaves an error."""
    stand_in.change(kernel_s=0.002, shared_runtime=True)
    arrays = [noise(2, LARGE // 4, seed=number) for number in range(6)]
    with on_gpu(stand_in, "doubled") as worker:
        for number, array in enumerate(arrays):  # one at a time, and then together
            assert isinstance(worker.run([in_segments(worker, array)], (2,), batch_id=number), wire.Done)
        for number, array in enumerate(arrays, len(arrays)):
            worker.start([in_segments(worker, array)], (2,), batch_id=number)
        assert [isinstance(worker.answer(), wire.Done) for _ in arrays] == [True] * len(arrays)


def test_static_inputs_begin_at_one_address(gpu_machine: Machine) -> None:
    gpu_machine.slow(kernel_s=0.002, copy_bytes_per_s=1e9)
    outputs = (("y", "FP32", (-1,)), ("address", "INT64", (1,)))
    arrays = [noise(rows, LARGE // 4, seed=number) for number, rows in enumerate((1, 4, 2, 4, 3, 1))]
    addresses = set()
    with on_gpu(
        gpu_machine, "StaticAddresses", outputs=outputs, static_inputs=True, max_batch_size=4
    ) as worker:
        for number, array in enumerate(arrays):
            worker.start([in_segments(worker, array)], (len(array),), batch_id=number)
        for array in arrays:
            done = worker.answer()
            assert np.array_equal(values(worker, done.outputs[0]), array * 2)
            addresses |= set(values(worker, done.outputs[1], np.dtype(np.int64)).ravel().tolist())
    assert len(addresses) == 1


@pytest.mark.thorough
def test_the_graph_of_the_docs_is_captured_once_and_reads_every_batch(
    shared_gpu_machine: Machine, tmp_path: Path
) -> None:
    page = (REPOSITORY / "docs/how-to/instances.md").read_text()
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "begin_capture" in one]
    (tmp_path / "graphs.py").write_text(textwrap.dedent(code))
    arrays = [noise(rows, LARGE // 4, seed=number) for number, rows in enumerate((1, 4, 1, 4, 4, 1))]
    source = {"path": "graphs.py:Graphs", "base_dir": str(tmp_path), "kwargs": {}}
    with on_gpu(shared_gpu_machine, "Graphs", source=source, static_inputs=True, max_batch_size=4) as worker:
        for number, array in enumerate(arrays):
            worker.start([in_segments(worker, array)], (len(array),), batch_id=number)
        for array in arrays:
            assert np.allclose(values(worker, worker.answer().outputs[0]), np.tanh(array), rtol=1e-5)


def test_casts_are_compiled_at_the_warm_up(stand_in: GpuMachine) -> None:
    outputs = (("y", "FP32", (-1,)), ("calls", "INT64", (2,)))
    warmup = (("w", 1, 1, (("x", "FP32", (2,), "random", ""),)),)
    counts = []
    with on_gpu(stand_in, "counts_kernels", outputs=outputs, strict=False, warmup=warmup) as worker:
        for number in range(2):
            done = worker.run([floats("x", [1, 2])], batch_id=number + 1)
            counts.append(int(values(worker, done.outputs[1], np.dtype(np.int64))[0, 0]))
    assert counts[0] == counts[1] > 0
