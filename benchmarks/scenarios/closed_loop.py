"""Runs h2load with a fixed number of requests in flight, for a time or for a number of requests."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import LoadFailed, LoadResult, parse_h2load
from benchmarks.payloads import framed
from benchmarks.scenarios.payload import RowPayload
from benchmarks.scenarios.scenario import Usage
from benchmarks.servers import RunningServer

PROGRAM = "h2load"
_GRACE_S = 300.0


@dataclass(frozen=True, slots=True)
class InFlight:
    """So many connections with so many requests each."""

    connections: int
    streams: int

    def run(
        self,
        one: RunningServer,
        payload: RowPayload,
        answer: bytes,
        *,
        seconds: float = 0.0,
        requests: int = 0,
    ) -> LoadResult:
        """One run; either of the two limits is given.

        Raises:
            LoadFailed: not every request was answered right.
        """
        limit = ["-n", str(requests)] if requests else ["-D", f"{round(seconds * 1000)}ms"]
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            body = Path(folder) / "body.bin"
            body.write_bytes(framed(payload.grpc_message()))
            command = [
                *(PROGRAM, "-t", "1", "-c", str(self.connections), "-m", str(self.streams), *limit),
                *("-d", str(body), "-H", "content-type: application/grpc", "-H", "te: trailers"),
                f"http://127.0.0.1:{one.ports.grpc}{payload.path}",
            ]
            output = _output(command, seconds + _GRACE_S)
        return parse_h2load(output, len(answer), 0 if requests else self.connections * self.streams)

    def timed(
        self, one: RunningServer, payload: RowPayload, answer: bytes, seconds: float
    ) -> tuple[float, float]:
        """Requests a second, and CPU microseconds of the server for each.

        Raises:
            LoadFailed: not every request was answered right.
        """
        before = Usage.read(one)
        result = self.run(one, payload, answer, seconds=seconds)
        used_s = Usage.read(one).server_s - before.server_s
        return result.answers_per_s, used_s / result.answers * 1e6


def _output(command: list[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"{PROGRAM} did not end within {timeout_s:.0f} s") from None
    if done.returncode:
        raise LoadFailed(f"{PROGRAM} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout
