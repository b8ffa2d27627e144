"""Weights that the instances of a server share: loaded once, mapped by all, freed with the last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import ask as operate
from commands import status
from operated import MODELS, InBackground, OperatedServer, Orders, config, model
from processes import wait_until
from weights import kill_workers, loads, shared, write_weights

NBYTES = 64 << 20
TWO = [{"device": "cpu", "count": 2}]


@contextmanager
def operated(folder: Path, *names: str, **kwargs: Any) -> Iterator[OperatedServer]:
    write_weights(folder, 1.0, NBYTES)
    given = {"kwargs": {"folder": str(folder), **kwargs}, "instances": TWO}
    given |= {"callable": f"{MODELS / 'shared.py'}:Shared"}
    models = [model(name, Orders(folder), **given) for name in names]
    with OperatedServer(config(folder, *models)).until_ended() as server:
        yield server


def answers(server: OperatedServer, name: str) -> dict[int, tuple[float, int]]:
    """The first weight and the anonymous memory of each instance, by process."""
    found: dict[int, tuple[float, int]] = {}
    while len(found) < 2:
        for one in [InBackground(server.infer, name, 1.0) for _ in range(4)]:
            answer = one.result()
            found[answer.output("pid")[0]] = (answer.output("y")[0], answer.output("calls")[0])
    return found


def test_weights_are_loaded_once_and_freed_with_their_last_instance(tmp_path: Path) -> None:
    with operated(tmp_path, "a", "b") as server:
        for name in ("a", "b"):
            for first, anonymous_nbytes in answers(server, name).values():
                assert first == 1.0
                assert anonymous_nbytes < NBYTES
        assert loads(tmp_path) == 1
        (row,) = shared(server)
        assert (row["name"], row["state"]) == ("numbers", "SHARED")
        assert list(row["instances"]) == ["a/cpu#0", "a/cpu#1", "b/cpu#0", "b/cpu#1"]
        assert server.metric("gpuserve_shared_weights_bytes", weights="numbers") == row["nbytes"] > NBYTES
        assert server.metric("gpuserve_shared_weights_instances", weights="numbers") == 4
        refused = server.infer("a", -5.0)
        assert (refused.status, "read-only" in refused.error) == (500, True)

        kill_workers(server)
        assert {first for first, _ in answers(server, "a").values()} == {1.0}
        assert loads(tmp_path) == 1

        write_weights(tmp_path, 2.0, NBYTES)
        operate(server.addresses["HTTP"], "reload", model="a")
        assert {first for first, _ in answers(server, "a").values()} == {2.0}
        assert {first for first, _ in answers(server, "b").values()} == {1.0}
        assert loads(tmp_path) == 2
        wait_until(lambda: len(server.workers) == 4, "the earlier workers have ended")
        assert len(shared(server)) == 2
        operate(server.addresses["HTTP"], "unload", model="b")
        wait_until(lambda: len(shared(server)) == 1, "the earlier version is freed")


@pytest.mark.thorough
def test_a_loader_that_dies_is_followed_by_another_instance(tmp_path: Path) -> None:
    with operated(tmp_path, "a", copy_on_write=True) as server:
        written = server.infer("a", -3.0)
        assert written.output("y") == [3.0]
        (writer,) = written.output("pid")
        assert {pid: first for pid, (first, _) in answers(server, "a").items()} == {
            pid: 3.0 if pid == writer else 1.0 for pid in server.workers
        }
        write_weights(tmp_path, 4.0, NBYTES)
        (tmp_path / "die").touch()
        kill_workers(server)
        assert {first for first, _ in answers(server, "a").values()} == {4.0}
        assert loads(tmp_path) == 3
        (row,) = shared(server)
        assert list(row["instances"]) == ["a/cpu#0", "a/cpu#1"]


def anonymous_nbytes(pid: int) -> int:
    """The memory of a process that is its own."""
    fields = Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1]
    return int(fields.split()[0]) << 10


@pytest.mark.thorough
def test_copies_on_a_device_go_while_the_model_sleeps_without_code_of_the_callable(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_weights(tmp_path, 1.0, NBYTES)
    on_demand = {"on_demand": True, "idle_timeout_s": 0.2, "kwargs": {"folder": str(tmp_path)}}
    given = model("a", Orders(tmp_path), callable=f"{MODELS / 'shared.py'}:OnDevice", **on_demand)
    with OperatedServer(config(tmp_path, given)).until_ended() as server:

        def residence() -> str:
            return str(status(server.addresses["HTTP"])["models"][0]["residence"])

        (pid,) = server.infer("a", 1.0).output("pid")
        for _ in range(2):
            wait_until(lambda: residence() == "ASLEEP", "the model sleeps")
            asleep_nbytes = anonymous_nbytes(pid)
            answer = server.infer("a", 1.0)
            assert (answer.output("pid"), answer.output("y")) == ([pid], [1.0])
            assert answer.output("calls") == [NBYTES // 4]
            assert anonymous_nbytes(pid) - asleep_nbytes > 0.9 * NBYTES
        assert loads(tmp_path) == 1
        assert len(shared(server)) == 1
