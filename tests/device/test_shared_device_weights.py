"""Weights that exist once on a GPU for all instances of a server."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import ask as operate
from commands import status
from gpu_machine import GPU_0, GpuMachine
from operated import MODELS, InBackground, config
from optional_packages import needs
from processes import finished, wait_until
from serving import GPUSERVE
from watched_gpus import QUICKLY, Watched, model
from weights import kill_workers, loads, shared, write_weights

pytestmark = needs("torch")
NBYTES = 32 << 20
UUID = GPU_0.uuid.removeprefix("GPU-")
ONE = [{"device": "cuda:0"}]
TWO = [{"device": "cuda:0", "count": 2}]


@contextmanager
def served(
    machine: GpuMachine, folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str, **keys: Any
) -> Iterator[Watched]:
    machine.set_environment(monkeypatch)
    write_weights(folder, 1.0, NBYTES)
    kwargs = {"folder": str(folder), **keys.pop("kwargs", {})}
    outputs = [{"name": name, "dtype": "int64", "shape": [1]} for name in ("pid", "calls")]
    outputs.append({"name": "y", "dtype": "float32", "shape": [1]})
    given = {"callable": f"{MODELS / 'shared.py'}:OnGpu", "kwargs": kwargs, "outputs": outputs}
    memory = {"memory": keys.pop("memory")} if "memory" in keys else {}
    models = [model(name=name, **{**given, "instances": TWO, **keys}) for name in names]
    with Watched(config(folder, *models, **memory), *QUICKLY).until_ended() as server:
        yield server
    assert machine.shared_nbytes(GPU_0.uuid) == []


def answers(server: Watched, name: str, count: int = 2) -> dict[int, float]:
    """What each of so many instances answers, by process."""
    found: dict[int, float] = {}
    while len(found) < count:
        for one in [InBackground(server.infer, name, 1.0) for _ in range(2 * count)]:
            answer = one.result()
            found[answer.output("pid")[0]] = answer.output("y")[0]
    return found


def test_weights_are_once_on_the_gpu_for_all_instances_versions_and_restarts(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(stand_in, tmp_path, monkeypatch, "a", "b") as server:
        for name in ("a", "b"):
            assert set(answers(server, name).values()) == {1.0}
        assert loads(tmp_path) == 1
        (nbytes,) = stand_in.shared_nbytes(GPU_0.uuid)
        assert NBYTES <= nbytes <= NBYTES + (2 << 20)
        (row,) = shared(server)
        assert (row["name"], row["device"], row["state"]) == ("numbers", UUID, "SHARED")
        assert row["nbytes"] == nbytes
        assert len(row["instances"]) == 4
        labels = {"weights": "numbers", "device": UUID}
        assert server.metric("gpuserve_shared_weights_bytes", **labels) == nbytes
        assert server.metric("gpuserve_shared_weights_instances", **labels) == 4

        kill_workers(server)
        assert set(answers(server, "a").values()) == {1.0}
        assert (loads(tmp_path), stand_in.shared_nbytes(GPU_0.uuid)) == (1, [nbytes])

        write_weights(tmp_path, 2.0, NBYTES)
        operate(server.addresses["HTTP"], "reload", model="a")
        assert set(answers(server, "a").values()) == {2.0}
        assert set(answers(server, "b").values()) == {1.0}
        assert (loads(tmp_path), stand_in.shared_nbytes(GPU_0.uuid)) == (2, [nbytes, nbytes])
        operate(server.addresses["HTTP"], "unload", model="b")
        wait_until(lambda: len(shared(server)) == 1, "the earlier version is freed")
        wait_until(lambda: stand_in.shared_nbytes(GPU_0.uuid) == [nbytes], "its memory is free")


def test_a_loader_that_dies_half_way_leaves_nothing_and_the_next_instance_loads(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(stand_in, tmp_path, monkeypatch, "a") as server:
        write_weights(tmp_path, 2.0, NBYTES)
        stand_in.slow(copy_bytes_per_s=NBYTES / 10)
        for pid in server.workers:
            os.kill(pid, signal.SIGKILL)
        both = [NBYTES, NBYTES]
        wait_until(lambda: stand_in.shared_nbytes(GPU_0.uuid) == both, "the new version is being copied")
        loader = int((tmp_path / "loads").read_text().split()[-1])
        stand_in.slow(copy_bytes_per_s=0)
        os.kill(loader, signal.SIGKILL)
        server.wait_log("loaded in", 4)
        server.wait_model_ready("a")
        assert set(answers(server, "a").values()) == {2.0}
        assert loads(tmp_path) == 3
        wait_until(lambda: len(stand_in.shared_nbytes(GPU_0.uuid)) == 1, "all else is free")


def test_memory_that_is_lost_with_its_gpu_is_let_go_and_loaded_again(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(stand_in, tmp_path, monkeypatch, "a", instances=ONE) as server:
        server.wait_watched()
        stand_in.lose(GPU_0.uuid)
        wait_until(lambda: not server.workers, "the workers have ended")
        wait_until(lambda: stand_in.shared_nbytes(GPU_0.uuid) == [], "a reset of the GPU is not held up")
        stand_in.change_gpu(GPU_0.uuid, lost=False)
        server.wait_log("loaded in", 2)
        server.wait_model_ready("a")
        assert set(answers(server, "a", 1).values()) == {1.0}
        assert loads(tmp_path) == 2


def test_memory_that_cannot_be_mapped_any_more_is_loaded_again(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(stand_in, tmp_path, monkeypatch, "a", instances=ONE) as server:
        stand_in.spoil_shared(GPU_0.uuid)
        for pid in server.workers:
            os.kill(pid, signal.SIGKILL)
        server.wait_log("cuMemMap failed")
        server.wait_log("loaded in", 2)
        server.wait_model_ready("a")
        assert set(answers(server, "a", 1).values()) == {1.0}
        assert loads(tmp_path) == 2
        assert len(shared(server)) == 1


def test_an_instance_that_writes_ends_and_the_others_keep_their_weights(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(stand_in, tmp_path, monkeypatch, "a") as server:
        assert server.infer("a", -5.0).status == 500
        server.wait_log("loaded in", 4)  # the request runs once more after the first death
        server.wait_model_ready("a")
        assert set(answers(server, "a").values()) == {1.0}
        assert loads(tmp_path) == 1


@pytest.mark.thorough
def test_an_instance_that_may_write_has_a_copy_of_its_own(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(stand_in, tmp_path, monkeypatch, "a", kwargs={"copy_on_write": True}) as server:
        (writer,) = server.infer("a", -5.0).output("pid")
        assert {pid: first for pid, first in answers(server, "a").items() if first != 1.0} == {writer: 5.0}
        assert stand_in.shared_nbytes(GPU_0.uuid) == []


def test_shared_weights_leave_the_gpu_when_all_models_sleep_and_come_back(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        "on_demand": True,
        "memory": {"cuda": 4 << 30},
        "idle_timeout_s": 3,
    }
    with served(stand_in, tmp_path, monkeypatch, "a", "b", **keys) as server:

        def residences() -> list[str]:
            return [one["residence"] for one in status(server.addresses["HTTP"])["models"]]

        def memory(name: str) -> float:
            return server.metric("gpuserve_resident_memory_bytes", model=name, device="cuda:0")

        assert set(answers(server, "a").values()) == {1.0}
        pids = server.workers
        assert len(stand_in.shared_nbytes(GPU_0.uuid)) == 1
        taken = 2 * GPU_0.context_memory + NBYTES
        wait_until(lambda: memory("a") == taken, "the weights count once")
        for _ in range(2):
            wait_until(lambda: "ASLEEP" in residences(), "the model sleeps")
            wait_until(lambda: stand_in.shared_nbytes(GPU_0.uuid) == [], "the memory of the GPU is free")
            assert "ASLEEP" in {one["state"] for one in shared(server)}
            assert set(answers(server, "a").values()) == {1.0}
            assert len(stand_in.shared_nbytes(GPU_0.uuid)) == 1
        assert set(answers(server, "b").values()) == {1.0}
        assert set(pids) <= set(server.workers)
        assert loads(tmp_path) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        {"failures": {"cuMemExportToShareableHandle": 801}},
        {"gpus": (dataclasses.replace(GPU_0, virtual_memory=False),)},
    ],
    ids=["of the call", "of the device"],
)
def test_a_device_that_cannot_share_is_told_and_each_instance_has_a_copy(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: dict[str, Any]
) -> None:
    stand_in.change(**refusal)
    with served(stand_in, tmp_path, monkeypatch, "a") as server:
        assert set(answers(server, "a").values()) == {1.0}
        server.wait_log("shared weights on cuda:0 are copied for each instance", 2)
        assert loads(tmp_path) == 1
        assert [one["device"] for one in shared(server)] == ["cpu"]


def test_a_driver_without_memory_for_reading_alone_shares_all_the_same(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.change(failures={"cuMemSetAccess for reading": 801})
    with served(stand_in, tmp_path, monkeypatch, "a") as server:
        assert server.infer("a", -5.0).output("y") == [5.0]
        assert set(answers(server, "a").values()) == {5.0}  # as the documentation warns


def test_the_limit_of_an_instance_counts_the_weights_that_it_shares(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.set_environment(monkeypatch)
    write_weights(tmp_path, 1.0, NBYTES)
    given = model(
        callable=f"{MODELS / 'shared.py'}:OnGpu",
        kwargs={"folder": str(tmp_path)},
        gpu_memory_nbytes=NBYTES - 1,
    )
    with Watched(config(tmp_path, given), *QUICKLY) as server:
        server.wait_log(f"gpu_memory_nbytes limits this instance to {NBYTES - 1} bytes on its GPU")
    assert stand_in.shared_nbytes(GPU_0.uuid) == []


def test_doctor_tells_whether_instances_can_share_weights(
    stand_in: GpuMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.set_environment(monkeypatch)

    def told() -> tuple[str, str]:
        done = finished([GPUSERVE, "doctor", "--json"])
        found = json.loads(done.stdout)["findings"]
        return next((one["level"], one["text"]) for one in found if "share weights" in one["text"])

    assert told() == ("ok", "instances can share weights on the GPU")
    stand_in.change_gpu(GPU_0.uuid, virtual_memory=False)
    level, text = told()
    assert (level, "does not support virtual memory management" in text) == ("warning", True)
