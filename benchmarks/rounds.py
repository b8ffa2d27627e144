"""The interleaved measurement. All servers stay up; one is loaded at a time while the others idle.

A round visits every row and every server once, each round beginning with another server, so that what the
machine does meanwhile falls on all of them. A pair of row and server whose run fails is not run again.
"""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from benchmarks import processes
from benchmarks.figures import Goal
from benchmarks.load import Load, LoadFailed, LoadResult, api_between
from benchmarks.rows import WITHOUT, Row
from benchmarks.servers.server import Kind, Option, RunningServer, Server, ServerFailed

_WARM_UP_S = 1.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. ``value`` is what its row shows; latencies are those of single answers, where they are kept.

    ``cpu_s_per_answer`` sums all processes of the server, ``cpu_s_by_role`` parts it among them; the load
    generator is in neither. ``others_share`` is the part of the machine that neither of both used.
    """

    value: float
    answers_per_s: float
    median_latency_s: float | None
    p99_latency_s: float | None
    cpu_s_per_answer: float
    cpu_s_by_role: Mapping[str, float]
    others_share: float


@dataclass(slots=True)
class Samples:
    """All runs, by row name and server name, in the order of the rounds. ``not_up`` by server name."""

    by_pair: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    not_up: dict[str, str] = field(default_factory=dict)


class Subject:
    """What rows are run on: a server, or the bare machine. ``name`` is for samples, ``title`` for tables."""

    name: str
    title: str

    def can_run(self, row: Row) -> bool:
        raise NotImplementedError

    def check(self, row: Row) -> None:
        """Check an answer before the first run. Raises ServerFailed: it is wrong."""

    def run(self, row: Row, seconds: float) -> Sample:
        """Run a row once. Raises LoadFailed: a request failed."""
        raise NotImplementedError


class LoadedServer(Subject):
    """A server that is up, once with each option that its rows have, as the subject of rows."""

    def __init__(self, server: Server, up: Mapping[Option | None, RunningServer]) -> None:
        self._up = up
        self._answers: dict[Load, bytes] = {}
        self.name = server.name
        self.title = server.title
        if server.spins:
            for one in up.values():
                processes.pause(one.pid)

    def can_run(self, row: Row) -> bool:
        """Whether it speaks as the row's load does, has its model, and is up with its option."""
        one = self._one(row)
        return one is not None and api_between(row.load, one.server) is not None

    def check(self, row: Row) -> None:
        """Keep the right answer; see ``Subject``."""
        one = self._one_of(row)
        api = api_between(row.load, one.server)
        assert api is not None, f"{self.title} cannot run {row.name}"
        with _awake(one):
            self._answers[row.load] = row.load.payload.check(one, api)

    def run(self, row: Row, seconds: float) -> Sample:
        one = self._one_of(row)
        with _awake(one):
            before = Clocks.read(one.pid)
            result = row.load.run(one, seconds, self._answers[row.load])
            after = Clocks.read(one.pid)
        by_role = _by_role(one, before.server_s, after.server_s)
        return _sample_of(row, result, by_role, before, after)

    def _one(self, row: Row) -> RunningServer | None:
        return self._up.get(row.load.option)

    def _one_of(self, row: Row) -> RunningServer:
        one = self._one(row)
        assert one is not None, f"{self.title} is not up for {row.name}"
        return one


@contextmanager
def _awake(one: RunningServer) -> Iterator[None]:
    """Let a server run that is paused while others are measured."""
    if not one.server.spins:
        yield
        return
    processes.resume(one.pid)
    try:
        yield
    finally:
        processes.pause(one.pid)


class Baseline(LoadedServer):
    """This server without the option of a row, where the row has a goal against that."""

    def __init__(self, server: Server, up: Mapping[Option | None, RunningServer]) -> None:
        super().__init__(server, up)
        self.name, self.title = WITHOUT, f"{server.title} without the option"

    def _one(self, row: Row) -> RunningServer | None:
        return self._up.get(None) if row.has_baseline else None


