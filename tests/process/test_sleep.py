"""Models on demand that go to sleep in place of ending: their processes stay, and failures end them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import ask
from exploring import variants
from operated import MODELS, InBackground
from processes import wait_until
from test_on_demand import heavy, loads, post, residences, serving


def dozing(folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    return {**heavy(folder, name), "callable": f"{MODELS / 'heavy.py'}:Dozing", "idle_timeout_s": 0.2, **keys}


def naps(folder: Path, name: str = "m") -> str:
    path = folder / name / "naps"
    return path.read_text() if path.exists() else ""


def wait_residence(server: Any, state: str, name: str = "m") -> None:
    wait_until(lambda: residences(server)[name] == state, f"model {name} is {state}")


def test_an_idle_model_sleeps_and_wakes_in_its_process(tmp_path: Path) -> None:
    with serving(tmp_path, dozing(tmp_path, "m", instances=2)) as server:
        pids = set(server.infer("m", 1.0).output("pid"))
        for count in (1, 2):
            wait_residence(server, "ASLEEP")
            assert len(server.workers) == 2
            assert server.status("/v2/health/ready") == server.status("/v2/models/m/ready") == 200
            assert server.metric("gpuserve_evictions_total", model="m", reason="idle") == count
            wait_until(lambda: server.metric("gpuserve_asleep", model="m") == 1, "the metrics show it")
            answer = server.infer("m", 1.0)
            assert answer.output("y") == [2.0]
            assert set(answer.output("pid")) <= set(server.workers)
        assert pids <= set(server.workers)
        assert loads(tmp_path, "m") == 2
        # The first instance that is awake has answered.
        wait_until(lambda: naps(tmp_path).split().count("wake") == 4, "both instances are awake")
        assert server.metric("gpuserve_cold_start_duration_seconds_count", model="m") == 3


@pytest.mark.parametrize("method", variants("wake", "sleep"))
@pytest.mark.parametrize("how", variants("raises", "hangs", "dies"))
def test_a_failure_on_the_way_ends_the_instance_as_a_crash_would(
    tmp_path: Path, method: str, how: str
) -> None:
    with serving(tmp_path, dozing(tmp_path, "m"), load_timeout_s=3 if how == "hangs" else 60) as server:
        (first,) = server.infer("m", 1.0).output("pid")
        mark = tmp_path / "m" / f"{method}_{'hangs' if how == 'dies' else how}"
        if method == "sleep":
            mark.touch()
            if how == "dies":
                wait_until(lambda: naps(tmp_path) == "sleep ", "it goes to sleep")
                os.kill(first, signal.SIGKILL)
            wait_residence(server, "COLD")
        else:
            wait_residence(server, "ASLEEP")
            mark.touch()
        answer = InBackground(server.infer, "m", 1.0)
        if method == "wake" and how == "dies":
            wait_until(lambda: "wake" in naps(tmp_path), "it wakes")
            os.kill(first, signal.SIGKILL)
        wait_until(lambda: loads(tmp_path, "m") >= 2, "another worker loads")
        mark.unlink()
        assert answer.result().output("y") == [2.0]
        assert answer.result().output("pid") != [first]
        if how == "raises":
            server.wait_log(f"{method} of the inference callable of model 'm' raised OSError: no {method}")
        elif how == "hangs":
            server.wait_log(f"not {'asleep' if method == 'sleep' else 'awake'} within 3 s")


@pytest.mark.thorough
def test_operators_and_a_new_front_find_a_sleeping_model(tmp_path: Path) -> None:
    with serving(tmp_path, dozing(tmp_path, "m"), dozing(tmp_path, "n"), model_control="explicit") as server:
        pids = {name: server.infer(name, 1.0).output("pid")[0] for name in "mn"}
        for name in "mn":
            wait_residence(server, "ASLEEP", name)
        server.replace_front()
        assert server.infer("m", 1.0).output("pid") == [pids["m"]]
        wait_residence(server, "ASLEEP")
        os.kill(pids["m"], signal.SIGKILL)
        wait_residence(server, "COLD")
        assert server.infer("m", 1.0).output("y") == [2.0]

        address = server.addresses["HTTP"]
        assert ask(address, "scale", counts={"n": 2}).code == ""
        wait_until(lambda: len(server.workers) == 3, "both instances run")
        wait_residence(server, "ASLEEP", "n")
        assert post(server, "/v2/repository/models/n/load", {}).status == 200
        assert server.infer("n", 1.0).output("pid") != [pids["n"]]
        wait_residence(server, "ASLEEP", "n")
        assert post(server, "/v2/repository/models/n/unload", {}).status == 200
        wait_until(lambda: len(server.workers) == 1, "the workers have ended")
