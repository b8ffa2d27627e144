"""``gpuserve serve`` by a program that has closed stdin, stdout or stderr: the server serves all the same."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
from pathlib import Path

import pytest
from exploring import variants
from operated import TIMEOUT_S, Client, Orders, config, model
from processes import children, wait_ended, wait_until
from serving import GPUSERVE, unlikely_port


@pytest.mark.parametrize("closed", variants("0<&- 1>&- 2>&-", "2>&-", "0<&-", "1>&-"))
def test_a_server_serves_with_closed_streams(tmp_path: Path, closed: str) -> None:
    port = unlikely_port()
    path = config(
        tmp_path,
        model("m", Orders(tmp_path / "orders")),
        http_port=port,
        grpc_port=None,
        metrics_port=None,
    )
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$0" serve "$1" {closed}', GPUSERVE, str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    family: list[int] = []
    try:
        wait_until(lambda: process.poll() is not None or _is_ready(port), "the server is ready")
        with Client(f"127.0.0.1:{port}") as client:
            assert client.infer("m", 1.0).output("y") == [2.0]
        family = [process.pid, *children(process.pid)]
        for pid in family:
            for fd in (0, 1, 2):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                assert target == os.devnull or target.startswith("pipe:"), (pid, fd, target)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
        assert not wait_ended(family, TIMEOUT_S)


def _is_ready(port: int) -> bool:
    try:
        with Client(f"127.0.0.1:{port}") as client:
            return client.get("/v2/health/ready").status == 200
    except (OSError, http.client.HTTPException):
        return False
