"""The short form of ``scripts/rollout``: real servers, the real Envoy, real signals, and no request lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from exploring import variants
from processes import command_line, descendants, wait_ended, wait_until
from serving import REPOSITORY

COMMAND = (sys.executable, "-m", "benchmarks.rollout", "--quick", "--replicas", "2", "--max-delay", "1")
TIMEOUT_S = 110.0
#: Of two pods: supervisor, front, and a worker for each of two models.
N_PROCESSES = 8
END_S = 10.0


@pytest.mark.thorough
def test_rollout_drains_a_failed_release_and_a_crash_lose_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    flags = ("--rollouts", "1", "--drains", "2", "--kills", "1", "--rate", "40", "--out", str(report))
    done = subprocess.run(
        [*COMMAND, *flags],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr}\n{report.read_text() if report.exists() else ''}"
    text = report.read_text()
    assert "0 lost.**" in text
    rows = {line.split(" | ")[0].strip("| ") for line in text.splitlines() if line.startswith("|")}
    assert {"rollouts", "single drains", "a release that cannot load", "kill -9 of a whole pod"} <= rows
    assert {"`ModelInfer`", "`ModelStreamInfer`", "`infer`", "`generate_stream`"} <= rows


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has just begun."""
    with subprocess.Popen(
        [*COMMAND, "--out", os.devnull],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", variants(signal.SIGKILL, signal.SIGTERM))
def test_no_pod_outlives_the_one_who_started_it(harness: subprocess.Popen[str], number: int) -> None:
    def processes() -> list[int]:
        return [pid for pid in descendants(harness.pid) if "gpuserve" in command_line(pid)]

    wait_until(lambda: len(processes()) >= N_PROCESSES, "both pods have all their processes")
    family = descendants(harness.pid)
    harness.send_signal(number)
    assert not wait_ended(family, END_S)
    harness.wait(END_S)
