"""Arrival times of requests, and the start of the open-loop client."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.load import LoadFailed
from benchmarks.payloads import RawPayload, framed
from benchmarks.scenarios.paced_client import Paced
from benchmarks.servers.server import RunningServer

_POLL_S = 0.5
_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The requests of one run: request ``i`` is due at ``at_s[i]``, on connection ``connection[i]``."""

    at_s: tuple[float, ...]
    connection: tuple[int, ...]

    @property
    def connections(self) -> int:
        return max(self.connection) + 1

    def first_after(self, seconds: float) -> int:
        """Return the number of the first request that is due so many seconds after the start."""
        return next(index for index, at in enumerate(self.at_s) if at >= seconds)


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


def paced(
    one: RunningServer,
    payload: RawPayload,
    answer: bytes,
    schedule: Schedule,
    watch: Callable[[], None] = lambda: None,
    headers: Sequence[str] = (),
) -> Paced:
    """Run the client by this schedule. ``watch`` is called a few times meanwhile; ``headers`` are more
    headers of each call, ``name:value``. Raises LoadFailed if a request is answered wrong, or not at all.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        request, answer_file, due, result = (
            Path(folder) / name for name in ("request.bin", "answer.bin", "schedule.json", "result.json")
        )
        request.write_bytes(framed(payload.grpc_message()))
        answer_file.write_bytes(answer)
        due.write_text(json.dumps(asdict(schedule)))
        command = [
            *(sys.executable, "-m", "benchmarks.scenarios.paced_client", str(one.ports.grpc)),
            *(payload.path, str(request), str(answer_file), *headers),
        ]
        with due.open("rb") as stdin, result.open("wb") as stdout:
            client = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)
            errors = _attend(client, schedule.at_s[-1] + _GRACE_S, watch)
        if client.returncode:
            raise LoadFailed(f"the open-loop client ended with {client.returncode}: {errors}")
        return Paced(**json.loads(result.read_text()))


def _attend(client: subprocess.Popen[bytes], timeout_s: float, watch: Callable[[], None]) -> str:
    for _ in range(round(timeout_s / _POLL_S)):
        try:
            return client.communicate(timeout=_POLL_S)[1].decode(errors="replace")
        except subprocess.TimeoutExpired:
            watch()
    client.kill()
    client.communicate()
    raise LoadFailed(f"the open-loop client did not end within {timeout_s:.0f} s")
