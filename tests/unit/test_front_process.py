"""A front that is started before anybody can say what it is to serve, and what a front leaves out."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_ended, wait_until

from gpuserve.supervisor.processes.child_process import Child, EarlyFront, front_process

TIMEOUT_S = 20.0
#: What ``tritonclient.grpc`` brings besides the messages, as it shows among the mapped files.
CLIENT_FILES = ("cygrpc", "_ml_dtypes")


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The processes that an ``EarlyFront`` starts, in order."""
    started: list[Child] = []

    def start(relay_output: bool) -> tuple[Child, socket.socket]:
        process, control = front_process(relay_output)
        started.append(process)
        return process, control

    monkeypatch.setattr("gpuserve.supervisor.processes.child_process.front_process", start)
    return started


def mapped(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_the_first_taker_gets_the_front_that_was_started(children: list[Child]) -> None:
    front = EarlyFront()
    front.start()
    (early,) = children
    first, first_control = front.claim(True)
    second, second_control = front.claim(True)
    assert first is early
    assert second is children[1]
    front.close()
    assert wait_ended([first.pid], 0.0) == [first.pid], "a front that was taken is not ended"
    first_control.close()
    second_control.close()
    assert wait_ended([first.pid, second.pid], TIMEOUT_S) == []
    for process in children:
        process.exit_reason()
        process.close()


def test_a_front_that_nobody_takes_is_ended(children: list[Child]) -> None:
    front = EarlyFront()
    front.start()
    front.close()
    front.close()
    assert wait_ended([children[0].pid], 0.0) == []


def test_a_front_that_waits_has_loaded_no_client(children: list[Child]) -> None:
    front = EarlyFront()
    front.start()
    pid = children[0].pid
    wait_until(
        lambda: "uvloop" in mapped(pid) and "_message.abi3" in mapped(pid), "the front has its modules"
    )
    wait_until(lambda: "_multiarray_umath" in mapped(pid), "it has numpy")
    assert [name for name in CLIENT_FILES if name in mapped(pid)] == []
    front.close()


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_messages_of_a_bare_package_are_those_of_the_whole() -> None:
    done = run(
        "import sys; from gpuserve.front.process_setup import skip_package_code\n"
        "skip_package_code('tritonclient.grpc')\n"
        "from tritonclient.grpc import model_config_pb2, service_pb2\n"
        "import tritonclient.grpc.service_pb2 as again\n"
        "request = service_pb2.ModelInferRequest(model_name='m')\n"
        "assert service_pb2.ModelInferRequest.FromString(request.SerializeToString()) == request\n"
        "assert again is service_pb2 and model_config_pb2.ModelConfig(name='m').name == 'm'\n"
        "print('grpc' in sys.modules, 'numpy' in sys.modules)"
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_a_package_that_is_imported_already_stays_whole() -> None:
    done = run(
        "import json; from gpuserve.front.process_setup import skip_package_code\n"
        "skip_package_code('json'); import json as again\n"
        "print(again is json, again.dumps(1))"
    )
    assert done.stdout.split() == ["True", "1"], done.stderr


def test_what_is_not_there_stays_missing() -> None:
    done = run(
        "from gpuserve.front.process_setup import skip_package_code\n"
        "skip_package_code('tritonclient.nothing')\n"
        "import tritonclient.nothing"
    )
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'tritonclient.nothing'"
