"""Runs the open-loop client in a process of its own, and says what of its latencies counts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.load import LoadFailed
from benchmarks.payloads import framed
from benchmarks.scenarios.arrivals import Schedule
from benchmarks.scenarios.paced_client import Paced
from benchmarks.scenarios.payload import RowPayload
from benchmarks.servers import RunningServer

_POLL_S = 0.5
_GRACE_S = 60.0


def paced(
    one: RunningServer,
    payload: RowPayload,
    answer: bytes,
    schedule: Schedule,
    watch: Callable[[], None] = lambda: None,
    headers: Sequence[str] = (),
) -> Paced:
    """One run by this schedule. ``watch`` is called a few times while it goes on; ``headers`` are more of
    each call's, ``name:value``.

    Raises:
        LoadFailed: a request was answered wrong, or not at all.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        request_file, answer_file = Path(folder) / "request.bin", Path(folder) / "answer.bin"
        schedule_file, result_file = Path(folder) / "schedule.json", Path(folder) / "result.json"
        request_file.write_bytes(framed(payload.grpc_message()))
        answer_file.write_bytes(answer)
        schedule_file.write_text(json.dumps(asdict(schedule)))
        command = [
            *(sys.executable, "-m", "benchmarks.scenarios.paced_client", str(one.ports.grpc)),
            *(payload.path, str(request_file), str(answer_file), *headers),
        ]
        with schedule_file.open("rb") as stdin, result_file.open("wb") as stdout:
            client = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)
            errors = _attend(client, schedule.at_s[-1] + _GRACE_S, watch)
        if client.returncode:
            raise LoadFailed(f"the open-loop client ended with {client.returncode}: {errors}")
        return Paced(**json.loads(result_file.read_text()))


def _attend(client: subprocess.Popen[bytes], timeout_s: float, watch: Callable[[], None]) -> str:
    """Wait for its end; what it said on stderr."""
    for _ in range(round(timeout_s / _POLL_S)):
        try:
            return client.communicate(timeout=_POLL_S)[1].decode(errors="replace")
        except subprocess.TimeoutExpired:
            watch()
    client.kill()
    client.communicate()
    raise LoadFailed(f"the open-loop client did not end within {timeout_s:.0f} s")
