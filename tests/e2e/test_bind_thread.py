"""``isolation="thread"``: the callable stays in the program, everything else is as with a process."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bound import FLOATS, FLOATS_IN_AND_OUT, InBackground, Refused, ask, free_server, infer, status
from processes import children, command_line, wait_until

from gpuserve import ModelConfig, Request, Server, Tensor
from gpuserve.core.errors import BindError, StartupError
from gpuserve.decorators import batch
from gpuserve.supervisor.workers import worker_monitor

#: float32 values that go through an arena and not through a message.
LARGE = 64 * 1024


@pytest.fixture
def server() -> Iterator[Server]:
    with free_server() as one:
        yield one
    assert [one.name for one in threading.enumerate() if one.name.startswith("gpuserve")] == []


class Locked:
    """What cannot be pickled: a lock, and threads that it was handed to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seen: list[Any] = []

    def __call__(self, requests: list[Request]) -> list[dict[str, Any]]:
        with self.lock:
            self.seen.append((os.getpid(), threading.current_thread().name))
            return [{"OUTPUT_1": 2 * one["INPUT_1"]} for one in requests]


def test_the_very_object_runs_in_a_thread_of_this_process(server: Server) -> None:
    locked = Locked()
    server.bind("locked", locked, **FLOATS_IN_AND_OUT, isolation="thread")
    server.run()
    assert ask(server, "locked", 1.0) == [2]
    assert locked.seen == [(os.getpid(), "gpuserve-locked/0")]
    assert not [pid for pid in children(os.getpid()) if "gpuserve_worker" in command_line(pid)]


def test_large_tensors_are_shared_memory_and_all_of_it_is_given_back(server: Server) -> None:
    kept: list[Any] = []

    @batch
    def keep(INPUT_1: Any) -> Any:
        kept.append(INPUT_1)
        return [INPUT_1 + 1]

    server.bind("keep", keep, **FLOATS_IN_AND_OUT, isolation="thread")
    server.run()
    for value in range(3):
        sent = np.full((1, LARGE), value, np.float32)
        assert (infer(server, "keep", INPUT_1=sent)["OUTPUT_1"] == value + 1).all()
    assert [one[0, 0] for one in kept] == [0, 1, 2]
    server.stop()
    assert [one[0, -1] for one in kept] == [0, 1, 2]  # the arrays outlive the server
    assert _memfds()
    kept.clear()
    gc.collect()
    assert not _memfds()


def _memfds() -> list[str]:
    maps = Path("/proc/self/maps").read_text()
    return [line for line in maps.splitlines() if "memfd:gpuserve" in line]


@pytest.mark.thorough
def test_several_instances_are_several_threads(server: Server) -> None:
    both = threading.Barrier(2)

    @batch
    def meet(INPUT_1: Any) -> Any:
        both.wait(20)
        return [np.full((len(INPUT_1), 1), threading.get_ident(), np.int64)]

    server.bind(
        "meet",
        [meet, meet],
        inputs=[FLOATS],
        outputs=[Tensor((1,), np.int64)],
        config=ModelConfig(max_batch_size=1),
        isolation="thread",
    )
    server.run()
    asked = [InBackground(ask, server, "meet", 0.0) for _ in range(2)]
    assert len({one.result()[0] for one in asked}) == 2


def test_a_class_is_made_in_the_thread_and_its_failure_is_told(server: Server) -> None:
    class Broken:
        def __init__(self) -> None:
            raise RuntimeError(f"not in {threading.current_thread().name}")

        def __call__(self, requests: Any) -> Any:
            raise AssertionError("it was not made")

    server.run()
    with pytest.raises(StartupError, match=r"'bad'.* not in gpuserve-bad/0"):
        server.bind("bad", Broken, **FLOATS_IN_AND_OUT, isolation="thread")
    server.bind("bad", Locked, **FLOATS_IN_AND_OUT, isolation="thread")
    assert ask(server, "bad", 1.0) == [2]


def test_a_class_that_is_not_made_in_time_fails_the_start() -> None:
    go_on = threading.Event()

    class Slow:
        def __init__(self) -> None:
            assert go_on.wait(20)

        def __call__(self, requests: list[Request]) -> list[Request]:
            return requests

    server = free_server(load_timeout_s=0.1)
    server.bind("slow", Slow, **FLOATS_IN_AND_OUT, isolation="thread")
    with pytest.raises(StartupError, match=r"not loaded within 0\.1 s"):
        server.run()
    (left,) = [one for one in threading.enumerate() if one.name == "gpuserve-slow/0"]
    go_on.set()
    left.join(20)
    assert not left.is_alive()


def test_stop_finishes_the_call_at_hand(server: Server) -> None:
    called, go_on = threading.Event(), threading.Event()

    def wait(requests: list[Request]) -> list[Request]:
        called.set()
        assert go_on.wait(20)
        return requests

    server.bind("wait", wait, **FLOATS_IN_AND_OUT, isolation="thread")
    server.run()
    asked = InBackground(ask, server, "wait", 3.0)
    assert called.wait(20)
    stopped = InBackground(server.stop)
    go_on.set()
    assert asked.result() == [3]
    stopped.result()


@pytest.mark.thorough
def test_a_thread_that_ends_is_followed_by_another(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    threads: list[int] = []

    def once(requests: list[Request]) -> list[Request]:
        threads.append(threading.get_ident())
        if len(threads) == 1:
            raise SystemExit(3)
        return requests

    server.bind("once", once, **FLOATS_IN_AND_OUT, isolation="thread")
    server.run()
    assert ask(server, "once", 1.0) == [1]  # run once more, as after the death of a process
    assert len(threads) == 2
    assert "its thread ended by SystemExit" in caplog.text
    assert worker_monitor.__name__ in {record.name for record in caplog.records}


@pytest.mark.thorough
def test_a_new_front_finds_the_same_thread(server: Server) -> None:
    locked = Locked()
    server.bind("locked", locked, **FLOATS_IN_AND_OUT, isolation="thread")
    server.run()
    assert ask(server, "locked", 1.0) == [2]
    (front,) = [pid for pid in children(os.getpid()) if "gpuserve.front.process " in command_line(pid)]
    os.kill(front, signal.SIGKILL)
    wait_until(lambda: _ready(server), "another front is ready")
    assert (infer(server, "locked", INPUT_1=np.ones((1, LARGE), np.float32))["OUTPUT_1"] == 2).all()
    assert len(locked.seen) == 2


def _ready(server: Server) -> bool:
    try:
        return status(server, "/v2/health/ready") == 200
    except OSError:
        return False


def test_the_other_isolation_names_what_cannot_be_pickled(server: Server) -> None:
    with pytest.raises(BindError) as error:
        server.bind("locked", Locked(), **FLOATS_IN_AND_OUT)
    text = str(error.value)
    assert "the Locked object cannot be sent to a worker process: its 'self.lock' is of type lock" in text
    assert "device" in text
    assert 'isolation="thread"' in text


def test_the_callables_exception_is_the_clients(server: Server) -> None:
    server.bind("m", lambda requests: 1 // 0, **FLOATS_IN_AND_OUT, isolation="thread")
    server.run()
    with pytest.raises(Refused, match="modulo by zero") as refused:
        ask(server, "m", 1.0)
    assert refused.value.status == 500
