"""The division of the cores among instances, as workers and operators see it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from commands import gpuserve, row
from operated import OperatedServer, Orders, config, model
from test_scale import scaled, well

CORES = len(os.sched_getaffinity(0))
LIBRARIES = {"OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"}


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", *LIBRARIES):
        monkeypatch.delenv(name, raising=False)


def variables(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_text()
    pairs = (one.partition("=") for one in text.split("\0"))
    return {name: value for name, _, value in pairs if name.endswith("_THREADS")}


def served(folder: Path, **keys: Any) -> OperatedServer:
    return OperatedServer(config(folder, model("m", Orders(folder / "orders"), **keys), host="127.0.0.1"))


def test_instances_share_the_cores_and_new_ones_too(tmp_path: Path) -> None:
    with served(tmp_path, instances=[{"count": CORES + 1}]).until_ended() as server:
        address = server.addresses["HTTP"]
        assert [one["threads"] for one in row(address, "m")["instances"]] == [1] * (CORES + 1)
        assert all(variables(pid) == {"OMP_NUM_THREADS": "1"} for pid in server.workers)
        well(scaled(server, m=1))
        os.kill(server.workers[0], 9)
        server.wait_log("loaded in", times=CORES + 2)
        (alone,) = row(address, "m")["instances"]
        whole = CORES - min(1, CORES // 8)
        assert alone["threads"] == whole
        assert variables(alone["pid"]) == {"OMP_NUM_THREADS": str(whole)}


@pytest.mark.thorough
def test_what_the_user_sets_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    monkeypatch.setenv("MKL_NUM_THREADS", "5")
    cpu = min(os.sched_getaffinity(0))
    instances = [{"threads": 7, "cpus": [cpu]}, {}]
    with served(tmp_path, instances=instances).until_ended() as server:
        own, other = row(server.addresses["HTTP"], "m")["instances"]
        assert (own["threads"], other["threads"]) == (7, 3)
        assert variables(own["pid"]) == dict.fromkeys(("OMP_NUM_THREADS", *LIBRARIES), "7")
        assert variables(other["pid"]) == {"OMP_NUM_THREADS": "3,2", "MKL_NUM_THREADS": "5"}
        assert os.sched_getaffinity(own["pid"]) == {cpu}
        assert os.sched_getaffinity(other["pid"]) == os.sched_getaffinity(0)
    if CORES < 10:
        server.wait_log("2 instances have 10 threads")
        found = gpuserve("doctor", str(tmp_path / "config.yaml"))
        assert "2 instances have 10 threads" in " ".join(found.stdout.split())


def test_a_cpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    missing = max(os.sched_getaffinity(0)) + 1
    path = config(tmp_path, model("m", Orders(tmp_path / "orders"), instances=[{"cpus": [missing]}]))
    found = gpuserve("serve", str(path))
    assert found.status != 0
    assert f"instance cpu#0 names CPU {missing}, and this process may use" in found.stderr
