"""NVML that hangs, fails, or tells little: what a server that watches its GPUs makes of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from gpu_machine import GPU_0, GpuMachine
from processes import wait_until
from watched_gpus import (
    Watched,
    module_server,
    server,
    shared_machine,
    shared_server,
    watched,
)

pytestmark = pytest.mark.thorough

__all__ = ["module_server", "server", "shared_machine", "shared_server"]  # fixtures


def test_nvml_that_hangs_is_told_and_hinders_nothing(server: Watched, two_gpus: GpuMachine) -> None:
    two_gpus.change(nvml_hang_s=600.0)
    wait_until(lambda: server.get("/v2/gpus")["stale"], "nothing was heard for long")
    assert [server.state(uuid) for uuid in two_gpus.uuids] == ["SUSPECT", "SUSPECT"]
    assert server.metric("gpuserve_gpu_state", state="suspect") == 2
    assert server.metric("nv_gpu_memory_total_bytes") == 0, "old figures are not shown"
    assert server.metric("gpuserve_gpu_reading_age_seconds") > 0
    assert server.infer("m", 1.0).output("y") == [2.0]
    assert server.status("/v2/health/ready") == 200
    started = time.monotonic()
    assert server.end() == 0
    assert time.monotonic() - started < 10, "the end does not wait for the driver"


def test_nvml_that_answers_again(shared_server: Watched, shared_machine: GpuMachine) -> None:
    lines = len(shared_server.said())
    shared_machine.change(failures={"nvmlDeviceGetMemoryInfo": 999})
    shared_server.wait_state(GPU_0.uuid, "SUSPECT")
    assert len(shared_server.up()) == 2
    shared_machine.change(failures={})
    shared_server.wait_state(GPU_0.uuid, "HEALTHY")
    assert not any("is lost" in text for _, text in shared_server.said()[lines:])


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"failures": {"nvmlDeviceGetCount": 999}}, "Unknown Error"),
        ({"driver_version": None}, "Driver Not Loaded"),
    ],
)
def test_a_gpu_comes_back_though_nvml_could_not_be_opened_for_a_while(
    server: Watched, two_gpus: GpuMachine, machine: dict[str, Any], reason: str
) -> None:
    """NVML looks anew only after it was shut down as often as it was initialised."""
    version = two_gpus.now.driver_version
    two_gpus.lose(GPU_0.uuid)
    server.wait_state(GPU_0.uuid, "LOST")
    two_gpus.change(**machine)
    server.wait_log(f"failed to open NVML, GPUs are not monitored now: {reason}")
    wait_until(lambda: server.get("/v2/gpus")["stale"], "nothing is heard")
    two_gpus.change(failures={}, driver_version=version)
    wait_until(lambda: not server.get("/v2/gpus")["stale"], "GPUs are watched again")
    two_gpus.change_gpu(GPU_0.uuid, lost=False)
    server.wait_state(GPU_0.uuid, "HEALTHY")
    wait_until(lambda: len(server.up()) == 2, "both workers are up")


def test_a_gpu_that_tells_little_is_healthy(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by codes that no list has: drivers have more of them than their documentation."""
    untold = ("GetUtilizationRates", "GetTotalEccErrors")
    unheard_of = ("GetRemappedRows", "GetFieldValues")
    failures = {f"nvmlDevice{one}": 3 for one in untold} | {f"nvmlDevice{one}": 999 for one in unheard_of}
    failures["nvmlDeviceGetComputeRunningProcesses"] = 13  # raises NVMLLibraryMismatchError, no NVMLError
    two_gpus.change(failures=failures | {"nvmlEventSetCreate": 4})
    with watched(two_gpus, tmp_path, monkeypatch).until_ended() as server:
        server.wait_watched()
        reading = server.gpu(GPU_0.uuid)["reading"]
        assert (reading["utilization"], reading["ecc_errors_uncorrected"], reading["remapped_rows"]) == (
            None,
        ) * 3
        assert reading["memory_total_bytes"] == GPU_0.memory
        assert server.metric("gpuserve_gpu_ecc_errors_total") == 0
        two_gpus.lose(GPU_0.uuid)
        server.wait_state(GPU_0.uuid, "LOST")


@pytest.mark.parametrize(
    ("machine", "reason"),
    [({"nvml": False}, "NVML Shared Library Not Found"), ({"driver_version": None}, "Driver Not Loaded")],
)
def test_without_nvml_or_a_driver_there_is_one_quiet_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], reason: str
) -> None:
    none = GpuMachine(tmp_path / "gpus", [], **machine)
    cpu = [{"device": "cpu"}]
    with watched(none, tmp_path, monkeypatch, "--log-level", "debug", instances=cpu).until_ended() as server:
        wait_until(lambda: any(reason in text for _, text in server.said()), "the line")
        assert server.get("/v2/gpus") == {"stale": False, "age_seconds": None, "gpus": []}
        assert server.metric("nv_gpu_utilization") == 0
        assert server.status("/v2/health/ready") == 200
        assert server.status("/v2/health/live") == 200
        lines = [one for one in server.said() if "GPU" in one[1]]
        assert lines == [("debug", f"GPUs are not monitored: {reason}")]


def test_nvml_that_hangs_from_the_start_does_not_hinder_models_on_the_cpu(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.change(nvml_hang_s=600.0)
    with watched(stand_in, tmp_path, monkeypatch, instances=[{"device": "cpu"}]).until_killed() as server:
        assert server.infer("m", 1.0).output("y") == [2.0]
        wait_until(lambda: server.get("/v2/gpus")["stale"], "nothing was heard")
        assert server.get("/v2/gpus")["gpus"] == []
        started = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - started < 10
