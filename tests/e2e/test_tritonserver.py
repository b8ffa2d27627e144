"""``gpuserve tritonserver``: model repositories served by the flags of Triton's own server, as containers
give them, asked by Triton's client.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from operated import OperatedServer
from processes import finished, wait_until
from repositories import Client, Traffic, clients_are_closed
from serving import GPUSERVE
from tritonclient.utils import InferenceServerException

__all__ = ["clients_are_closed"]  # it is for every test here

MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.tag = {tag}

    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(one, "x").as_numpy()) for one in requests]

    def answer(self, x):
        rows = (len(x), 1)
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("tag", np.full(rows, self.tag, np.float32)),
            pb_utils.Tensor("pid", np.full(rows, os.getpid(), np.int64)),
            pb_utils.Tensor("sum", x.sum(axis=1, keepdims=True, dtype=np.float32)),
        ])
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [-1] }]
output [
  { name: "tag" data_type: TYPE_FP32 dims: [1] },
  { name: "pid" data_type: TYPE_INT64 dims: [1] },
  { name: "sum" data_type: TYPE_FP32 dims: [1] }
]
"""
PORTS = ("--http-port=0", "--grpc-port", "0", "--metrics-port=0", "--http-address=127.0.0.1")


@pytest.fixture(autouse=True)
def fast_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton has no flags for."""
    monkeypatch.setenv("GPUSERVE_SERVER__LOG_FORMAT", "json")
    monkeypatch.setenv("GPUSERVE_SERVER__REPOSITORY_POLL_S", "0.1")
    monkeypatch.setenv("GPUSERVE_SERVER__LAME_DUCK_S", "0")


def put(repository: Path, name: str, tag: str, config: str = CONFIG) -> Path:
    """Put a model there, or other code and another config in the place of those that it has."""
    folder = repository / name
    if not folder.exists():
        whole = repository.parent / f"{name}.new"
        (whole / "1").mkdir(parents=True)
        write(whole, tag, config)
        whole.rename(folder)
    else:
        write(folder, tag, config)
    return folder


def write(folder: Path, tag: str, config: str) -> None:
    for path, text in ((folder / "1" / "model.py", MODEL.format(tag=tag)), (folder / "config.pbtxt", config)):
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def started(repository: Path, *flags: str) -> OperatedServer:
    command = (GPUSERVE, "tritonserver", f"--model-repository={repository}", *PORTS, *flags)
    return OperatedServer(repository, command=command)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    put(folder, "m", "1.0")
    return folder


@contextlib.contextmanager
def killed(server: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave no server behind that was not ended."""
    try:
        yield
    finally:
        server.kill()


def said(server: OperatedServer, text: str) -> int:
    return sum(text in one["msg"] for one in server.messages())


def wait_said(server: OperatedServer, text: str) -> None:
    wait_until(lambda: said(server, text) > 0, f"the log says {text!r}")


