"""MPS: workers get the daemon and their share of the GPU. The daemon is that of ``cuda_stand_in/mps``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bound
import pytest
from commands import status
from gpu_machine import MPS_PROGRAM, GpuMachine
from operated import config
from processes import finished, wait_ended, wait_until
from serving import GPUSERVE
from watched_gpus import QUICKLY, Watched, model

from gpuserve.core.errors import BadModelConfig
from gpuserve.devices.mps import running_daemon

PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
SHARED = [{"device": "cuda:0", "gpu_share": 0.25}, {"device": "cuda:0"}]


@pytest.fixture
def usual(stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with MPS's program and without a daemon, and the directory where CUDA would find one."""
    stand_in.set_environment(monkeypatch)
    monkeypatch.setenv("PATH", str(MPS_PROGRAM.parent), prepend=os.pathsep)
    directory = tmp_path / "usual"
    monkeypatch.setenv(PIPES, str(directory))
    yield directory
    if directory.exists():
        subprocess.run([MPS_PROGRAM], input=b"quit\n", check=False)


def started(tmp_path: Path, instances: Any, **settings: Any) -> Watched:
    return Watched(config(tmp_path, model(instances=instances), **settings), *QUICKLY)


def variables(pid: int) -> dict[str, str]:
    """The variables of MPS in the environment of a process."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(one.split("=", 1) for one in entries if one.startswith("CUDA_MPS_"))


def rows(server: Watched) -> list[dict[str, Any]]:
    (one,) = status(server.addresses["HTTP"])["models"]
    return list(one["instances"])


def text(server: Watched) -> str:
    return str(status(server.addresses["HTTP"])["server"]["mps"])


def daemon_pid(directory: Path | str) -> int:
    return int(Path(directory, "nvidia-cuda-mps-control.pid").read_text())


def test_a_daemon_lives_as_long_as_the_server_for_instances_with_a_share(usual: Path, tmp_path: Path) -> None:
    with started(tmp_path, SHARED).until_killed() as server:
        sharing, other = (variables(one["pid"]) for one in rows(server))
        assert sharing[SHARE] == "25"
        assert sharing[PIPES] == sharing[LOGS] != str(usual)
        assert other == {PIPES: str(usual)}
        assert text(server) == f"own daemon in {sharing[PIPES]}"
        pid = daemon_pid(sharing[PIPES])
        os.kill(pid, signal.SIGKILL)
        (before, _) = rows(server)
        os.kill(before["pid"], signal.SIGKILL)
        wait_until(lambda: rows(server)[0]["restarts"] and rows(server)[0]["state"] == "READY", "a restart")
        again = variables(rows(server)[0]["pid"])
        assert daemon_pid(again[PIPES]) != pid
        pid = daemon_pid(again[PIPES])
        assert server.end() == 0
        assert not wait_ended([pid], 5.0)
        assert not any(Path(one[PIPES]).exists() for one in (sharing, again))


def test_no_daemon_is_left_when_the_server_is_killed(usual: Path, tmp_path: Path) -> None:
    with started(tmp_path, SHARED).until_killed() as server:
        directory = variables(rows(server)[0]["pid"])[PIPES]
        pid = daemon_pid(directory)
        server.process.kill()
        assert not wait_ended([pid], 5.0)
        wait_until(lambda: not Path(directory).exists(), "its directory is removed")


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_daemon_that_runs_is_used_and_left(usual: Path, tmp_path: Path, mode: str) -> None:
    subprocess.run([MPS_PROGRAM, "-d"], check=True)
    with started(tmp_path, SHARED, mps=mode).until_ended() as server:
        sharing, other = (variables(one["pid"]) for one in rows(server))
        assert (sharing, other) == ({PIPES: str(usual), SHARE: "25"}, {PIPES: str(usual)})
        assert text(server) == f"daemon in {usual}"
    assert running_daemon() == str(usual)


def test_all_workers_on_gpus_use_the_servers_own_daemon_with_on(usual: Path, tmp_path: Path) -> None:
    with started(tmp_path, [{"device": "cuda:0"}, {"device": "cpu"}], mps="on").until_ended() as server:
        on_gpu, on_cpu = (variables(one["pid"]) for one in rows(server))
        assert text(server) == f"own daemon in {on_gpu[PIPES]}"
        assert on_cpu == {PIPES: str(usual)}
        assert SHARE not in on_gpu


def test_workers_do_not_find_a_daemon_with_off(usual: Path, tmp_path: Path) -> None:
    subprocess.run([MPS_PROGRAM, "-d"], check=True)
    with started(tmp_path, SHARED, mps="off").until_ended() as server:
        assert [variables(one["pid"]) for one in rows(server)] == [{PIPES: os.devnull}] * 2


def doctor(file: Path) -> tuple[int, list[dict[str, str]]]:
    done = finished([GPUSERVE, "doctor", str(file), "--json"])
    found = json.loads(done.stdout)["findings"]
    return done.returncode, [one for one in found if "mps: " in one["text"]]


@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.usefixtures("usual")
def test_mps_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(os.pathsep)[2])
    missing = "nvidia-cuda-mps-control is not on the PATH, and no control daemon has its pipes in"
    with started(tmp_path, SHARED, mps=mode) as server:
        if mode == "on":
            assert server.process.wait(30) != 0
            assert any(f"cannot start MPS: {missing}" in one["msg"] for one in server.messages())
        else:
            server.wait_ready()
            server.wait_log(f"gpu_share of instances has no effect: cannot start MPS: {missing}")
            assert missing in text(server)
            assert server.end() == 0
    status_, (finding,) = doctor(tmp_path / "config.yaml")
    assert (finding["level"], missing in finding["text"]) == ("fault" if mode == "on" else "warning", True)
    assert (status_ != 0) == (mode == "on")


@pytest.mark.usefixtures("usual")
def test_the_reason_of_a_daemon_that_does_not_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPS_STAND_IN_REFUSES", "1")
    with started(tmp_path, SHARED).until_ended() as server:
        server.wait_log(
            "cannot start MPS: nvidia-cuda-mps-control -d failed: Failed to start : no GPU for MPS"
        )
        assert SHARE not in variables(rows(server)[0]["pid"])


class Doubled:
    def __call__(self, requests: Any) -> Any:
        return [{"OUTPUT_1": one["INPUT_1"] * 2} for one in requests]


#: A program that serves what a worker has in its environment.
BOUND = f"""
import os, bound
def share(requests):
    return [{{"OUTPUT_1": one["INPUT_1"] * float(os.environ[{SHARE!r}])}} for one in requests]
