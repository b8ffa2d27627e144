"""``gpuserve.asgi:app`` in two independent ASGI servers: h2corn, and Envoy by way of pyvoy."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from conftest import model, tensor, write_config
from processes import children, wait_ended, wait_until

BIN = Path(sys.executable).parent
SERVERS = {
    "h2corn": [str(BIN / "h2corn"), "gpuserve.asgi:app", "--grpc", "--no-access-log", "--bind"],
    "pyvoy": [str(BIN / "pyvoy"), "gpuserve.asgi:app", "--worker-threads", "1", "--port"],
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [one for child in found for one in descendants(child)]


@pytest.fixture(params=SERVERS)
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    config = write_config(
        tmp_path, [model("echo", "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 8)]
    )
    before = set(Path("/dev/shm").glob("envoy_shared_memory_*"))
    port = free_port()
    where = f"127.0.0.1:{port}" if request.param == "h2corn" else str(port)
    process = subprocess.Popen(
        [*SERVERS[request.param], where],
        env={**os.environ, "GPUSERVE_CONFIG": str(config)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: is_ready(port), "the server is ready", 30.0)
        yield port
        family = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        assert wait_ended(family, 5.0) == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for left in set(Path("/dev/shm").glob("envoy_shared_memory_*")) - before:
            left.unlink()  # Envoy's own, for its hot restart; it leaves it behind


def test_both_protocols_and_large_bodies_and_errors(port: int) -> None:
    for client_of in (tritonclient.grpc, tritonclient.http):
        with client_of.InferenceServerClient(f"127.0.0.1:{port}") as client:
            for width in (16, 1 << 18, 1 << 22):
                x = np.arange(width, dtype=np.float32)[None]
                sent = client_of.InferInput("x", x.shape, "FP32")
                sent.set_data_from_numpy(x)
                assert np.array_equal(client.infer("echo", [sent]).as_numpy("y"), x)
            assert client.is_model_ready("echo")
            with pytest.raises(tritonclient.utils.InferenceServerException, match="unknown model"):
                client.infer("nope", [sent])
