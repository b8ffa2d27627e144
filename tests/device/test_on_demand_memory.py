"""Models on demand within a budget of memory on each GPU."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import status
from gpu_machine import GPU_0, GpuMachine
from operated import MODELS, config
from processes import wait_until
from watched_gpus import HELD_NBYTES, QUICKLY, Watched, model

from gpuserve.supervisor.models.on_demand import GIVE_WAY_S

#: The driver counts the CUDA context of a process as well.
TAKEN_NBYTES = GPU_0.context_memory + HELD_NBYTES


def test_models_go_for_others_on_their_own_gpu(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus.set_environment(monkeypatch)
    placed = {"a": "cuda:0", "b": "cuda:0", "c": "cuda:0", "elsewhere": "cuda:1", "host": "cpu"}
    models = [
        model(name=name, on_demand=True, instances=[{"device": device}]) for name, device in placed.items()
    ]
    file = config(tmp_path, *models, memory={"cuda": int(2.5 * TAKEN_NBYTES)})
    with Watched(file, *QUICKLY).until_ended() as server:
        for name in ("elsewhere", "host", "a", "b", "a", "c"):
            if name == "c":
                asked_at = time.monotonic()
                wait_until(lambda at=asked_at: time.monotonic() - at > GIVE_WAY_S, "no model counts as used")
                assert server.infer("a", 1.0).output("y") == [2.0]
            assert server.infer(name, 1.0).output("y") == [2.0]
            wait_until(
                lambda name=name: (
                    placed[name] == "cpu"
                    or server.metric("gpuserve_resident_memory_bytes", model=name, device=placed[name])
                    == TAKEN_NBYTES
                ),
                "the memory is measured",
            )
        document = status(server.addresses["HTTP"])
        assert {one["name"]: one["residence"] for one in document["models"]} == {
            **dict.fromkeys(("elsewhere", "host", "a", "c"), "RESIDENT"),
            "b": "COLD",
        }
        expected = {"cuda:0": 2 * TAKEN_NBYTES, "cuda:1": TAKEN_NBYTES}

        def taken() -> dict[str, int]:
            return {key: one["nbytes"] for key, one in status(server.addresses["HTTP"])["memory"].items()}

        # The driver may have been read before the latest worker had all its memory.
        wait_until(lambda: taken() == expected, "both models on the first GPU count")


@pytest.mark.thorough
def test_a_model_over_several_gpus_counts_on_each(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus.set_environment(monkeypatch)
    wide = model(name="wide", on_demand=True, instances=[{"device": ["cuda:0", "cuda:1"]}])
    models = [wide, model(name="a", on_demand=True, instances=[{"device": "cuda:0"}])]
    file = config(tmp_path, *models, memory={"cuda": int(1.5 * TAKEN_NBYTES)})
    with Watched(file, *QUICKLY).until_ended() as server:
        assert server.infer("wide", 1.0).output("y") == [2.0]

        def taken() -> list[int]:
            memory = status(server.addresses["HTTP"])["memory"]
            return [memory[device]["nbytes"] for device in ("cuda:0", "cuda:1")]

        wait_until(lambda: min(taken()) >= TAKEN_NBYTES // 2, "the memory is measured")
        assert taken()[0] == taken()[1]
        assert server.infer("a", 1.0).output("y") == [2.0]


def test_a_model_that_waits_for_one_gpu_leaves_the_other_to_later_ones(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus.set_environment(monkeypatch)
    placed = {"busy": "cuda:0", "waits": "cuda:0", "elsewhere": "cuda:1"}
    keys = {"callable": f"{MODELS / 'heavy.py'}:Heavy", "kwargs": {"folder": str(tmp_path)}}
    keys |= {"on_demand": True, "memory_nbytes": 768 << 20}
    models = [model(name=name, instances=[{"device": device}], **keys) for name, device in placed.items()]
    loads, gate = tmp_path / "loads", tmp_path / "busy"
    with Watched(config(tmp_path, *models, memory={"cuda": 1 << 30}), *QUICKLY).until_ended() as server:
        gate.touch()
        with ThreadPoolExecutor() as clients:
            asked = [clients.submit(server.infer, "busy", 1.0)]
            wait_until(loads.exists, "the first model is loaded")
            asked.append(clients.submit(server.infer, "waits", 1.0))
            wait_until(
                lambda: server.metric("nv_inference_pending_request_count", model="waits") == 1,
                "the second model is asked for",
            )
            asked.append(clients.submit(server.infer, "elsewhere", 1.0))
            wait_until(lambda: len(loads.read_text().splitlines()) == 2, "the third model is loaded")
            assert server.metric("nv_inference_pending_request_count", model="waits") == 1
            gate.unlink()
            assert [one.result().output("y") for one in asked] == [[2.0]] * 3


@pytest.mark.thorough
def test_models_sleep_on_the_host_while_it_has_room_and_wake_with_their_weights(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus.set_environment(monkeypatch)
    held, keys = 768 << 20, {"on_demand": True, "callable": f"{MODELS / 'holds_memory.py'}:Sleeper"}
    keys |= {"kwargs": {"nbytes": held}, "instances": [{"device": "cuda:0"}]}
    models = [model(name=name, **keys) for name in "abc"]
    # On the GPU one is awake beside the contexts of two; on the host there is room for one asleep.
    context_nbytes = GPU_0.context_memory
    memory = {"cuda": held + 3 * context_nbytes + (1 << 20), "host": int(3.5 * held)}  # with the processes
    with Watched(config(tmp_path, *models, memory=memory), *QUICKLY).until_ended() as server:
        pids = {}
        for name in "ababcc":
            answer = server.infer(name, 1.0)
            assert answer.output("y") == [3.0]
            pids.setdefault(name, answer.output("pid"))
            if name != "c":
                assert answer.output("pid") == pids[name], "it woke in its process"
            document = status(server.addresses["HTTP"])["memory"]
            assert all(one["nbytes"] <= one["limit_nbytes"] for one in document.values()), document
            asked_at = time.monotonic()
            wait_until(lambda at=asked_at: time.monotonic() - at > GIVE_WAY_S, "no model counts as used")
        found = {one["name"]: one["residence"] for one in status(server.addresses["HTTP"])["models"]}
        assert found == {"a": "COLD", "b": "ASLEEP", "c": "RESIDENT"}
