"""The loads of scenarios: arrival times, the open-loop client, and h2load in a closed loop."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.load import LoadFailed, LoadResult, parse_h2load
from benchmarks.payloads import framed
from benchmarks.scenarios.paced_client import Paced
from benchmarks.scenarios.scenario import RowPayload, Usage
from benchmarks.servers.server import RunningServer


@dataclass(frozen=True, slots=True)
class Schedule:
    """The requests of one run: request ``i`` is due at ``at_s[i]``, on connection ``connection[i]``."""

    at_s: tuple[float, ...]
    connection: tuple[int, ...]

    @property
    def connections(self) -> int:
        return max(self.connection) + 1


def poisson(rate_hz: float, seconds: float, connections: int, seed: int) -> Schedule:
    """Independent clients: intervals are exponential. Connections take turns."""
    source = random.Random(seed)
    times: list[float] = []
    now = source.expovariate(rate_hz)
    while now < seconds:
        times.append(now)
        now += source.expovariate(rate_hz)
    return Schedule(tuple(times), tuple(index % connections for index in range(len(times))))


def periodic(rate_hz: float, seconds: float, connections: int, seed: int) -> Schedule:
    """Every connection sends ``rate_hz`` requests a second, evenly, and began at a moment of its own."""
    source = random.Random(seed)
    period_s = 1 / rate_hz
    phases = [source.random() * period_s for _ in range(connections)]
    due = sorted(
        (phase + turn * period_s, connection)
        for connection, phase in enumerate(phases)
        for turn in range(round(seconds * rate_hz))
    )
    return Schedule(tuple(at for at, _ in due), tuple(connection for _, connection in due))


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


_POLL_S = 0.5
_OPEN_LOOP_GRACE_S = 60.0


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
            errors = _attend(client, schedule.at_s[-1] + _OPEN_LOOP_GRACE_S, watch)
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
