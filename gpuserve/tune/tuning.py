"""Trial after trial: a server with other settings is started, measured and ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from gpuserve.bench.plan.errors import BenchError, BenchOptionError
from gpuserve.bench.plan.plan import LoadPlan
from gpuserve.bench.preparation import Data
from gpuserve.bench.reports.results import LevelResult
from gpuserve.bench.server.target import Target
from gpuserve.bench.session import BenchObserver, BenchRun, measure
from gpuserve.config.load import Configuration
from gpuserve.config.problems import ConfigProblems
from gpuserve.config.yaml_document import Path
from gpuserve.tune.axes import Axis, Settings
from gpuserve.tune.search import LatencyLimit, Point, Position, best, coordinate_search, points_of, score
from gpuserve.tune.trial_server import TrialFailed, configuration_of, trial_server

#: A level that gives less than this part more than the best before has found the top.
_GROWTH: Final = 1.02


@dataclass(frozen=True)
class Goal:
    """The latency limit, and the bounds of the search."""

    limit: LatencyLimit
    trials: int
    budget_s: float


@dataclass(frozen=True)
class Subject:
    """One model of a config file, and how it is loaded. ``index`` is its place under ``models``."""

    config: str
    index: int
    name: str
    instances: Sequence[Mapping[str, Any]]
    axes: Sequence[Axis]
    data: Data
    plan: LoadPlan
    protocol: str

    def values(self, settings: Settings) -> dict[Path, Any]:
        """What a server has in the place of the file's values."""
        found: dict[Path, Any] = {}
        for axis, value in zip(self.axes, settings, strict=True):
            if axis.keys[0] == "instances":  # the file may leave the list out, so it is given whole
                found["models", self.index, "instances"] = [{**self.instances[0], "count": value}]
            else:
                found["models", self.index, *axis.keys] = value
        return found

    def changes(self, settings: Settings) -> dict[Path, int]:
        return {
            ("models", self.index, *axis.keys): value
            for axis, value in zip(self.axes, settings, strict=True)
            if value != axis.start
        }


class TuningObserver(Protocol):
    """Receives the progress of a search, to show it."""

    def trial_started(self, number: int, settings: Settings) -> BenchObserver:
        """A server is being started; returns the observer of its levels."""

    def trial_ended(self, settings: Settings, points: Sequence[Point], failure: str) -> None:
        """A trial was measured; ``failure`` says why there are no points, or is empty."""


@dataclass
class Tuning:
    """The search over one model; ``points`` is measured so far, ``others`` are values tuned before."""

    subject: Subject
    goal: Goal
    observer: TuningObserver
    others: Mapping[Path, Any] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    trials: int = 0
    interrupted: bool = False

    @property
    def best(self) -> Point | None:
        return best(self.points, self.goal.limit)

    def run(self, deadline_s: float) -> None:
        """Search until no step is better, or trials, ``time.monotonic`` or the user end it; or BenchError."""
        axes = self.subject.axes
        start = tuple(_nearest(axis) for axis in axes)
        search = coordinate_search([len(axis.values) for axis in axes], start)
        position = next(search)
        try:
            while True:
                found = self._try(position)
                if self.interrupted or self.trials >= self.goal.trials or time.monotonic() > deadline_s:
                    return
                position = search.send(found)
        except StopIteration:
            return
        except KeyboardInterrupt:
            self.interrupted = True

    def _try(self, position: Position) -> float:
        settings = tuple(axis.values[at] for axis, at in zip(self.subject.axes, position, strict=True))
        self.trials += 1
        levels = self.observer.trial_started(self.trials, settings)
        failure = ""
        points: list[Point] = []
        try:
            points = self._measured(settings, levels)
        except (ConfigProblems, BenchError) as error:
            if self.trials == 1:  # not the settings are wrong, but the file
                raise
            failure = str(error)
        self.points += points
        self.observer.trial_ended(settings, points, failure)
        return score(points, self.goal.limit)

    def _measured(self, settings: Settings, observer: BenchObserver) -> list[Point]:
        subject = self.subject
        values = {**self.others, **subject.values(settings)}
        # What contradicts the file needs no server to say so.
        configuration_of(subject.config, values.items())
        with trial_server(subject.config, values, subject.protocol) as url:
            target = Target(url, subject.name)
            outcome = measure(BenchRun(target, subject.data, subject.plan), observer, self._is_enough)
        self.interrupted |= outcome.interrupted
        for one in outcome.levels:
            if one.failed:
                kind, (_, text) = next(iter(one.failures.items()))
                raise TrialFailed(f"{one.failed} requests failed: {kind} {text}")
        return points_of(settings, outcome.levels, self.goal.limit)

    def _is_enough(self, levels: Sequence[LevelResult]) -> bool:
        """More in flight is of no use: over the limit, or no faster than before."""
        last = levels[-1]
        if last.failed or not self.goal.limit.holds(last.latency):
            return True
        if len(levels) < 3:
            return False
        before = max(one.throughput for one in levels[:-2])
        return max(last.throughput, levels[-2].throughput) < _GROWTH * before


def _nearest(axis: Axis) -> int:
    """Where the search begins: at the file's value, or as near to it as the values are."""
    return min(range(len(axis.values)), key=lambda at: abs(axis.values[at] - axis.start))


def model_index(configuration: Configuration, name: str) -> int:
    """The place of a model under ``models``; BenchOptionError: no such name, or an ensemble."""
    entries = configuration.entries.models
    names = [one.name for one in entries]
    if name not in names:
        raise BenchOptionError("--model", f"the file has no model {name!r}, only {', '.join(names)}")
    index = names.index(name)
    if entries[index].callable is None:
        raise BenchOptionError(
            "--model", f"{name!r} is an ensemble, which has nothing to tune; tune its steps"
        )
    return index
