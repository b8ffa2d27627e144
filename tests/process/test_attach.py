"""A program attached to a server that runs in another one: its models come and go, the server stays."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from bound import FLOATS_IN_AND_OUT, Refused, ask, free_server, infer, status
from operated import LARGE, InBackground, OperatedServer, Orders, config, model
from processes import children, command_line, measured, wait_ended, wait_until

from gpuserve import Server
from gpuserve.attaching import AttachedServer
from gpuserve.errors import AttachError, BindError, StartupError
from gpuserve.supervisor.attach_address import attach_name

TIMEOUT_S = 30.0
TESTS = Path(__file__).parent.parent
#: Attaches, binds a model of ``mortal.py`` whose output is told in the order of the command line, and serves.
PROGRAM = """
import os, pathlib, sys, time
from functools import partial
import numpy as np
from gpuserve import ModelConfig, Server, Tensor
from mortal import Mortal

url, directory, *names = sys.argv[1:]
floats = Tensor((-1,), np.float32, name="x")
counts = [Tensor((-1,), np.int64, name=name) for name in ("calls", "pid")]
with Server.attach(url, timeout_s=20) as server:
    if "CHILD" in os.environ and (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    elif "CHILD" in os.environ:
        pathlib.Path(directory, "child").write_text(str(child))
    for name in names:
        server.bind(name, Mortal(directory), [floats], [Tensor((-1,), np.float32, name="y"), *counts],
                    config=ModelConfig(max_batch_size=64))
        print("bound", name, flush=True)
    server.serve()
"""


class Program:
    """A process that attaches to a server."""

    def __init__(self, url: str, orders: Orders, *names: str, child: bool = False) -> None:
        self.names = names
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, url, str(orders.directory), *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{TESTS}:{TESTS / 'models'}",
                **({"CHILD": ""} if child else {}),
            },
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout

    def __enter__(self) -> Program:
        for name in self.names:
            line = self.stdout.readline()
            assert line == f"bound {name}\n", line or self.errors()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def workers(self) -> list[int]:
        return [pid for pid in children(self.process.pid) if "-m gpuserve_worker " in command_line(pid)]

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(TIMEOUT_S)

    def errors(self) -> str:
        return self.process.communicate(timeout=TIMEOUT_S)[1]


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    return Orders(tmp_path / "orders")


@pytest.fixture
def operated(tmp_path: Path) -> Iterator[OperatedServer]:
    """A server with a model of its own, "own"."""
    own = Orders(tmp_path / "own")
    with OperatedServer(config(tmp_path, model("own", own))) as one:
        yield one.wait_ready()


@pytest.fixture
def server() -> Iterator[Server]:
    """One without models, in this program."""
    with free_server() as one:
        one.run()
        yield one


def times(factor: float) -> Any:
    return lambda requests: [{"OUTPUT_1": factor * one["INPUT_1"]} for one in requests]


def attach(server: Server, role: str = "http") -> AttachedServer:
    return Server.attach(server.addresses[role].removeprefix("http://"), timeout_s=5.0)


def assert_own_model_serves(server: OperatedServer) -> None:
    assert server.infer("own", 1.0).output("y") == [2.0]
    assert server.status("/v2/health/ready") == 200


def test_a_model_of_another_process_is_served_over_both_protocols(
    operated: OperatedServer, orders: Orders
) -> None:
    with Program(operated.addresses["HTTP"], orders, "m") as program:
        assert operated.infer("m", 21.0).output("y") == [42.0]
        assert operated.infer("m", 21.0).output("pid") == program.workers
        with triton.InferenceServerClient(operated.addresses["gRPC"]) as client:
            assert client.is_model_ready("m")
            sent = triton.InferInput("x", [1, 1], "FP32")
            sent.set_data_from_numpy(np.array([[4.0]], np.float32))
            assert client.infer("m", [sent]).as_numpy("y").tolist() == [[8.0]]
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(TIMEOUT_S) == 0
        answer = operated.infer("m", 1.0)
        assert (answer.status, answer.error) == (404, "Request for unknown model: 'm' is not found")
        assert_own_model_serves(operated)
    assert operated.end() == 0


@pytest.mark.parametrize("form", ["{http}", "http://{http}", "grpc://{grpc}", "127.0.0.1:{port}"])
def test_a_server_is_found_by_each_of_its_ports(server: Server, form: str) -> None:
    http = server.addresses["http"].removeprefix("http://")
    url = form.format(http=http, grpc=server.addresses["grpc"], port=http.rpartition(":")[2])
    with Server.attach(url, timeout_s=5.0) as attached:
        assert attached.is_alive()
        assert attached.is_connected()
        assert attached.addresses == server.addresses
        attached.bind("m", times(2.0), **FLOATS_IN_AND_OUT)
        assert ask(server, "m", 3.0) == [6.0]
    assert not attached.is_alive()
    assert not attached.is_connected()


def test_a_killed_program_leaves_at_once_and_may_come_back(operated: OperatedServer, orders: Orders) -> None:
    url = operated.addresses["HTTP"]
    orders.shut()
    with Program(url, orders, "m") as program:
        workers = program.workers
        running = InBackground(operated.infer, "m", 1.0)
        orders.wait_calls(1)
        queued = [InBackground(operated.infer, "m", 2.0, width=width) for width in (1, 1 << 20)]
        wait_until(lambda: operated.metric("gpuserve_queue_requests", model="m") == 2, "both are queued")
        program.kill()
        gone_s = wait_until(lambda: operated.infer("m", 1.0).status == 404, "the model is gone")
        measured(f"attached process killed: its model is gone after {gone_s:.3f} s")
        for asked in (running, *queued):
            assert asked.result().status == 503
        assert not wait_ended(workers, TIMEOUT_S)
    assert_own_model_serves(operated)
    orders.open()
    with Program(url, orders, "m"):
        assert operated.infer("m", 21.0).output("y") == [42.0]
        assert operated.metric("gpuserve_arena_blocks", model="m") == 0
    assert operated.end() == 0


def test_a_body_that_arrives_while_its_model_goes_is_answered(
    operated: OperatedServer, orders: Orders
) -> None:
    with Program(operated.addresses["HTTP"], orders, "m") as program, operated.client() as client:
        head = json.dumps(
            {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, LARGE],
                         "parameters": {"binary_data_size": 4 * LARGE}}]}
        ).encode()  # fmt: skip
        sending = client.connection
        sending.putrequest("POST", "/v2/models/m/infer")
        sending.putheader("Inference-Header-Content-Length", str(len(head)))
        sending.putheader("Content-Length", str(len(head) + 4 * LARGE))
        sending.endheaders(head + bytes(2 * LARGE))
        wait_until(
            lambda: operated.metric("gpuserve_arena_blocks", model="m") > 0, "a part lies in the arena"
        )
        program.kill()
        wait_until(lambda: operated.status("/v2/models/m/ready") != 200, "the model is gone")
        sending.send(bytes(2 * LARGE))
        assert sending.getresponse().status in {404, 503}
    assert_own_model_serves(operated)
    assert operated.end() == 0


def test_a_child_that_the_program_forked_does_not_keep_its_models(
    operated: OperatedServer, orders: Orders
) -> None:
    with Program(operated.addresses["HTTP"], orders, "m", child=True) as program:
        program.kill()
        wait_until(lambda: operated.infer("m", 1.0).status == 404, "the model is gone")
        os.kill(orders.child(), signal.SIGKILL)


def test_programs_that_come_and_go_leave_no_descriptors(operated: OperatedServer, orders: Orders) -> None:
    def descriptors() -> int:
        """Of the supervisor and the front; connections of clients are closed a moment after their answer."""
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (operated.pid, operated.front))

    def come_and_go() -> None:
        with Program(operated.addresses["HTTP"], orders, "m") as program:
            assert operated.infer("m", 1.0, width=1 << 20).status == 200
            program.kill()
            wait_until(lambda: operated.infer("m", 1.0).status == 404, "the model is gone")

    come_and_go()  # what is opened once and kept is open now
    before = descriptors()
    for _ in range(2):
        come_and_go()
    wait_until(lambda: descriptors() <= before, "none is left")


def test_a_killed_worker_of_an_attached_program_is_replaced(operated: OperatedServer, orders: Orders) -> None:
    with Program(operated.addresses["HTTP"], orders, "m") as program:
        (worker,) = program.workers
        os.kill(worker, signal.SIGKILL)
        assert operated.infer("m", 21.0).output("y") == [42.0]
        (successor,) = program.workers
        assert successor != worker


def test_the_server_is_ready_without_the_models_of_others(operated: OperatedServer, orders: Orders) -> None:
    with Program(operated.addresses["HTTP"], orders, "m") as program:
        os.kill(program.process.pid, signal.SIGSTOP)  # so that no successor is started
        os.kill(program.workers[0], signal.SIGKILL)
        wait_until(lambda: operated.status("/v2/models/m/ready") != 200, "the model is down")
        assert_own_model_serves(operated)
        os.kill(program.process.pid, signal.SIGCONT)
        operated.wait_model_ready("m")


def test_a_new_front_has_the_attached_models_without_a_load(operated: OperatedServer, orders: Orders) -> None:
    with Program(operated.addresses["HTTP"], orders, "m") as program:
        workers = program.workers
        assert operated.infer("m", 1.0).output("calls") == [1]
        front = operated.front
        os.kill(front, signal.SIGKILL)
        wait_until(lambda: operated.front not in {0, front}, "another front is started")
        operated.wait_model_ready("m")
        assert operated.infer("m", 1.0).output("calls") == [2]
        assert program.workers == workers
        assert_own_model_serves(operated)
    assert operated.end() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_attached_program_notices_the_end_of_the_server(
    tmp_path: Path, orders: Orders, number: signal.Signals
) -> None:
    with OperatedServer(config(tmp_path, model("own", Orders(tmp_path / "own")))) as operated:
        operated.wait_ready()
        with Program(operated.addresses["gRPC"], orders, "m") as program:
            workers = program.workers
            operated.process.send_signal(number)
            took_s = wait_until(lambda: program.process.poll() is not None, "the program ends")
            measured(f"server ended by {number.name}: the attached program ends after {took_s:.3f} s")
            last = program.errors().splitlines()[-1]
            assert last.startswith("gpuserve.errors.AttachError: the server at port ")
            assert ("it has been stopped" in last) is (number is signal.SIGTERM)
            assert not wait_ended(workers, TIMEOUT_S)


def test_a_name_goes_to_who_binds_it_last(server: Server) -> None:
    with attach(server) as first, attach(server, "grpc") as second:
        first.bind("m", times(2.0), **FLOATS_IN_AND_OUT)
        first.bind("other", times(5.0), **FLOATS_IN_AND_OUT)
        assert ask(server, "m", 1.0) == [2.0]
        second.bind("m", times(3.0), **FLOATS_IN_AND_OUT)
        assert ask(server, "m", 1.0) == [3.0]
        wait_until(lambda: len(_workers()) == 2, "the worker of the first is let go")
        first.bind("m", times(4.0), **FLOATS_IN_AND_OUT)  # it may take it back
        assert ask(server, "m", 1.0) == [4.0]
        assert ask(server, "other", 1.0) == [5.0]
        first.stop()
        assert status(server, "/v2/models/m/ready") != 200
        assert second.is_alive()


def _workers() -> list[int]:
    return [pid for pid in children(os.getpid()) if "-m gpuserve_worker " in command_line(pid)]


def test_the_models_of_the_server_itself_are_not_to_be_had(server: Server) -> None:
    server.bind("own", times(2.0), **FLOATS_IN_AND_OUT)
    with attach(server) as attached:
        for name in ("own", "OWN"):
            with pytest.raises(BindError, match=f"'{name}' cannot be served: the server has a model of that"):
                attached.bind(name, times(3.0), **FLOATS_IN_AND_OUT)
        attached.bind("m", times(3.0), **FLOATS_IN_AND_OUT)
        with pytest.raises(BindError, match="same name twice"):
            attached.bind("m", times(3.0), **FLOATS_IN_AND_OUT)
        with pytest.raises(BindError, match="model 'M' is served by an attached program"):
            server.bind("M", times(4.0), **FLOATS_IN_AND_OUT)
        assert (ask(server, "own", 1.0), ask(server, "m", 1.0)) == ([2.0], [3.0])
    server.bind("M", times(4.0), **FLOATS_IN_AND_OUT)
    assert ask(server, "M", 1.0) == [4.0]


class Broken:
    def __init__(self) -> None:
        raise RuntimeError("there are no weights")

    def __call__(self, requests: Any) -> Any:
        return requests


def test_a_model_that_cannot_be_loaded_is_not_bound(server: Server) -> None:
    with attach(server) as attached:
        with pytest.raises(
            StartupError, match=r"'m': instance 0 could not be started: .*there are no weights"
        ):
            attached.bind("m", Broken, **FLOATS_IN_AND_OUT)
        with pytest.raises(Refused, match="unknown model"):
            ask(server, "m", 1.0)
        attached.bind("m", times(2.0), **FLOATS_IN_AND_OUT)
        assert ask(server, "m", 1.0) == [2.0]


def test_several_instances_and_threads_and_large_tensors(server: Server) -> None:
    lock = threading.Lock()

    def locked(requests: Any) -> Any:
        with lock:
            return [{"OUTPUT_1": 2 * one["INPUT_1"]} for one in requests]

    with attach(server) as attached:
        attached.bind("process", [times(2.0)] * 2, **FLOATS_IN_AND_OUT)
        attached.bind("thread", locked, **FLOATS_IN_AND_OUT, isolation="thread")
        large = np.arange(1 << 18, dtype=np.float32).reshape(1, -1)
        for name in ("process", "thread"):
            assert (infer(server, name, INPUT_1=large)["OUTPUT_1"] == 2 * large).all()
    assert [one.name for one in threading.enumerate() if one.name.startswith("gpuserve-thread")] == []


def test_models_that_are_bound_before_are_served_with_run(server: Server) -> None:
    attached = AttachedServer(server.addresses["http"])
    attached.bind("m", times(2.0), **FLOATS_IN_AND_OUT)
    assert not attached.is_connected()
    with attached:
        attached.run()
        assert ask(server, "m", 1.0) == [2.0]
        attached.stop()
        with pytest.raises(Refused):
            ask(server, "m", 1.0)
        attached.run()
        assert ask(server, "m", 1.0) == [2.0]


def test_without_a_server_the_error_says_what_to_check() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        with pytest.raises(
            AttachError, match=rf"no server to attach to at port {port} .* check that it runs"
        ):
            Server.attach(f"localhost:{port}", timeout_s=0.2)


def test_a_server_that_is_not_attachable() -> None:
    with free_server(attachable=False) as server:
        server.run()
        with pytest.raises(AttachError, match="'attachable' is on"):
            Server.attach(server.addresses["http"], timeout_s=0.2)


def test_a_server_that_comes_up_later_is_waited_for() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    waiting = InBackground(Server.attach, f"localhost:{port}")
    with free_server(http_port=port) as server:
        server.run()
        with waiting.result() as attached:
            assert attached.addresses == server.addresses


def test_two_servers_on_one_machine(server: Server) -> None:
    with free_server() as other:
        other.run()
        with attach(server) as here, attach(other) as there:
            here.bind("m", times(2.0), **FLOATS_IN_AND_OUT)
            there.bind("m", times(3.0), **FLOATS_IN_AND_OUT)
            assert (ask(server, "m", 1.0), ask(other, "m", 1.0)) == ([2.0], [3.0])
        assert here.addresses == {}


def test_a_name_that_is_taken_is_a_warning_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(attach_name(os.geteuid(), port))
        with free_server(http_port=port) as server:
            server.run()
            assert f"programs cannot attach by port {port}: Address already in use" in caplog.text
            with attach(server, "grpc") as attached:
                attached.bind("m", times(2.0), **FLOATS_IN_AND_OUT)
                assert ask(server, "m", 1.0) == [2.0]