with bound.free_server() as server:
    server.bind("m", share, **bound.FLOATS_IN_AND_OUT, device="cuda:0", gpu_share=0.5)
    server.run()
    print(bound.ask(server, "m", 1.0))
"""


@pytest.mark.usefixtures("usual")
def test_a_bound_callable_has_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(bound.__file__).parent), prepend=os.pathsep)
    done = finished([sys.executable, "-c", BOUND])
    assert done.stdout == "[50.0]\n", done.stderr


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"gpu_share": 0.5}, "gpu_share is 0.5 for instance '0' on the CPU: expected a GPU as device"),
        ({"gpu_share": 1.5, "device": "cuda:0"}, "gpu_share must be"),
        (
            {"gpu_share": 0.5, "device": "cuda:0", "isolation": "thread"},
            "gpu_share does not go with isolation",
        ),
    ],
)
def test_a_share_that_has_no_effect_is_refused(kwargs: dict[str, Any], told: str) -> None:
    with bound.free_server() as server, pytest.raises(BadModelConfig, match=told):
        server.bind("m", Doubled(), **bound.FLOATS_IN_AND_OUT, **kwargs)


def test_a_share_of_an_instance_on_the_cpu_is_refused_in_a_config(tmp_path: Path) -> None:
    file = config(tmp_path, model(instances=[{"gpu_share": 0.25}]))
    done = finished([GPUSERVE, "check", str(file)])
    assert done.returncode != 0
    told = "gpu_share is 0.25 for instance 'cpu#0' on the CPU: expected a GPU as device, or no gpu_share"
    assert told in " ".join((done.stdout + done.stderr).split())
