"""Calls between models while processes die, and calls that could wait for ever: on a real server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from operated import InBackground, OperatedServer
from processes import wait_until

MODELS = Path(__file__).resolve().parents[1] / "models"
#: The title of a worker process begins like this; the kernel keeps 15 bytes of it.
TITLE = "gs:"


def entry(callable_: str, name: str = "", **more: Any) -> dict[str, Any]:
    file, attribute = callable_.split(":")
    return {
        "name": name or attribute,
        "callable": f"{MODELS / file}:{attribute}",
        "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [-1]}],
        "max_batch_size": 8,
        **more,
    }


def server(folder: Path, *entries: dict[str, Any]) -> OperatedServer:
    path = folder / "config.yaml"
    path.write_text(json.dumps({"server": {"host": "127.0.0.1", "lame_duck_s": 0}, "models": list(entries)}))
    return OperatedServer(path)


def worker_of(server: OperatedServer, model: str) -> int:
    """The process of a model's one instance; 0 where there is none."""
    title = f"{TITLE}{model}/"[:15]
    for pid in server.workers:
        with contextlib.suppress(OSError):  # it dies at this moment
            if Path(f"/proc/{pid}/comm").read_text().startswith(title):
                return pid
    return 0


def kill_worker(server: OperatedServer, model: str) -> None:
    """Kill a model's one instance, and wait for the next one."""
    pid = worker_of(server, model)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: worker_of(server, model) not in (0, pid), "another worker is started")
    wait_until(lambda: server.metric("gpuserve_worker_up", model=model) == 1, "it is loaded")


def blocks(server: OperatedServer) -> float:
    return server.metric("gpuserve_arena_blocks")


BESIDE = (
    entry("asking.py:doubled"),
    entry("asking.py:count", decoupled=True),
    entry("asking_hard.py:AsksBeside", "beside"),
)


def answered(server: OperatedServer) -> float:
    (count,) = server.infer("beside", 1.0).output("y")
    return float(count)


def wait_for_more(server: OperatedServer) -> None:
    """Wait until calls are answered again."""
    before = answered(server)
    wait_until(lambda: answered(server) > before + 10, "calls are answered")


@pytest.mark.thorough
def test_threads_go_on_asking_over_fronts_that_die(tmp_path: Path) -> None:
    with server(tmp_path, *BESIDE).until_ended() as operated:
        workers = operated.workers
        wait_for_more(operated)
        for _ in range(3):
            operated.replace_front()
            wait_for_more(operated)
        assert operated.workers == workers  # none of them fell over a message of another front


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["doubled", "beside"])
def test_a_worker_may_die_while_its_memory_is_lent_or_it_borrows(tmp_path: Path, victim: str) -> None:
    with server(tmp_path, *BESIDE).until_ended() as operated:
        front, held = operated.front, []

        def shared() -> int:
            return segments(front) + segments(worker_of(operated, "doubled"))

        for _ in range(2):
            wait_for_more(operated)
            held.append(shared())
            kill_worker(operated, victim)
        wait_for_more(operated)
        assert operated.front == front
        wait_until(lambda: blocks(operated) == 0, "the front's own memory is free")
        # Three threads with 64 KiB each: a segment an arena is enough, whoever has died.
        wait_until(lambda: shared() <= held[0], f"no more than {held} descriptors")


def segments(pid: int) -> int:
    """How many descriptors of shared memory a process has open."""
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(os.readlink(one))
    return sum(one.startswith("/memfd:gpuserve ") for one in found)


@pytest.mark.thorough
def test_a_call_that_is_given_up_in_an_event_loop_of_its_own_does_not_hold_the_callable(
    tmp_path: Path,
) -> None:
    entries = entry("asking.py:slow"), entry("asking_hard.py:gives_up_on_slow", "impatient")
    with server(tmp_path, *entries).until_ended() as operated:
        for _ in range(3):
            assert operated.infer("impatient", 1.0).output("y") == [0.0]
        assert operated.infer("slow", 2.0).output("y") == [2.0]


@pytest.mark.thorough
def test_a_request_that_was_accepted_may_ask_while_the_server_drains(tmp_path: Path) -> None:
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    late = entry("asking_hard.py:AsksLate", "late", kwargs={"fifo": str(fifo)})
    with server(tmp_path, *BESIDE, late).until_killed() as operated:
        wait_for_more(operated)  # threads of another model ask all the time, which holds nothing up
        asked = InBackground(operated.infer, "late", 4.0)
        wait_until(lambda: operated.metric("gpuserve_running_requests", model="late") == 1, "it runs")
        operated.process.send_signal(signal.SIGTERM)
        wait_until(lambda: operated.status("/v2/health/ready") != 200, "it drains")
        started = time.monotonic()
        fifo.write_bytes(b"x")
        assert asked.result().output("y") == [8.0]
        assert operated.process.wait(20) == 0
        assert time.monotonic() - started < 10.0


# ---- a model that asks itself ----------------------------------------------------------------


def test_a_model_of_one_instance_that_asks_itself_is_refused(tmp_path: Path) -> None:
    with server(tmp_path, entry("asking_hard.py:asks_itself")).until_ended() as operated:
        for _ in range(3):
            started = time.monotonic()
            refused = operated.infer("asks_itself", 1.0)
            assert refused.status == 503
            assert refused.error == (
                "model 'asks_itself' asks itself, but all of its instances (1) wait for such an answer: "
                "expected one that is free"
            )
            assert time.monotonic() - started < 5.0
            assert operated.infer("asks_itself", 0.0).output("y") == [0.0]


@pytest.mark.thorough
def test_as_many_instances_as_calls_within_each_other_are_enough(tmp_path: Path) -> None:
    entries = entry("asking_hard.py:asks_itself", instances=[{"device": "cpu", "count": 3}])
    with server(tmp_path, entries).until_ended() as operated:
        for _ in range(5):
            assert operated.infer("asks_itself", 2.0).output("y") == [2.0]
            assert "all of its instances (3) wait" in operated.infer("asks_itself", 3.0).error


@pytest.mark.thorough
def test_a_model_on_an_event_loop_may_ask_itself(tmp_path: Path) -> None:
    with server(tmp_path, entry("asking_hard.py:asks_itself_async", "asks_itself")).until_ended() as operated:
        assert operated.infer("asks_itself", 5.0).output("y") == [5.0]
