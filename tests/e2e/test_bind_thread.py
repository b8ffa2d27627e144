"""``isolation="thread"``: the callable stays in the program, everything else is as with a process."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from bound import FLOATS, FLOATS_IN_AND_OUT, InBackground, Refused, ask, free_server, infer, status
from leaks import own_name
from processes import children, command_line, finished, wait_until
from tritonclient.utils import InferenceServerException

from gpuserve import ModelCallError, ModelConfig, Request, Server, Tensor, current_model
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


# ---- callables in threads that ask each other ----------------------------------------------------


@batch
def doubled(INPUT_1: Any) -> Any:
    return {"OUTPUT_1": INPUT_1 * 2}


def asks(requests: list[Request]) -> Any:
    model = current_model()
    answers = [model.infer("doubled", {"INPUT_1": one["INPUT_1"]}) for one in requests]
    return [{"OUTPUT_1": one["OUTPUT_1"] + 1} for one in answers]


def asks_itself(requests: list[Request]) -> Any:
    try:
        return [current_model().infer("asks_itself", one.data) for one in requests]
    except ModelCallError as error:
        raise ValueError(f"it was told: {error.code.value}") from None


@pytest.fixture
def asking_server() -> Iterator[Server]:
    with free_server() as made:
        for callable_ in (doubled, asks, asks_itself):
            made.bind(callable_.__name__, callable_, **FLOATS_IN_AND_OUT, isolation="thread")
        made.bind("process", asks, **FLOATS_IN_AND_OUT)
        made.run()
        yield made


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["asks", "process"])
def test_threads_and_processes_ask_threads(asking_server: Server, model: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: ask(asking_server, model, n), range(40)))
    assert answers == [[2 * n + 1] for n in range(40)]
    large = np.full((1, LARGE), 3, np.float32)
    assert (infer(asking_server, model, INPUT_1=large)["OUTPUT_1"] == 7).all()


def test_a_thread_that_asks_itself_is_refused(asking_server: Server) -> None:
    with pytest.raises(Refused, match="it was told: UNAVAILABLE"):
        ask(asking_server, "asks_itself", 1)


def test_memory_that_shrinks_ends_nothing(asking_server: Server) -> None:
    file = Path("/dev/shm") / own_name()
    x = np.arange(LARGE, dtype=np.float32).reshape(1, -1)
    file.write_bytes(x.tobytes())
    address = asking_server.addresses["grpc"].rpartition("/")[2]
    try:
        with tritonclient.grpc.InferenceServerClient(address) as client:
            client.register_system_shared_memory("r", f"/{file.name}", x.nbytes)
            tensor = tritonclient.grpc.InferInput("INPUT_1", x.shape, "FP32")
            tensor.set_shared_memory("r", x.nbytes)
            assert (client.infer("doubled", [tensor]).as_numpy("OUTPUT_1") == 2 * x).all()
            os.truncate(file, 4096)
            with pytest.raises(InferenceServerException, match="has shrunk since it was registered"):
                client.infer("doubled", [tensor])
            client.unregister_system_shared_memory()
    finally:
        file.unlink()
    assert ask(asking_server, "doubled", 2) == [4]


# ---- what goes wrong in a bound callable ---------------------------------------------------------


#: A program whose callable raises; what its client sees is printed, its log goes to stderr.
PROGRAM = """
import logging, sys
from bound import FLOATS_IN_AND_OUT, Refused, ask, free_server

def lookup(requests):
    raise OSError(2, "No such weights", "/secret/place/weights.bin")

def infer_func(requests):
    return lookup(requests)

{setup}
with free_server() as server:
    server.bind("failing", infer_func, **FLOATS_IN_AND_OUT, isolation="{isolation}")
    server.run()
    for _ in range(2):
        try:
            ask(server, "failing", 1.0)
        except Refused as refused:
            print(refused.status, refused.text)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize(
    "setup", ["", "logging.basicConfig(level=logging.INFO)"], ids=["no logging", "basicConfig"]
)
def test_the_client_gets_the_message_and_the_log_the_traceback(
    tmp_path: Path, isolation: str, setup: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(setup=setup, isolation=isolation))
    done = finished([sys.executable, str(program)], env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["500 [Errno 2] No such weights: 'weights.bin'"] * 2
    assert done.stderr.count("Traceback (most recent call last)") == 2
    assert "in lookup" in done.stderr
    assert "/secret/place/weights.bin" in done.stderr
    assert "the inference callable of model 'failing' raised FileNotFoundError" in done.stderr
    assert ("INFO:gpuserve." in done.stderr) == bool(setup)
