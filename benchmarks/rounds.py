"""The interleaved measurement. All servers stay up; one is loaded at a time while the others idle.

A round visits every row and every server once, each round beginning with another server, so that what the
machine does meanwhile falls on all of them. A pair of row and server whose run fails is not run again.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks import processes
from benchmarks.load import LoadFailed, LoadResult
from benchmarks.payloads import Payload
from benchmarks.rows import Row
from benchmarks.servers import RunningServer

_WARM_UP_S = 1.0
Say = Callable[[str], None]
#: The body of a right answer, by the server's name.
_Answers = dict[tuple[str, Payload], bytes]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. ``cpu_s_per_answer`` sums all processes of the server; the load generator is not in it.

    ``others_share`` is the part of the machine that neither the server nor the generator used.
    """

    value: float
    cpu_s_per_answer: float
    others_share: float


@dataclass(slots=True)
class Samples:
    """All runs, by row name and server name, in the order of the rounds."""

    by_pair: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)


def measure(
    rows: Sequence[Row], servers: Sequence[RunningServer], rounds: int, seconds: float, say: Say
) -> Samples:
    """Check the answers, warm everything up, then run the rounds.

    Raises:
        ServerFailed: a server does not answer right.
    """
    pairs = {(one, row.load.payload) for row in rows for one in servers if _can_run(row, one)}
    answers = {(one.server.name, payload): payload.check(one) for one, payload in pairs}
    samples = Samples()
    for row in rows:
        for one in servers:
            _run(row, one, min(seconds, _WARM_UP_S), answers, samples)
    for number in range(rounds):
        order = [*servers[number % len(servers) :], *servers[: number % len(servers)]]
        for row in rows:
            for one in order:
                sample = _run(row, one, seconds, answers, samples)
                if sample is None:
                    continue
                samples.by_pair.setdefault((row.name, one.server.name), []).append(sample)
                say(
                    f"round {number + 1}/{rounds}  {row.title}  {one.server.title}: "
                    f"{sample.value:.4g} {row.measure.value}"
                )
    return samples


def _run(row: Row, one: RunningServer, seconds: float, answers: _Answers, samples: Samples) -> Sample | None:
    pair = row.name, one.server.name
    if pair in samples.failures or not _can_run(row, one):
        return None
    before = _Clocks.read(one.pid)
    try:
        result = row.load.run(one, seconds, answers[one.server.name, row.load.payload])
    except LoadFailed as error:
        samples.failures[pair] = str(error)
        return None
    return _sample(row, result, before, _Clocks.read(one.pid))


def _can_run(row: Row, one: RunningServer) -> bool:
    return one.server.api in row.load.apis


@dataclass(frozen=True, slots=True)
class _Clocks:
    """Seconds so far: of the wall, of all CPUs together, and of those parts that are known."""

    wall_s: float
    machine_s: float
    generator_s: float
    server_s: dict[int, float]

    @classmethod
    def read(cls, server_pid: int) -> _Clocks:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(
            time.perf_counter(),
            processes.machine_busy_s(),
            children.ru_utime + children.ru_stime + time.process_time(),
            processes.cpu_by_pid(server_pid),
        )


def _sample(row: Row, result: LoadResult, before: _Clocks, after: _Clocks) -> Sample:
    server_s = sum(cpu_s - before.server_s.get(pid, 0.0) for pid, cpu_s in after.server_s.items())
    generator_s = after.generator_s - before.generator_s
    others_s = after.machine_s - before.machine_s - server_s - generator_s
    capacity_s = (after.wall_s - before.wall_s) * (os.cpu_count() or 1)
    return Sample(row.value(result), server_s / result.answers, max(0.0, others_s / capacity_s))
