"""Ensembles whose tensors stay on the GPU between their steps: a real server, asked by a real client."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from ensembles import ensemble, step, tensor
from gpu_machine import Gpu, GpuMachine, RealMachine
from operated import MODELS, InBackground, OperatedServer, config
from processes import wait_until
from tritonclient.utils import InferenceServerException

STEPS = MODELS / "device_steps.py"
WIDTH = 1 << 16
LARGE = 1 << 21
TIMEOUT_S = 20.0
PASSED = "gpuserve_ensemble_device_bytes_total"
#: Every block of the servers' own arenas, and every request that is not at its end.
IN_USE = ("gpuserve_arena_blocks", "gpuserve_running_requests", "gpuserve_queue_requests")


def member(
    name: str, attribute: str = "", *inputs: str, device: str = "cuda:0", **more: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "callable": f"{STEPS}:{attribute or name}",
        "instances": [{"device": device}],
        "inputs": [tensor(one, memory="gpu") for one in inputs or ("x",)],
        "outputs": [tensor("y")],
        "max_batch_size": 8,
        **more,
    }


def models(directory: Path, far: str = "cuda:0") -> list[dict[str, Any]]:
    """The steps; those called far are on that device."""
    at = {"kwargs": {"directory": str(directory)}}
    pid = {"outputs": [tensor("y"), tensor("pid", "int64", 1)]}
    host = {**member("on_host", "doubled", device="cpu"), "inputs": [tensor("x")]}
    return [
        member("doubled"),
        member("plus_one"),
        member("added", "", "a", "b"),
        member("Gate", **at, **pid),
        member("Told", **at),
        member("far", "doubled", device=far),
        host,
        ensemble(
            "chain", step("plus_one", "a", x="x"), step("doubled", "b", x="a"), step("plus_one", "y", x="b")
        ),
        ensemble(
            "diamond",
            step("plus_one", "a", x="x"),
            step("doubled", "b", x="a"),
            step("plus_one", "c", x="a"),
            step("added", "y", a="b", b="c"),
        ),
        ensemble(
            "outside", step("plus_one", "a", x="x"), step("on_host", "b", x="a"), step("plus_one", "y", x="b")
        ),
        ensemble("held", step("Told", "a", x="x"), step("Gate", "y", x="a")),
        ensemble(
            "far_away", step("plus_one", "a", x="x"), step("far", "b", x="a"), step("plus_one", "y", x="b")
        ),
    ]


class Asked(OperatedServer):
    """A server whose files are in ``directory``."""

    directory: Path

    def ask(self, model: str, value: float, width: int = WIDTH) -> Any:
        array = np.full((1, width), value, np.float32)
        given = tritonclient.grpc.InferInput("x", list(array.shape), "FP32")
        given.set_data_from_numpy(array)
        with tritonclient.grpc.InferenceServerClient(self.addresses["gRPC"]) as client:
            return client.infer(model, [given], client_timeout=TIMEOUT_S).as_numpy("y")

    def passed(self, model: str) -> float:
        """Bytes that the steps of an ensemble passed on without the host."""
        return self.metric(PASSED, model=model)

    def wait_acquainted(self, model: str, value: float, expected: float) -> None:
        """Ask until the workers can read each other's memory."""

        def has_passed() -> bool:
            before = self.passed(model)
            np.testing.assert_array_equal(self.ask(model, value), np.full((1, WIDTH), expected, np.float32))
            return self.passed(model) > before

        wait_until(has_passed, f"{model} passes tensors on the GPU")

    def worker(self, name: str) -> int:
        """The process that a step has written down."""
        return int((self.directory / name).read_text())

    def forget(self, name: str) -> None:
        (self.directory / name).unlink(missing_ok=True)

    def is_idle(self) -> bool:
        return not any(self.metric(one) for one in IN_USE)


def served(directory: Path, entries: list[dict[str, Any]]) -> Asked:
    server = Asked(config(directory, *entries))
    server.directory = directory
    return server


@pytest.fixture(scope="module")
def module_server(
    shared_gpu_machine: GpuMachine | RealMachine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Asked]:
    with pytest.MonkeyPatch.context() as patch:
        shared_gpu_machine.set_environment(patch)
        directory = tmp_path_factory.mktemp("config")
        running = served(directory, models(directory))
        with running:
            running.wait_ready()
            yield running
            assert running.end() == 0


@pytest.fixture
def server(module_server: Asked) -> Iterator[Asked]:
    """The server, which every test leaves idle. One that failed may have left the gate shut."""
    yield module_server
    module_server.forget("shut")
    wait_until(module_server.is_idle, "every block is free")


def test_tensors_between_steps_stay_on_the_gpu(server: Asked) -> None:
    server.wait_acquainted("chain", 1, 5)
    before = server.passed("chain")
    np.testing.assert_array_equal(server.ask("chain", 2), np.full((1, WIDTH), 7, np.float32))
    assert server.passed("chain") - before == 2 * 4 * WIDTH


def test_what_two_steps_read_is_each_ones_own(server: Asked) -> None:
    server.wait_acquainted("diamond", 1, 7)
    for value in range(5):
        expected = 3 * (value + 1) + 1
        np.testing.assert_array_equal(server.ask("diamond", value), np.full((1, WIDTH), expected, np.float32))


