"""``examples/gpu`` does what its README says."""

from __future__ import annotations

import sys

import pytest
from gpu_machine import GpuMachine, RealMachine
from processes import finished
from serving import GPUSERVE, JSON_LOG, REPOSITORY, serving

pytestmark = pytest.mark.thorough

EXAMPLE = REPOSITORY / "examples" / "gpu"


def test_the_client_finds_every_answer_right(
    gpu_machine: GpuMachine | RealMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_machine.set_environment(monkeypatch)
    with serving(GPUSERVE, "serve", str(EXAMPLE / "config.yaml"), *JSON_LOG) as server:
        command = [sys.executable, str(EXAMPLE / "client.py"), "--url", server.grpc]
        done = finished(command)
    assert (done.returncode, done.stdout) == (0, "200 requests, every answer right\n"), done.stderr
