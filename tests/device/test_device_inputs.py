"""Inputs that a worker brings to its GPU: a real worker process, driven message by message."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_file import DATATYPES
from gpu_machine import GpuMachine, RealMachine
from processes import finished
from worker_process import LARGE, WorkerProcess, floats, large, loaded, model, output, values

from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import numpy_dtype

Machine = GpuMachine | RealMachine

X = ("x", "FP32", (-1,), False, "gpu")
K = ("k", "FP32", (1,), True, "gpu")
NUMERIC = [one for one in DATATYPES if one not in {"BF16", "BYTES"}]


def device_model(path: str, **changes: Any) -> wire.Init:
    """A model of tests/models/on_device.py on the GPU, with ``x`` as a CuPy array."""
    given: dict[str, Any] = {"device": "cuda:0", "instance": "cuda:0#0", "array": "cupy", "inputs": (X,)}
    return model(f"on_device.py:{path}", **(given | changes))


@contextmanager
def on_gpu(machine: Machine, path: str, **changes: Any) -> Iterator[WorkerProcess]:
    with loaded(device_model(path, **changes), environ=machine.environ) as worker:
        yield worker


def in_segments(
    worker: WorkerProcess, array: Any, name: str = "x", datatype: str = "FP32"
) -> wire.WireTensor:
    return worker.in_arena(name, datatype, array.shape, array.tobytes())


def noise(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).random(shape, np.float32)


def as_parts(worker: WorkerProcess, arrays: Sequence[Any], name: str = "x") -> wire.WireTensor:
    """The rows of several requests, which nobody has joined."""
    whole = np.concatenate(arrays)
    parts = tuple(one.tobytes() if one.nbytes < 1000 else in_segments(worker, one).payload for one in arrays)
    return wire.WireTensor(name, "FP32", whole.shape, wire.Parts(parts))


def test_inputs_in_the_message_and_in_the_arena(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "doubled") as worker:
        done = worker.run([floats("x", [1, 2, 3], [4, 5, 6])], (1, 1))
        assert output(worker, done).tolist() == [[2, 4, 6], [8, 10, 12]]
        array, tensor = large(worker)
        done = worker.run([tensor], (2,), batch_id=2)
        assert np.array_equal(output(worker, done), array * 2)
        assert done.inputs_free


def test_a_buffer_comes_back_from_a_thread_that_has_another_device(any_two_gpus: Machine) -> None:
    program = Path(__file__).parent.parent / "programs" / "buffers_of_other_threads.py"
    environ = {**os.environ, **any_two_gpus.environ}
    ran = finished([sys.executable, program], env=environ, check=True)
    assert ran.stdout == "True\n"


def test_the_requests_of_a_list_get_slices_of_one_array(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "in_place") as worker:
        done = worker.run([floats("x", [1], [2], [3], [4])], (1, 2, 1))
        assert output(worker, done).tolist() == [[1], [3], [4], [6]]


@pytest.mark.parametrize("memory", ["gpu", "cpu"])
def test_only_the_inputs_that_say_so_are_on_the_gpu(shared_gpu_machine: Machine, memory: str) -> None:
    with on_gpu(shared_gpu_machine, "kinds", inputs=(("x", "FP32", (-1,), False, memory),)) as worker:
        done = worker.run([floats("x", [1, 2])])
        assert output(worker, done).tolist() == [[float(memory == "gpu")]]


@pytest.mark.thorough
def test_every_type_of_number(shared_gpu_machine: Machine) -> None:
    specs = tuple((datatype, datatype, (-1,), False, "gpu") for datatype in NUMERIC)
    outputs = tuple(one[:3] for one in specs)
    generator = np.random.default_rng(1)
    arrays = {one: generator.integers(0, 2, (3, 5)).astype(numpy_dtype(one)) for one in NUMERIC}
    with on_gpu(shared_gpu_machine, "unchanged", inputs=specs, outputs=outputs, strict=True) as worker:
        tensors = [wire.WireTensor(one, one, (3, 5), arrays[one].tobytes()) for one in NUMERIC]
        done = worker.run(tensors, (3,))
        assert isinstance(done, wire.Done), done
        assert done.outputs is not None
        for tensor in done.outputs:
            given = values(worker, tensor, numpy_dtype(tensor[1]))
            assert np.array_equal(given, arrays[tensor[0]]), tensor


@pytest.mark.thorough
def test_byte_strings_stay_on_the_host_beside_others(shared_gpu_machine: Machine) -> None:
    specs = (("s", "BYTES", (1,), False, "cpu"), X)
    outputs = (("s", "BYTES", (1,)), ("x", "FP32", (-1,)))
    with on_gpu(shared_gpu_machine, "unchanged", inputs=specs, outputs=outputs) as worker:
        strings = wire.WireTensor("s", "BYTES", (1, 1), b"\x02\0\0\0hi")
        done = worker.run([strings, floats("x", [7])])
        assert isinstance(done, wire.Done), done
        assert done.outputs is not None
        assert [one[0] for one in done.outputs] == ["s", "x"]
        assert worker.read(done.outputs[0][3]) == b"\x02\0\0\0hi"


@pytest.mark.thorough
def test_empty_tensors_and_scalars(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "unchanged", outputs=(("x", "FP32", (-1,)),)) as worker:
        empty = wire.WireTensor("x", "FP32", (2, 0), b"")
        done = worker.run([empty], (2,))
        assert output(worker, done).shape == (2, 0)
    scalar = {"inputs": (("x", "FP32", (), False, "gpu"),), "outputs": (("x", "FP32", ()),)}
    with on_gpu(shared_gpu_machine, "unchanged_sample", max_batch_size=0, **scalar) as worker:
        one = wire.WireTensor("x", "FP32", (), np.float32(5).tobytes())
        done = worker.run([one])
        assert isinstance(done, wire.Done), done
        assert done.outputs == (("x", "FP32", (), np.float32(5).tobytes()),)


def test_what_the_callable_keeps_stays_as_it_was(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "Keeps") as worker:
        total = np.zeros((1, LARGE // 4), np.float32)
        for number in range(6):
            array = noise(1, LARGE // 4, seed=number)
            total = total + array
            done = worker.run([in_segments(worker, array)], batch_id=number + 1)
            assert done.inputs_free  # the memory of the front is, whatever the callable keeps
            assert np.allclose(output(worker, done), total)


def test_buffers_are_used_again_and_hold_the_new_values(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "doubled") as worker:
        for number in range(20):
            array = noise(1 + number % 3, LARGE // 4, seed=number)
            done = worker.run([in_segments(worker, array)], (len(array),), batch_id=number + 1)
            assert np.array_equal(output(worker, done), array * 2)


def test_the_front_has_its_memory_back_only_after_the_copy(gpu_machine: Machine) -> None:
    """The callable answers at once; what the front then writes into the block must not get to the device."""
    gpu_machine.slow(copy_bytes_per_s=1e6)
    with on_gpu(gpu_machine, "Keeps") as worker:
        array = noise(1, LARGE // 4)
        tensor = in_segments(worker, array)
        done = worker.run([tensor])
        worker.overwrite(tensor)
        assert np.array_equal(output(worker, done), array)
        again = worker.run([floats("x", [0] * (LARGE // 4))], batch_id=2)
        assert np.array_equal(output(worker, again), array)


def test_slow_copies_and_slow_kernels_are_waited_for(gpu_machine: Machine) -> None:
    gpu_machine.slow(copy_bytes_per_s=5e6, kernel_s=0.01)
    with on_gpu(gpu_machine, "doubled") as worker:
        for number in range(4):
            array = noise(2, LARGE // 4, seed=number)
            done = worker.run([in_segments(worker, array)], (2,), batch_id=number + 1)
            assert np.array_equal(output(worker, done), array * 2)


def test_the_time_in_the_callable_is_that_of_the_device(stand_in: GpuMachine) -> None:
    stand_in.change(kernel_s=0.05)
    with on_gpu(stand_in, "doubled") as worker:
        worker.run([floats("x", [1])])  # the first one also makes the arena
        done = worker.run([floats("x", [1])], batch_id=2)
        assert done.compute_infer_ns >= 45_000_000
        assert done.compute_input_ns + done.compute_output_ns < 45_000_000


@pytest.mark.thorough
def test_parts_that_nobody_has_joined(shared_gpu_machine: Machine) -> None:
    arrays = [noise(1, 4, seed=1), noise(2, 4, seed=2), noise(3, 4, seed=3)]
    wide = [noise(rows, LARGE // 4, seed=rows) for rows in (2, 1, 3)]
    mixed = [noise(1, 100, seed=1), noise(200, 100, seed=2), noise(2, 100, seed=3), noise(1, 100, seed=4)]
    with on_gpu(shared_gpu_machine, "doubled") as worker:
        for number, parts in enumerate((arrays, wide, mixed), 1):
            rows = [len(one) for one in parts]
            done = worker.run([as_parts(worker, parts)], rows, batch_id=number)
            assert np.array_equal(output(worker, done), np.concatenate(parts) * 2)
            assert done.inputs_free


def test_a_tensor_of_another_size_than_its_shape_ends_the_worker(shared_gpu_machine: Machine) -> None:
    import subprocess

    init = device_model("doubled")
    environ = shared_gpu_machine.environ
    with WorkerProcess(init, stderr=subprocess.PIPE, environ=environ) as worker:
        worker.load()
        worker.start([wire.WireTensor("x", "FP32", (1, 3), bytes(8))])
        assert worker.exit_status() != 0
        assert "input 'x' of shape (1, 3) has 8 bytes" in worker.error_text()


@pytest.mark.thorough
@pytest.mark.parametrize("path", ["waits", "doubled"])
def test_callables_that_await(shared_gpu_machine: Machine, path: str) -> None:
    with on_gpu(shared_gpu_machine, path, concurrency=4) as worker:
        arrays = [noise(1, LARGE // 4, seed=number) for number in range(4)]
        for number, array in enumerate(arrays):
            worker.start([in_segments(worker, array)], batch_id=number)
        answers = [worker.answer() for _ in arrays]
        for done in answers:
            assert np.array_equal(output(worker, done), arrays[done.batch_id] * 2)


@pytest.mark.parametrize(
    ("path", "rows"), [("grouped", [[1], [2], [1], [2]]), ("first", [[2], [2], [2], [2]])]
)
def test_decorators_that_look_at_values(shared_gpu_machine: Machine, path: str, rows: list[Any]) -> None:
    x, k = noise(4, 3), np.array(rows, np.float32)
    with on_gpu(shared_gpu_machine, path, inputs=(X, K)) as worker:
        done = worker.run([floats("x", *x.tolist()), floats("k", *k.tolist())], (1, 1, 2))
        expected = x * 2 + k if path == "grouped" else x * 2
        assert np.allclose(output(worker, done), expected)


@pytest.mark.thorough
def test_padded_batches(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "padded", preferred_batch_sizes=(8,)) as worker:
        done = worker.run([floats("x", [1], [2], [3])], (1, 2))
        assert output(worker, done).tolist() == [[8], [16], [24]]


@pytest.mark.thorough
def test_defaults_of_inputs_that_are_left_out_are_on_the_gpu(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "filled", inputs=(X, K)) as worker:
        assert output(worker, worker.run([floats("x", [1, 2])])).tolist() == [[3, 6]]


@pytest.mark.thorough
def test_warm_ups_are_on_the_gpu_as_well(shared_gpu_machine: Machine) -> None:
    warmup = (("w", 2, 3, (("x", "FP32", (4,), "random", ""),)),)
    with on_gpu(shared_gpu_machine, "Warmed", warmup=warmup) as worker:
        assert output(worker, worker.run([floats("x", [1])])).tolist() == [[3]]


@pytest.mark.thorough
def test_numpy_callables_on_a_gpu_worker(shared_gpu_machine: Machine) -> None:
    plain = {"array": "numpy", "inputs": (("x", "FP32", (-1,), False, "cpu"),)}
    for path in ("numpy_doubled", "numpy_to_device"):
        with on_gpu(shared_gpu_machine, path, **plain) as worker:
            array, tensor = large(worker)
            assert np.array_equal(output(worker, worker.run([tensor], (2,))), array * 2)


def test_another_front_takes_over(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "Keeps") as worker:
        array = noise(1, LARGE // 4)
        assert np.array_equal(output(worker, worker.run([in_segments(worker, array)])), array)
        worker.new_front(2)
        done = worker.run([in_segments(worker, array)], batch_id=1)
        assert np.array_equal(output(worker, done), array + array)


def test_cupy_arrays_on_the_cpu_are_refused_at_load() -> None:
    with WorkerProcess(device_model("doubled", device="cpu", instance="cpu#0")) as worker:
        assert worker.load_failure().text == (
            "the inputs of model 'tested' are to be CuPy arrays, which instance 'cpu#0' on the CPU cannot "
            "have: expected an instance on a GPU, or array torch or numpy"
        )


def test_a_gpu_that_cannot_be_used_is_told_at_load(stand_in: GpuMachine) -> None:
    stand_in.change(failures={"memGetInfo": 46})
    with WorkerProcess(device_model("doubled"), environ=stand_in.environ) as worker:
        text = worker.load_failure().text
        assert text.startswith("device cuda:0 of the worker cannot be used: cudaError"), text


def test_a_refused_page_lock_is_logged_once_and_changes_nothing(stand_in: GpuMachine) -> None:
    stand_in.change(failures={"hostRegister": 2})
    with WorkerProcess(device_model("doubled"), environ=stand_in.environ) as worker:
        said = [worker.hear(worker.boot)]
        while not isinstance(said[-1], wire.Ready):
            said.append(worker.hear(worker.boot))
        (record,) = [one for one in said if isinstance(one, wire.Log)]  # of the segment that is made ahead
        assert "are not page-locked" in record.text
        worker.attach(1)
        for number in range(3):
            array, tensor = large(worker, first=number)
            done = worker.run([tensor], (2,), batch_id=number + 1)
            assert np.array_equal(output(worker, done), array * 2)
        worker.boot.send(wire.Stop())
        assert worker.hear(worker.boot) is None  # and it was logged no second time


def test_no_memory_on_the_device_fails_the_batch_and_no_other(stand_in: GpuMachine) -> None:
    with on_gpu(stand_in, "doubled") as worker:
        stand_in.change(failures={"malloc": 2})
        failed = worker.run([floats("x", [1])])
        assert isinstance(failed, wire.Failed)
        failure = wire.WireFailure(*failed.failure)
        assert failure.code == "RESOURCE_EXHAUSTED"
        assert "memory" in failure.text
        assert failed.inputs_free
        stand_in.change(failures={})
        assert output(worker, worker.run([floats("x", [1])], batch_id=2)).tolist() == [[2]]