@pytest.mark.thorough
def test_a_repository_is_followed_under_traffic(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    with started(
        repository, "--model-control-mode=poll", "--http-thread-count", "8", "--id=mine"
    ).until_ended() as server:
        assert server.status("/v2/health/ready") == 200
        for name, tag in (("m", "1.0"), ("same", "7.0")):
            put(repository, name, tag)
        for name in ("m", "same"):
            server.wait_model_ready(name)
        client = Client("grpc", server.addresses["gRPC"])
        pid = client.infer("same").pid
        with Traffic(Client("grpc", server.addresses["gRPC"]), "m") as traffic:
            put(repository, "m", "2.0")
            traffic.wait_for(2.0)
            put(repository, "m", "2.0", CONFIG.replace("dims: [-1]", "dimz: [-1]"))
            wait_said(server, "dimz")
            put(repository, "m", "3.0")
            traffic.wait_for(3.0)
            put(repository, "new", "4.0")
            server.wait_model_ready("new")
        assert traffic.errors == []
        assert client.infer("new").tag == 4.0
        put(repository, "wrong", "1.0", "backend: 7")
        wait_until(lambda: client.states("wrong") == {"": "UNAVAILABLE"}, "the index has the wrong model")
        shutil.rmtree(repository / "wrong")
        wait_until(lambda: client.states("wrong") == {}, "the index has it no more")
        shutil.rmtree(repository / "new")
        wait_said(server, "model new is unloaded")
        # The front forgets the name a moment after its last version is gone.
        with pytest.raises(InferenceServerException, match=r"'new' (is not found|has no available versions)"):
            client.infer("new")
        assert client.infer("same").pid == pid
        for ask in (client.asked.load_model, client.asked.unload_model):
            with pytest.raises(InferenceServerException, match="not allowed if polling is enabled"):
                ask("m")
        assert client.asked.get_server_metadata().name == "mine"
        assert said(server, "dimz") == 1
        assert said(server, "--http-thread-count makes no difference: one event loop reads all") == 1
        shutil.rmtree(repository / "m")
        shutil.rmtree(repository / "same")
        wait_until(lambda: client.index() == [], "no model is left")
        repository.rename(tmp_path / "away")
        wait_said(server, "the files of the models cannot be read, and nothing is changed")


@pytest.mark.thorough
def test_models_are_loaded_by_name_and_by_clients(repository: Path, tmp_path: Path) -> None:
    put(repository, "later", "2.0")
    put(repository, "broken", "0.0", "backend: 7")
    log = tmp_path / "server.log"
    command = [GPUSERVE, "tritonserver", "--model-repository", str(repository), *PORTS, "--load-model=m"]
    command += ["--model-control-mode=explicit", f"--log-file={log}"]
    command += ["--log-verbose=3", "--log-warning=false", "--log-format=ISO8601"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as server, killed(server):
        wait_until(lambda: log.exists() and '"ready: ' in log.read_text(), "the log says that it is ready")
        address = log.read_text().partition("gRPC ")[2].partition(",")[0]
        client = Client("grpc", address)
        assert client.infer("m").tag == 1.0
        assert client.asked.get_server_metadata().name == "triton"
        shown = client.asked.get_log_settings(as_json=True)["settings"]
        assert {name: one for name, given in shown.items() for one in given.values()} == {
            "log_file": str(log), "log_info": True, "log_warning": False, "log_error": True,
            "log_verbose_level": 3, "log_format": "ISO8601",
        }  # fmt: skip
        assert client.states("later") == {"": ""}
        client.asked.load_model("later")
        assert client.infer("later").tag == 2.0
        client.asked.unload_model("m")
        with pytest.raises(InferenceServerException, match="broken"):
            client.asked.load_model("broken")
        server.terminate()
        _, stderr = server.communicate(timeout=30)
    assert (server.returncode, stderr) == (0, b"")


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", ["config", pytest.param("code", marks=pytest.mark.thorough)])
def test_a_broken_model_ends_the_server_unless_it_is_told_to_go_on(repository: Path, wrong: str) -> None:
    wrong_tag, wrong_config = "1 / 0", CONFIG
    if wrong == "config":
        wrong_tag, wrong_config = "1.0", CONFIG.replace("TYPE_INT64", "TYPE_INT65")
    put(repository, "bad", wrong_tag, wrong_config)
    with started(repository) as server:
        assert server.process.wait(30) == (4 if wrong == "config" else 3)
    with started(repository, "--exit-on-error=false", "--model-control-mode=poll").until_ended() as server:
        client = Client("grpc", server.addresses["gRPC"])
        assert client.infer("m").tag == 1.0
        with pytest.raises(InferenceServerException, match="not allowed if polling is enabled"):
            client.asked.unload_model("m")
        assert server.status("/v2/health/ready") == 400
        (reason,) = [
            reason for name, _, state, reason in client.index() if (name, state) == ("bad", "UNAVAILABLE")
        ]
        assert ("TYPE_INT65" if wrong == "config" else "division by zero") in reason
        put(repository, "bad", "5.0")
        wait_until(lambda: server.status("/v2/health/ready") == 200, "the server is ready")
        assert client.infer("bad").tag == 5.0
    put(repository, "bad", wrong_tag, wrong_config)
    with started(repository, "--exit-on-error=false", "--strict-readiness", "false").until_ended() as server:
        assert server.status("/v2/health/ready") == 200


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        ([], ["--model-repository: expected a folder of models: give this flag once or more"]),
        (
            ["--http-port=http", "--bogus", "--model-repository=s3://models"],
            [
                "--http-port: expected an integer, given 'http'",
                "--bogus: tritonserver has no such flag",
                "--model-repository: expected a folder of this machine, given 's3://models': "
                "copy it here first",
            ],
        ),
        (
            ["--model-repository=models", "--allow-sagemaker=true"],
            ["--allow-sagemaker: not supported by gpuserve: route its requests to the HTTP port by a proxy"],
        ),
        (
            ["--model-repository=models", "--log-file=/nowhere/log"],
            ["--log-file: '/nowhere/log' cannot be written: no such file or directory"],
        ),
        (
            ["--model-repository=models", "--http-port=70000"],
            ["--http-port: expected an integer from 0 to 65535, given the number 70000"],
        ),
    ],
)
def test_a_wrong_flag_is_told_in_a_sentence(
    flags: list[str], lines: list[str], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.parent)
    done = finished([GPUSERVE, "tritonserver", *flags])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == lines


def test_the_help_has_every_flag_with_what_becomes_of_it() -> None:
    done = finished([GPUSERVE, "tritonserver", "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "  --http-thread-count\n        makes no difference: " in done.stdout
