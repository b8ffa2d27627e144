"""The supervisor where its ground gives way: no descriptors left, a defect of its own, an early Ctrl-C."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from operated import TIMEOUT_S, InBackground, OperatedServer, Orders, config, model
from processes import wait_ended, wait_until

from gpuserve import ModelConfig, Server, Tensor
from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import StartupError
from gpuserve.supervisor.processes.lifecycle import ServerObserver, ServerState
from gpuserve.supervisor.supervisor import Supervisor

PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
SHAPE = {
    "inputs": [Tensor(name="x", dtype=np.float32, shape=(-1,))],
    "outputs": [Tensor(name="y", dtype=np.float32, shape=(-1,))],
    "config": ModelConfig(max_batch_size=4),
}


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["front", "worker"])
def test_a_process_that_cannot_be_started_again_is_tried_until_it_can(
    tmp_path: Path, orders: Orders, victim: str
) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_ended() as server:
        limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        os.kill(server.front if victim == "front" else server.workers[0], signal.SIGKILL)
        server.wait_log("cannot start a process of gpuserve")
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
        wait_until(lambda: server.status("/v2/health/ready") == 200, "it is back")
        assert server.infer("m", 1.0).output("y") == [2.0]


def test_a_defect_ends_the_server_and_whoever_waits_is_told() -> None:
    class Defective(ServerObserver):
        def server_ready(self, addresses: dict[str, str]) -> None:
            raise ZeroDivisionError

    supervisor = Supervisor(ServerSettings(**PORTS), [], Defective(), relay_output=False)
    with pytest.raises(ZeroDivisionError):
        supervisor.run()
    assert isinstance(supervisor.started.exception(timeout=0), ZeroDivisionError)
    assert supervisor.state is ServerState.STOPPED


def test_a_model_that_is_bound_to_a_server_that_has_ended() -> None:
    supervisor = Supervisor(ServerSettings(**PORTS), [], ServerObserver(), relay_output=False)
    supervisor.request_stop()
    assert supervisor.run() == 0
    server = Server()
    server.bind("m", lambda requests: requests, **SHAPE)
    loaded = supervisor.add_model(server._specs["m", 1])
    assert isinstance(loaded.exception(timeout=0), StartupError)
    supervisor.request_stop()
    assert isinstance(supervisor.started.exception(timeout=0), StartupError)


def test_a_server_that_is_stopped_while_a_model_is_bound_to_it(tmp_path: Path) -> None:
    fifo = tmp_path / "loading"
    os.mkfifo(fifo)
    path = str(fifo)

    class Slow:
        def __reduce__(self) -> object:
            return exec, (f"open({path!r}, 'w').close(); import time; time.sleep(60)",)

        def __call__(self, requests: object) -> object:
            return requests

    with Server(**PORTS) as server:
        server.run()
        binding = InBackground(server.bind, "m", Slow(), **SHAPE)
        fifo.read_bytes()  # until it loads
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        with pytest.raises(StartupError):
            binding.result()
        stopping.join(TIMEOUT_S)
        assert not server.is_alive()


@pytest.mark.parametrize(
    ("call", "status"), [("serve", 0), pytest.param("run", -signal.SIGINT, marks=pytest.mark.thorough)]
)
def test_ctrl_c_while_a_program_loads_its_model(tmp_path: Path, call: str, status: int) -> None:
    loading = tmp_path / "loading"
    program = tmp_path / "program.py"
    load = f"import pathlib, time; pathlib.Path({str(loading)!r}).touch(); time.sleep(60)"
    program.write_text(SLOW_PROGRAM.format(load=load, call=call))
    with OperatedServer(program, command=(sys.executable, str(program)), log_format="text") as server:
        wait_until(loading.exists, "it loads")
        family = server.family()
        os.killpg(server.pid, signal.SIGINT)
        assert server.process.wait(TIMEOUT_S) == status
        assert not wait_ended(family, 2.0)


SLOW_PROGRAM = """
from gpuserve import Server, Tensor

class Slow:
    def __reduce__(self):
        return exec, ({load!r},)
    def __call__(self, requests):
        return requests

x = [Tensor(name="x", dtype="float32", shape=(-1,))]
with Server(http_port=0, grpc_port=0, metrics_port=0) as server:
    server.bind("m", Slow(), x, x)
    server.{call}()
"""
