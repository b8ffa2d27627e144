"""A program attached to a server that runs in another one: its models come and go, the server stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from bound import FLOATS_IN_AND_OUT, ask
from commands import ask as operate
from commands import row
from exploring import variants
from operated import LARGE, InBackground, OperatedServer, Orders, config, model
from processes import children, command_line, measured, wait_ended, wait_until

from gpuserve import Server
from gpuserve.api.server import AttachedServer

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
                    config=ModelConfig(max_batch_size=64, execution_timeout_s=float(os.environ["LIMIT_S"])))
        print("bound", name, flush=True)
    server.serve()
"""


#: Runs a program as in a container: it is process 1, and knows no other's id.
CONTAINED = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")


class Program:
    """A process that attaches to a server."""

    def __init__(
        self,
        url: str,
        orders: Orders,
        *names: str,
        child: bool = False,
        run: tuple[str, ...] = (),
        limit_s: float = 0.0,
    ) -> None:
        self.names = names
        self.process = subprocess.Popen(
            [*run, sys.executable, "-c", PROGRAM, url, str(orders.directory), *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{TESTS}:{TESTS / 'models'}",
                "LIMIT_S": str(limit_s),
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
def operated(tmp_path: Path) -> Iterator[OperatedServer]:
    """A server with a model of its own, "own"."""
    own = Orders(tmp_path / "own")
    with OperatedServer(config(tmp_path, model("own", own))) as one:
        yield one.wait_ready()


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


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["{http}", "http://{http}", "grpc://{grpc}", "127.0.0.1:{port}"])
def test_a_server_is_found_by_each_of_its_ports(bare_server: Server, form: str) -> None:
    http = bare_server.addresses["http"].removeprefix("http://")
    url = form.format(http=http, grpc=bare_server.addresses["grpc"], port=http.rpartition(":")[2])
    with Server.attach(url, timeout_s=5.0) as attached:
        assert attached.is_alive()
        assert attached.is_connected()
        assert attached.addresses == bare_server.addresses
        attached.bind("m", times(2.0), **FLOATS_IN_AND_OUT)
        assert ask(bare_server, "m", 3.0) == [6.0]
    assert not attached.is_alive()
    assert not attached.is_connected()


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_a_child_that_the_program_forked_does_not_keep_its_models(
    operated: OperatedServer, orders: Orders
) -> None:
    with Program(operated.addresses["HTTP"], orders, "m", child=True) as program:
        program.kill()
        wait_until(lambda: operated.infer("m", 1.0).status == 404, "the model is gone")
        os.kill(orders.child(), signal.SIGKILL)


@pytest.mark.thorough
def test_programs_that_come_and_go_leave_no_descriptors(operated: OperatedServer, orders: Orders) -> None:
    def descriptors() -> int:
        """Of the supervisor and the front; connections of clients are closed a moment after their answer."""
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (operated.pid, operated.front))

    def come_and_go() -> None:
        with Program(operated.addresses["HTTP"], orders, "m") as program:
            assert operated.infer("m", 1.0, width=1 << 20).status == 200
            program.kill()
            wait_until(lambda: operated.infer("m", 1.0).status == 404, "the model is gone")

    come_and_go()  # what is opened once and kept is open now, as for subscribers to events
    operate(operated.addresses["HTTP"], "events")
    before = descriptors()
    for _ in range(2):
        come_and_go()
    wait_until(lambda: descriptors() <= before, "none is left")


@pytest.mark.thorough
def test_a_killed_worker_of_an_attached_program_is_replaced(operated: OperatedServer, orders: Orders) -> None:
    with Program(operated.addresses["HTTP"], orders, "m") as program:
        (worker,) = program.workers
        os.kill(worker, signal.SIGKILL)
        assert operated.infer("m", 21.0).output("y") == [42.0]
        (successor,) = program.workers
        assert successor != worker


@pytest.mark.thorough
def test_a_program_in_another_pid_namespace_is_known_by_the_ids_of_the_server(
    operated: OperatedServer, orders: Orders
) -> None:
    if subprocess.run([*CONTAINED, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make a PID namespace")
    url = operated.addresses["HTTP"]
    with Program(url, orders, "attached", run=CONTAINED, limit_s=0.5) as program:
        (contained,) = children(program.process.pid)
        (worker,) = [pid for pid in children(contained) if "-m gpuserve_worker " in command_line(pid)]
        (instance,) = row(url, "attached")["instances"]
        assert instance["pid"] == worker, "the number in the container is that of another process here"
        assert instance["memory_nbytes"] > 1 << 20
        orders.shut()
        assert operated.infer("attached", 1.0).status == 504
        orders.open()
        assert not wait_ended([worker], TIMEOUT_S), "the program was told by its own number"
        assert operated.infer("attached", 2.0).output("y") == [4.0]


@pytest.mark.thorough
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
        operated.replace_front()
        operated.wait_model_ready("m")
        assert operated.infer("m", 1.0).output("calls") == [2]
        assert program.workers == workers
        assert_own_model_serves(operated)
    assert operated.end() == 0


@pytest.mark.parametrize("number", variants(signal.SIGKILL, signal.SIGTERM))
def test_an_attached_program_notices_the_end_of_the_server(
    tmp_path: Path, orders: Orders, number: signal.Signals
) -> None:
    with (
        OperatedServer(config(tmp_path, model("own", Orders(tmp_path / "own")))).until_killed() as operated,
        Program(operated.addresses["gRPC"], orders, "m") as program,
    ):
        workers = program.workers
        operated.process.send_signal(number)
        took_s = wait_until(lambda: program.process.poll() is not None, "the program ends")
        measured(f"server ended by {number.name}: the attached program ends after {took_s:.3f} s")
        last = program.errors().splitlines()[-1]
        assert last.startswith("gpuserve.errors.AttachError: the server at port ")
        assert ("it has been stopped" in last) is (number is signal.SIGTERM)
        assert not wait_ended(workers, TIMEOUT_S)