def copy(nbytes: int, seconds: float) -> LoadResult:
    """Copy so many bytes again and again for this long, at least once, between two arrays that are mapped."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    times_s: list[float] = []
    now = began_at = time.perf_counter()
    while not times_s or now < began_at + seconds:
        np.copyto(target, source)
        ended_at = time.perf_counter()
        times_s.append(ended_at - now)
        now = ended_at
    return LoadResult.of_times(len(times_s), len(times_s) / (now - began_at), times_s)


class Memcpy(Subject):
    """The copy of a tensor, as the subject of the rows that move a large one."""

    name = title = "memcpy"

    def can_run(self, row: Row) -> bool:
        """Whether a copy is a measure for it."""
        return row.copied_nbytes is not None

    def run(self, row: Row, seconds: float) -> Sample:
        before = Clocks.read(None)
        result = copy(row.copied_nbytes or 0, seconds)
        return _sample_of(row, result, {}, before, Clocks.read(None))


def measure(
    rows: Sequence[Row], subjects: Sequence[Subject], rounds: int, seconds: float, say: Say
) -> Samples:
    """Check the answers, warm everything up, then run the rounds."""
    samples = Samples()
    for row in rows:
        for one in subjects:
            if one.can_run(row):
                _warm_up(row, one, min(seconds, _WARM_UP_S), samples)
    for number in range(rounds):
        first = number % len(subjects)
        for row in rows:
            for one in (*subjects[first:], *subjects[:first]):
                if sample := _run(row, one, seconds, samples):
                    samples.by_pair.setdefault((row.name, one.name), []).append(sample)
                    unit = row.measure.value
                    say(f"round {number + 1}/{rounds}  {row.title}  {one.title}: {sample.value:.4g} {unit}")
    return samples


def _warm_up(row: Row, one: Subject, seconds: float, samples: Samples) -> None:
    try:
        one.check(row)
    except ServerFailed as error:
        samples.failures[row.name, one.name] = str(error)
    else:
        _run(row, one, seconds, samples)


def _run(row: Row, one: Subject, seconds: float, samples: Samples) -> Sample | None:
    pair = row.name, one.name
    if pair in samples.failures or not one.can_run(row):
        return None
    try:
        return one.run(row, max(seconds, row.least_s))
    except (LoadFailed, ServerFailed) as error:
        samples.failures[pair] = str(error)
        return None


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds so far: of the wall, of all CPUs together, and of those parts that are known."""

    wall_s: float
    machine_s: float
    generator_s: float
    server_s: dict[int, float]

    @classmethod
    def read(cls, server_pid: int | None) -> Clocks:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(
            time.perf_counter(),
            processes.machine_busy_s(),
            children.ru_utime + children.ru_stime + time.process_time(),
            {} if server_pid is None else processes.cpu_by_pid(server_pid),
        )

    def others_share(self, before: Clocks, server_s: float) -> float:
        """Return the part of the machine that neither the server, of ``server_s``, nor the generator used."""
        others_s = self.machine_s - before.machine_s - server_s - (self.generator_s - before.generator_s)
        return max(0.0, others_s / (self.wall_s - before.wall_s) / (os.cpu_count() or 1))


def _by_role(one: RunningServer, before: Mapping[int, float], after: Mapping[int, float]) -> dict[str, float]:
    """CPU seconds between; processes of the same role are counted together."""
    by_role: dict[str, float] = defaultdict(float)
    for process in processes.tree(one.pid):
        used_s = after.get(process.pid, 0.0) - before.get(process.pid, 0.0)
        by_role[one.server.role(process.command)] += used_s
    return dict(by_role)


def _sample_of(
    row: Row, result: LoadResult, by_role: Mapping[str, float], before: Clocks, after: Clocks
) -> Sample:
    server_s = sum(by_role.values())
    return Sample(
        row.value(result),
        result.answers_per_s,
        result.median_latency_s,
        result.p99_latency_s,
        server_s / result.answers,
        {role: used_s / result.answers for role, used_s in by_role.items()},
        after.others_share(before, server_s),
    )


OURS = "gpuserve"


@dataclass(frozen=True, slots=True)
class Ratio:
    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        by_round = [a / b for a, b in zip(ours, theirs, strict=True)]
        return cls(median(by_round), min(by_round), max(by_round))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lowest:.2f} to {self.highest:.2f})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One goal of a row. ``ratio`` is None where the other server has no samples."""

    against: str  #: the server's name
    is_best: bool  #: it was looked for as the best peer, not named by the goal
    target: Goal
    ratio: Ratio | None

    @property
    def reached(self) -> bool | None:
        """Whether the median reaches the goal; None where it was not measured."""
        return None if self.ratio is None else self.target.met_by(self.ratio.median)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured, by server. ``kinds`` are in the order of the columns."""

    kinds: Mapping[str, Kind]
    samples: Samples

    def complete(self, row: Row, server: str) -> Sequence[Sample]:
        """The samples of a pair that failed in no round; a ratio needs the same rounds on both sides."""
        pair = row.name, server
        return () if pair in self.samples.failures else self.samples.by_pair.get(pair, ())

    def ratio(self, row: Row, server: str) -> Ratio | None:
        """Ours over that of this server; None where one of both was not measured."""
        ours, theirs = ([one.value for one in self.complete(row, name)] for name in (OURS, server))
        return Ratio.of(ours, theirs) if ours and theirs else None

    def best_peer(self, row: Row) -> str | None:
        """The peer with the best median; None where no peer was measured."""
        medians = {
            name: median(one.value for one in samples)
            for name, kind in self.kinds.items()
            if kind is Kind.PEER and (samples := self.complete(row, name))
        }
        if not medians:
            return None
        return (min if row.measure.less_is_better else max)(medians, key=lambda name: medians[name])

    def verdicts(self, row: Row) -> list[Verdict]:
        """Every goal of a row that we were measured in; that of the best peer is the first."""
        if not self.complete(row, OURS):
            return []
        best, found = self.best_peer(row), []
        if row.goals.best and best:
            found.append(Verdict(best, True, row.goals.best, self.ratio(row, best)))
        named = [Verdict(name, False, target, self.ratio(row, name)) for name, target in row.goals.named]
        return found + [one for one in named if (one.against, one.target) != (best, row.goals.best)]
