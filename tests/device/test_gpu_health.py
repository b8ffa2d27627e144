"""GPUs that fail under a server: what is told, what goes on, and what comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import row
from gpu_machine import GPU_0, GPU_1, GpuMachine, Mig, RealMachine
from processes import wait_until
from tritonclient.grpc import InferenceServerClient
from watched_gpus import (
    HELD_NBYTES,
    Watched,
    module_server,
    server,
    shared_machine,
    shared_server,
    watched,
)

__all__ = ["module_server", "server", "shared_machine", "shared_server"]  # fixtures


# ---- what is told -------------------------------------------------------------------------------


def test_what_nvml_says_is_told_and_changes_are_seen(
    shared_server: Watched, shared_machine: GpuMachine
) -> None:
    labels = {"gpu_uuid": GPU_1.uuid, "device": "cuda:1"}
    one = shared_server.gpu(GPU_1.uuid)
    assert (one["device"], one["state"], one["reason"], one["name"]) == ("cuda:1", "HEALTHY", "", GPU_1.name)
    assert shared_server.metric("nv_gpu_memory_total_bytes", gpu_uuid=GPU_1.uuid) == GPU_1.memory
    shared_machine.change_gpu(GPU_1.uuid, temperature=83, power_mw=650_500, ecc_corrected=5, utilization=50)

    def told() -> tuple[float, ...]:
        """One reading may be taken in the middle of the change, the next is of all of it."""
        metric = shared_server.metric
        return (
            metric("gpuserve_gpu_temperature_celsius", **labels),
            metric("gpuserve_gpu_power_watts", **labels),
            metric("gpuserve_gpu_ecc_errors_total", kind="corrected", **labels),
        )

    wait_until(lambda: told() == (83, 650.5, 5), "the new values")
    assert shared_server.metric("nv_gpu_utilization", gpu_uuid=GPU_1.uuid) == 0.5
    assert shared_server.metric("gpuserve_gpu_state", state="healthy") == 2
    assert shared_server.gpu(GPU_1.uuid)["reading"]["temperature_celsius"] == 83


def test_the_memory_of_a_model_on_each_gpu(shared_server: Watched) -> None:
    def memory(device: str) -> float:
        return shared_server.metric("gpuserve_model_gpu_memory_bytes", model="m", version="1", device=device)

    taken = GPU_0.context_memory + HELD_NBYTES  # the driver may be read before the model has all its memory
    wait_until(lambda: min(memory("cuda:0"), memory("cuda:1")) >= taken, "it is seen on both")
    held = memory("cuda:1")
    (statistics,) = shared_server.get("/v2/models/m/stats")["model_stats"]
    usage = {(one["type"], one["id"]): one["byte_size"] for one in statistics["memory_usage"]}
    assert usage.keys() == {("CPU", 0), ("GPU", 0), ("GPU", 1)}
    assert usage["GPU", 1] == held
    assert shared_server.gpu(GPU_1.uuid)["models"] == [{"name": "m", "version": "1", "memory_bytes": held}]
    with InferenceServerClient(shared_server.addresses["gRPC"]) as client:
        (message,) = client.get_inference_statistics("m").model_stats
        assert {(one.type, one.id): one.byte_size for one in message.memory_usage} == usage


def test_in_a_container_the_workers_tell_how_much_gpu_memory_they_hold(
    shared_server: Watched, shared_machine: GpuMachine
) -> None:
    def memory(device: str) -> float:
        return shared_server.metric("gpuserve_model_gpu_memory_bytes", model="m", version="1", device=device)

    wait_until(lambda: min(memory("cuda:0"), memory("cuda:1")) > GPU_1.context_memory, "the driver tells")
    shared_machine.change(in_container=True)
    # Of the host's processes that use the GPU, one has the number of a worker here.
    instances = row(shared_server.addresses["HTTP"], "m")["instances"]
    (pid,) = [one["pid"] for one in instances if one["device"] == "cuda:0"]
    shared_machine.change_gpu(GPU_0.uuid, foreign_pids=(pid,), foreign_memory=3 << 30)
    wait_until(lambda: memory("cuda:1") < GPU_1.context_memory, "the driver knows no worker")
    wait_until(lambda: memory("cuda:0") < GPU_1.context_memory, "the other process is none of ours")
    assert HELD_NBYTES <= memory("cuda:0") < 2 * HELD_NBYTES
    assert HELD_NBYTES <= memory("cuda:1") < 2 * HELD_NBYTES
    shared_machine.change_gpu(GPU_0.uuid, foreign_pids=(), foreign_memory=0)
    shared_machine.change(in_container=False)


def test_the_gpu_that_there_is(
    gpu_machine: GpuMachine | RealMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(
        gpu_machine, tmp_path, monkeypatch, instances=[{"device": "cuda:0"}]
    ).until_ended() as server:
        server.wait_watched()

        def held() -> list[dict[str, Any]]:
            found = [one for one in server.get("/v2/gpus")["gpus"] if one["device"] == "cuda:0"]
            return [one for one in found if one["reading"]["memory_used_bytes"] >= HELD_NBYTES]

        wait_until(held, "the memory of the model is in use")
        (one,) = held()
        assert (one["state"], one["reason"]) == ("HEALTHY", "")
        assert one["uuid"].startswith(("GPU-", "MIG-"))
        assert one["reading"]["memory_used_bytes"] <= one["reading"]["memory_total_bytes"]
        assert server.metric("nv_gpu_memory_total_bytes", gpu_uuid=one["uuid"]) > HELD_NBYTES
        assert server.status("/v2/health/live") == 200


# ---- GPUs that fail -----------------------------------------------------------------------------


def test_a_lost_gpu_is_taken_out_of_use_until_it_is_back(
    shared_server: Watched, shared_machine: GpuMachine
) -> None:
    before = set(shared_server.workers)
    shared_machine.lose(GPU_0.uuid)
    wait_until(lambda: shared_server.up() == {"cuda:1#0"}, "the worker of the lost GPU is gone")
    assert shared_server.state(GPU_0.uuid) == "LOST"
    wait_until(lambda: shared_server.gpu(GPU_0.uuid)["reading"] is None, "its last reading is dropped")
    assert [shared_server.infer("m", 1.0).output("y") for _ in range(5)] == [[2.0]] * 5
    assert shared_server.status("/v2/health/ready") == 200
    assert shared_server.status("/v2/models/m/ready") == 200
    assert len(before & set(shared_server.workers)) == 1, (
        "the other worker goes on, and no new one was started"
    )
    assert shared_server.metric("gpuserve_gpu_state", gpu_uuid=GPU_0.uuid, state="lost") == 1
    shared_machine.change_gpu(GPU_0.uuid, lost=False)
    wait_until(lambda: shared_server.up() == {"cuda:0#0", "cuda:1#0"}, "its worker is back")
    assert shared_server.state(GPU_0.uuid) == "HEALTHY"
    assert any(
        level == "error" and f"GPU cuda:0 ({GPU_0.uuid}) is lost" in text
        for level, text in shared_server.said()
    )


def test_an_xid_of_a_program_is_counted_and_one_of_the_gpu_fences_it(
    shared_server: Watched, shared_machine: GpuMachine
) -> None:
    shared_machine.queue_xid(GPU_1.uuid, 31)
    wait_until(lambda: shared_server.gpu(GPU_1.uuid)["xid_errors"] == {"31": 1}, "the Xid is counted")
    assert shared_server.state(GPU_1.uuid) == "HEALTHY"
    shared_machine.queue_xid(GPU_1.uuid, 95)
    shared_server.wait_state(GPU_1.uuid, "LOST")
    assert shared_server.gpu(GPU_1.uuid)["reason"] == "its driver reported Xid 95"
    assert shared_server.metric("gpuserve_gpu_xid_errors_total", gpu_uuid=GPU_1.uuid) == 2
    wait_until(
        lambda: len(shared_server.up()) == 2 and shared_server.state(GPU_1.uuid) == "HEALTHY", "it is back"
    )


def test_uncorrectable_errors_of_the_memory_fence_it(
    shared_server: Watched, shared_machine: GpuMachine
) -> None:
    shared_machine.change_gpu(GPU_0.uuid, ecc_uncorrected=1)
    shared_server.wait_state(GPU_0.uuid, "LOST")
    assert shared_server.gpu(GPU_0.uuid)["reason"] == "its memory had 1 uncorrectable error"


@pytest.mark.thorough
def test_mig_instances_are_watched_each_and_fail_with_their_gpu(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [f"MIG-00000000-0000-4000-8000-00000000000{one}" for one in "ab"]
    mig = tuple(Mig(uuid, gpu_instance=number) for number, uuid in enumerate(parts, 1))
    stand_in.change_gpu(GPU_0.uuid, mig=mig)
    with watched(stand_in, tmp_path, monkeypatch).until_ended() as server:
        server.wait_watched()
        found = {one["uuid"]: one for one in server.get("/v2/gpus")["gpus"]}
        assert {uuid: one["device"] for uuid, one in found.items()} == dict(
            zip(parts, ("cuda:0", "cuda:1"), strict=True)
        )
        assert found[parts[0]]["reading"]["memory_total_bytes"] == mig[0].memory
        stand_in.queue_xid(GPU_0.uuid, 95)
        for uuid in parts:
            server.wait_state(uuid, "LOST")
        wait_until(lambda: len(server.up()) == 2, "both are back")


@pytest.mark.thorough
def test_with_all_gpus_lost_the_model_says_why_and_liveness_is_for_a_fresh_process_to_say(
    server: Watched, two_gpus: GpuMachine
) -> None:
    two_gpus.lose(GPU_0.uuid)
    two_gpus.lose(GPU_1.uuid)
    wait_until(lambda: server.status("/v2/models/m/ready") == 400, "the model is not ready")
    refused = server.infer("m", 1.0)
    assert refused.status == 503
    assert "model 'm' has no live instance: GPU cuda:0 is lost: " in refused.error
    assert server.get("/v2/models/m/ready")["error"].startswith(
        "Model version not ready: GPU cuda:0 is lost: "
    )
    assert server.status("/v2/health/ready") == 400
    wait_until(lambda: server.status("/v2/health/live") == 400, "no process can use CUDA")
    with InferenceServerClient(server.addresses["gRPC"]) as client:
        assert not client.is_server_live()
    two_gpus.change(gpus=(GPU_0, GPU_1))
    wait_until(lambda: server.status("/v2/health/live") == 200, "CUDA can be used again")
    wait_until(lambda: len(server.up()) == 2, "the workers are back")
    assert server.infer("m", 1.0).output("y") == [2.0]
    assert server.status("/v2/health/ready") == 200


def test_xids_alone_never_make_the_server_not_live(
    shared_server: Watched, shared_machine: GpuMachine
) -> None:
    for uuid in shared_machine.uuids:
        shared_machine.queue_xid(uuid, 48)
    lived: list[int] = []

    def wait_alive(condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: lived.append(shared_server.status("/v2/health/live")) or condition(), what)

    # A GPU is not fenced for long, and perhaps both never at once: only the counters stay.
    gpu, uuids = shared_server.gpu, shared_machine.uuids
    wait_alive(lambda: all("48" in gpu(one)["xid_errors"] for one in uuids), "both GPUs have had an Xid")
    wait_alive(lambda: len(shared_server.up()) == 2, "both are back")
    assert set(lived) == {200}


def test_ready_with_as_many_gpus_as_are_asked_for(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(two_gpus, tmp_path, monkeypatch, "--min-healthy-devices", "2").until_ended() as server:
        server.wait_watched()
        assert server.status("/v2/health/ready") == 200
        two_gpus.lose(GPU_1.uuid)
        wait_until(lambda: server.status("/v2/health/ready") == 400, "one GPU is not enough")
        wait_until(lambda: server.up() == {"cuda:0#0"}, "the worker on the lost GPU is gone")
        assert server.infer("m", 1.0).output("y") == [2.0]
        assert server.status("/v2/health/live") == 200
        two_gpus.change_gpu(GPU_1.uuid, lost=False)
        wait_until(lambda: server.status("/v2/health/ready") == 200, "both are there")


@pytest.mark.thorough
def test_a_new_front_knows_what_the_last_one_knew(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly = ("--gpu-health-interval-s", "0.4")
    with watched(two_gpus, tmp_path, monkeypatch, *slowly).until_ended() as server:
        server.wait_watched()
        two_gpus.queue_xid(GPU_0.uuid, 95)
        server.wait_state(GPU_0.uuid, "LOST")
        wait_until(lambda: server.up() == {"cuda:1#0"}, "its worker is gone")
        os.kill(server.front, signal.SIGKILL)
        wait_until(lambda: server.status("/v2/gpus") == 200, "there is a new front")
        assert server.state(GPU_0.uuid) == "LOST"
        assert server.gpu(GPU_0.uuid)["reason"] == "its driver reported Xid 95"
        assert server.infer("m", 1.0).output("y") == [2.0]
        assert server.up() == {"cuda:1#0"}
        server.wait_state(GPU_0.uuid, "HEALTHY")
        wait_until(lambda: len(server.up()) == 2, "its worker is back")


@pytest.mark.thorough
def test_a_model_is_loaded_without_the_gpu_that_is_lost_and_refused_without_any(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instances = [{"device": "cuda:0"}, {"device": "cuda:1"}]
    flags = ("--model-control", "explicit", "--load-at-start", "[]", "--gpu-health-interval-s", "1")
    with watched(two_gpus, tmp_path, monkeypatch, *flags, instances=instances).until_ended() as server:
        server.wait_watched()
        two_gpus.queue_xid(GPU_0.uuid, 95)
        server.wait_state(GPU_0.uuid, "LOST")
        with InferenceServerClient(server.addresses["gRPC"]) as client:
            client.load_model("m")
            assert client.is_model_ready("m")
            assert server.up() == {"cuda:1#0"}
            client.unload_model("m")
            two_gpus.queue_xid(GPU_0.uuid, 95)
            two_gpus.queue_xid(GPU_1.uuid, 95)
            server.wait_state(GPU_1.uuid, "LOST")
            with pytest.raises(Exception, match="its GPU cuda:0 is lost: its driver reported Xid 95"):
                client.load_model("m")


# ---- CUDA that fails ----------------------------------------------------------------------------


@pytest.mark.thorough
def test_liveness_ends_when_no_fresh_process_can_use_cuda(server: Watched, two_gpus: GpuMachine) -> None:
    two_gpus.change(broken=999)
    assert server.status("/v2/health/live") == 200, "workers that run are not touched"
    assert server.infer("m", 1.0).output("y") == [2.0]
    for pid in server.workers:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.status("/v2/health/live") == 400, "two processes could not use CUDA")
    assert server.status("/v2/health/ready") == 400
    two_gpus.change(broken=0)
    wait_until(lambda: server.status("/v2/health/live") == 200, "one could")
    wait_until(lambda: len(server.up()) == 2, "the workers are back")
