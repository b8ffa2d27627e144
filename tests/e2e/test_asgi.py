"""``gpuserve.asgi:app`` in two independent ASGI servers: h2corn, and Envoy by way of pyvoy."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import operated
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import model, tensor, write_config
from operated import Client, InBackground, Orders
from processes import command_line, descendants, wait_ended, wait_until

BIN = Path(sys.executable).parent
SERVERS = {
    "h2corn": [str(BIN / "h2corn"), "gpuserve.asgi:app", "--grpc", "--no-access-log", "--port"],
    "pyvoy": [str(BIN / "pyvoy"), "gpuserve.asgi:app", "--port"],
}
TIMEOUT_S = 30.0


@dataclass
class Host:
    """An ASGI server with the application in it."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def workers(self) -> list[int]:
        return [pid for pid in descendants(self.process.pid) if "-m gpuserve_worker " in command_line(pid)]

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()}"
        try:
            with urllib.request.urlopen(f"http://{self.address}/v2/health/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def wait_ready(self) -> Host:
        wait_until(self.is_ready, "the server is ready", TIMEOUT_S)
        return self

    def infer(self, name: str, value: float) -> operated.Answer:
        with Client(self.address) as client:
            return client.infer(name, value)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def hosting(server: str, config: Path | None, folder: Path, *flags: str) -> Iterator[Host]:
    """The server until the end of the block; then SIGTERM, after which nothing of it may be left."""
    if importlib.util.find_spec(server) is None:
        pytest.skip(f"{server} is not installed: pip install 'gpuserve[{server}]'")
    before = set(Path("/dev/shm").glob("envoy_shared_memory_*"))
    variables = {} if config is None else {"GPUSERVE_CONFIG": str(config)}
    log, port = folder / "log", free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*SERVERS[server], str(port), *flags],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield Host(port, process, log)
        family = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_S)
        assert wait_ended(family, 5.0) == []
    except BaseException:
        sys.stderr.write(log.read_text())  # pytest shows it with the failure
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for left in set(Path("/dev/shm").glob("envoy_shared_memory_*")) - before:
            left.unlink()  # Envoy's own, for its hot restart; it leaves it behind


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    return Orders(tmp_path / "orders")


@pytest.fixture
def config(tmp_path: Path, orders: Orders) -> Path:
    """A model that echoes, and one that obeys orders."""
    echo = model("echo", "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 8)
    return write_config(tmp_path, [echo, operated.model("mortal", orders)])


@pytest.fixture(params=SERVERS)
def host(request: pytest.FixtureRequest, config: Path, tmp_path: Path) -> Iterator[Host]:
    with hosting(request.param, config, tmp_path) as started:
        yield started.wait_ready()


def test_both_protocols_and_large_bodies_and_errors(host: Host) -> None:
    for client_of in (tritonclient.grpc, tritonclient.http):
        with client_of.InferenceServerClient(host.address) as client:
            for width in (16, 1 << 18, 1 << 23):
                x = np.arange(width, dtype=np.float32)[None]
                sent = client_of.InferInput("x", x.shape, "FP32")
                sent.set_data_from_numpy(x)
                assert np.array_equal(client.infer("echo", [sent]).as_numpy("y"), x)
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("echo")
            with pytest.raises(tritonclient.utils.InferenceServerException, match="unknown model"):
                client.infer("nope", [sent])
            assert client.infer("echo", [sent]).as_numpy("y") is not None
    assert host.infer("mortal", 4.0).output("y") == [8.0]


def test_a_request_whose_client_went_away_is_taken_back(host: Host, orders: Orders) -> None:
    orders.shut()
    first = InBackground(host.infer, "mortal", 1.0)
    orders.wait_calls(1)
    with pytest.raises(TimeoutError), Client(host.address, timeout_s=0.1) as client:
        client.infer("mortal", 2.0)

    def is_cancelled() -> bool:
        with Client(host.address) as client:
            page = client.get("/metrics").body.decode()
        return any(
            line.startswith("gpuserve_cancelled_total{") and line.endswith(" 1.0")
            for line in page.split("\n")
        )

    wait_until(is_cancelled, "the request is taken back")
    orders.open()
    assert first.result().output("y") == [2.0]


def test_a_worker_that_dies_is_replaced(host: Host, orders: Orders) -> None:
    before = host.workers
    orders.die("SIGKILL")
    assert host.infer("mortal", 3.0).output("y") == [6.0]
    wait_until(lambda: len(host.workers) == 2 and host.is_ready(), "its successor is loaded")
    assert len(set(host.workers) & set(before)) == 1


def test_workers_are_ordinary_processes(host: Host) -> None:
    for pid in host.workers:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"LD_PRELOAD=" not in environment
        assert b"PYTHONHOME=" not in environment
        assert command_line(pid).startswith(str(BIN))
        status = Path(f"/proc/{pid}/status").read_text()
        assert "SigBlk:\t0000000000000000" in status


def test_workers_do_not_outlive_a_server_that_is_killed(host: Host) -> None:
    workers = host.workers
    assert len(workers) == 2
    family = [host.process.pid, *descendants(host.process.pid)]
    for pid in family:
        if pid not in workers:
            os.kill(pid, signal.SIGKILL)
    assert wait_ended(workers, 5.0) == []


def test_what_runs_at_the_end_is_finished(config: Path, orders: Orders, tmp_path: Path) -> None:
    with hosting("h2corn", config, tmp_path) as host:
        host.wait_ready()
        orders.shut()
        running = InBackground(host.infer, "mortal", 1.0)
        orders.wait_calls(1)
        host.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Shutting down" in host.log.read_text(), "the server has begun to end")
        orders.open()
        assert running.result().output("y") == [2.0]


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_without_a_lifespan_the_first_request_starts_it(config: Path, tmp_path: Path) -> None:
    with hosting("h2corn", config, tmp_path, "--lifespan", "off") as host:
        wait_until(lambda: _accepts(host.port), "the server accepts")
        assert host.workers == []
        assert host.infer("mortal", 1.0).output("y") == [2.0]
        assert len(host.workers) == 2


def test_below_a_path(config: Path, tmp_path: Path) -> None:
    with hosting("h2corn", config, tmp_path, "--root-path", "/inference") as host:
        wait_until(lambda: _accepts(host.port), "the server accepts")
        with Client(host.address) as client:
            assert client.get("/inference/v2/health/ready").status == 200
            assert client.get("/v2/models/mortal/ready").status == 200


@pytest.mark.parametrize("server", SERVERS)
def test_without_a_config_it_does_not_start(server: str, tmp_path: Path) -> None:
    with hosting(server, None, tmp_path) as host:
        assert host.process.wait(TIMEOUT_S) != 0
        assert "GPUSERVE_CONFIG is not set: it names the config file" in host.log.read_text()


@pytest.mark.parametrize("server", SERVERS)
def test_with_a_model_that_does_not_load_it_does_not_start(
    server: str, orders: Orders, tmp_path: Path
) -> None:
    config = write_config(tmp_path, [operated.model("broken", orders, "load_fails")])
    with hosting(server, config, tmp_path) as host:
        assert host.process.wait(TIMEOUT_S) != 0
        assert "model 'broken': instance cpu#0 could not be started" in host.log.read_text()


def test_two_event_loops_are_refused(config: Path, tmp_path: Path) -> None:
    with hosting("pyvoy", config, tmp_path, "--worker-threads", "2") as host:
        assert host.process.wait(TIMEOUT_S) != 0
        assert "give this server one worker thread" in host.log.read_text()
