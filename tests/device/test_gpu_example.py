"""``examples/gpu`` does what its README says."""

from __future__ import annotations

import subprocess
import sys

import pytest
from gpu_machine import GpuMachine, RealMachine
from serving import GPUSERVE, JSON_LOG, REPOSITORY, serving

pytestmark = pytest.mark.thorough

EXAMPLE = REPOSITORY / "examples" / "gpu"
CLIENT_TIMEOUT_S = 60.0


def test_the_client_finds_every_answer_right(
    gpu_machine: GpuMachine | RealMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_machine.set_environment(monkeypatch)
    with serving(GPUSERVE, "serve", str(EXAMPLE / "config.yaml"), *JSON_LOG) as server:
        command = [sys.executable, str(EXAMPLE / "client.py"), "--url", server.grpc]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout) == (0, "200 requests, every answer right\n"), done.stderr