def test_many_at_once(server: Asked) -> None:
    server.wait_acquainted("chain", 1, 5)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda value: server.ask("chain", value), range(40)))
    for value, answer in enumerate(answers):
        np.testing.assert_array_equal(answer, np.full((1, WIDTH), 2 * (value + 1) + 1, np.float32))


def test_the_memory_is_used_again(server: Asked) -> None:
    """What these pass is more than the GPU of the stand-in has."""
    server.wait_acquainted("chain", 1, 5)
    for value in range(17):
        before = server.passed("chain")
        np.testing.assert_array_equal(server.ask("chain", value, LARGE)[0, ::999], 2 * (value + 1) + 1)
        assert server.passed("chain") - before == 2 * 4 * LARGE


def test_small_tensors_travel_in_messages(server: Asked) -> None:
    server.wait_acquainted("chain", 1, 5)
    before = server.passed("chain")
    assert server.ask("chain", 1, width=3).tolist() == [[5, 5, 5]]
    assert server.passed("chain") == before


def test_a_step_on_the_cpu_is_reached_by_the_host(server: Asked) -> None:
    for value in range(4):
        answer = server.ask("outside", value)
        np.testing.assert_array_equal(answer, np.full((1, WIDTH), 2 * (value + 1) + 1, np.float32))
    assert server.passed("outside") == 0


# ---- deaths ---------------------------------------------------------------------------------


def held(server: Asked, value: float) -> InBackground:
    """A request whose last step has its input, and does not return."""
    server.wait_acquainted("held", 1, 4)
    server.forget("pid")
    (server.directory / "shut").touch()
    call = InBackground(server.ask, "held", value)
    wait_until((server.directory / "pid").exists, "the last step runs")
    return call


def open_gate(server: Asked) -> None:
    (server.directory / "shut").unlink()


@pytest.mark.thorough
def test_the_owner_dies_while_its_tensor_is_read(server: Asked) -> None:
    call = held(server, 3)
    os.kill(server.worker("owner"), signal.SIGKILL)
    wait_until(lambda: server.metric("gpuserve_worker_restarts_total", model="Told") > 0, "it is dead")
    open_gate(server)
    np.testing.assert_array_equal(call.result(), np.full((1, WIDTH), 8, np.float32))
    server.wait_model_ready("Told")
    server.wait_acquainted("held", 5, 12)


@pytest.mark.thorough
def test_the_reader_dies(server: Asked) -> None:
    call = held(server, 3)
    os.kill(server.worker("pid"), signal.SIGKILL)
    with pytest.raises(InferenceServerException, match="in ensemble 'held'"):
        call.result()  # it has written to what it read
    open_gate(server)
    server.wait_model_ready("Gate")
    server.wait_acquainted("held", 5, 12)


@pytest.mark.thorough
def test_the_front_dies(server: Asked) -> None:
    call = held(server, 3)
    front = server.front
    assert front
    os.kill(front, signal.SIGKILL)
    with pytest.raises(InferenceServerException):
        call.result()
    open_gate(server)
    wait_until(lambda: server.front not in (0, front), "a new front")
    server.wait_model_ready("held")
    server.wait_acquainted("held", 5, 12)
    server.wait_acquainted("chain", 1, 5)


# ---- two GPUs -------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("peer_access", [True, False])
def test_a_step_on_another_gpu(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer_access: bool
) -> None:
    two_gpus.change(peer_access=peer_access)
    two_gpus.set_environment(monkeypatch)
    entries = [one for one in models(tmp_path, "cuda:1") if one["name"] in {"plus_one", "far", "far_away"}]
    with served(tmp_path, entries) as server:
        server.wait_ready()
        assert isinstance(server, Asked)
        if peer_access:
            server.wait_acquainted("far_away", 1, 5)
        for value in range(3):
            answer = server.ask("far_away", value)
            np.testing.assert_array_equal(answer, np.full((1, WIDTH), 2 * (value + 1) + 1, np.float32))
        assert bool(server.passed("far_away")) is peer_access
        if not peer_access:
            server.wait_log("tensors between them go by the host: ")
        assert server.end() == 0


@pytest.mark.thorough
def test_a_step_runs_on_the_gpu_that_nvlink_connects_with_the_one_before(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = Gpu("GPU-00000000-0000-4000-8000-00000000000c", pci_bus_id="00000000:b3:00.0")
    two_gpus.change(gpus=(*two_gpus.now.gpus, third), nvlinks=((two_gpus.uuids[0], third.uuid),))
    two_gpus.set_environment(monkeypatch)
    far = {**member("far", "doubled"), "instances": [{"device": "cuda:1"}, {"device": "cuda:2"}]}
    entries = [far if one["name"] == "far" else one for one in models(tmp_path)]
    with served(
        tmp_path, [one for one in entries if one["name"] in {"plus_one", "far", "far_away"}]
    ) as server:
        server.wait_ready()
        assert isinstance(server, Asked)
        server.wait_acquainted("far_away", 1, 5)
        executions = "gpuserve_instance_executions_total"
        before = [server.metric(executions, instance=f"cuda:{n}#0") for n in (1, 2)]
        for value in range(8):
            server.ask("far_away", value)
        after = [server.metric(executions, instance=f"cuda:{n}#0") for n in (1, 2)]
        assert (after[0] - before[0], after[1] - before[1]) == (0, 8)
        assert server.end() == 0
