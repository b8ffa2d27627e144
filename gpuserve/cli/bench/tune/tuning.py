"""Trials: a server with other settings is started on free ports of this machine, measured and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Final

from gpuserve.cli.bench.bench_session import BenchObserver, BenchRun, run_bench
from gpuserve.cli.bench.level_results import LevelResult
from gpuserve.cli.bench.load_plan import BenchError, BenchOptionError, LoadPlan
from gpuserve.cli.bench.preparation import RequestData
from gpuserve.cli.bench.request_payloads import Target
from gpuserve.cli.bench.tune.settings_search import (
    Axis,
    LatencyLimit,
    MeasuredPoint,
    Position,
    Settings,
    best_point,
    coordinate_search,
    points_of,
    score_of,
)
from gpuserve.cli.bench.tune.tune_output import TrialView
from gpuserve.client.client_settings import ServerUrl
from gpuserve.config.load import Configuration, load_file
from gpuserve.config.precedence import Override
from gpuserve.config.problems import ConfigProblems, Origin
from gpuserve.config.yaml_document import Path

#: Throughput has stopped growing if a level exceeds the best level before by less than this factor.
_GROWTH: Final = 1.02


@dataclass(frozen=True)
class TunedModel:
    """A model of a config file, and its load. ``index`` is its place under ``models``."""

    config: str
    index: int
    name: str
    instances: Sequence[Mapping[str, Any]]
    axes: Sequence[Axis]
    data: RequestData
    plan: LoadPlan
    protocol: str

    def values(self, settings: Settings) -> dict[Path, Any]:
        """Return the values that replace those of the file in a trial's server."""
        found: dict[Path, Any] = {}
        for axis, value in zip(self.axes, settings, strict=True):
            if axis.keys[0] == "instances":  # the whole list, because the file may omit it
                found["models", self.index, "instances"] = [{**self.instances[0], "count": value}]
            else:
                found["models", self.index, *axis.keys] = axis.setting(value)
        return found

    def changes(self, settings: Settings) -> dict[Path, Any]:
        return {
            ("models", self.index, *axis.keys): axis.setting(value)
            for axis, value in zip(self.axes, settings, strict=True)
            if value != axis.start
        }


@dataclass
class Tuning:
    """A search over one model, with ``max_trials``; ``earlier_values`` are those of models tuned before."""

    model: TunedModel
    limit: LatencyLimit
    max_trials: int
    observer: TrialView
    earlier_values: Mapping[Path, Any] = field(default_factory=dict)
    points: list[MeasuredPoint] = field(default_factory=list)
    trials: int = 0
    interrupted: bool = False

    @property
    def best(self) -> MeasuredPoint | None:
        return best_point(self.points, self.limit)

    def run(self, deadline_s: float) -> None:
        """Search until done, out of trials or time, or Ctrl-C; raise BenchError if the first trial fails."""
        axes = self.model.axes
        start = []  # the positions of the file's values, or of the nearest ones
        for axis in axes:
            distances = [abs(value - axis.start) for value in axis.values]
            start.append(distances.index(min(distances)))
        search = coordinate_search([len(axis.values) for axis in axes], tuple(start))
        position = next(search)
        try:
            while True:
                found = self._run_trial(position)
                if self.interrupted or self.trials >= self.max_trials or time.monotonic() > deadline_s:
                    return
                position = search.send(found)
        except StopIteration:
            return
        except KeyboardInterrupt:
            self.interrupted = True

    def _run_trial(self, position: Position) -> float:
        settings = tuple(axis.values[at] for axis, at in zip(self.model.axes, position, strict=True))
        self.trials += 1
        levels = self.observer.trial_started(self.trials, settings)
        failure = ""
        points: list[MeasuredPoint] = []
        try:
            points = self._measure_settings(settings, levels)
        except (ConfigProblems, BenchError) as error:
            if self.trials == 1:  # a failure of the first trial is the file's fault
                raise
            failure = str(error)
        self.points += points
        self.observer.trial_ended(settings, points, failure)
        return score_of(points, self.limit)

    def _measure_settings(self, settings: Settings, observer: BenchObserver) -> list[MeasuredPoint]:
        model = self.model
        values = {**self.earlier_values, **model.values(settings)}
        # A contradiction with the file is found without a server.
        trial_configuration(model.config, values.items())
        with trial_server(model.config, values, model.protocol) as url:
            target = Target(url, model.name)
            outcome = run_bench(BenchRun(target, model.data, model.plan), observer, self._is_past_maximum)
        self.interrupted |= outcome.interrupted
        for one in outcome.levels:
            if one.failed:
                kind, (_, text) = next(iter(one.failures.items()))
                raise TrialFailed(f"{one.failed} requests failed: {kind} {text}")
        return points_of(settings, outcome.levels, self.limit)

    def _is_past_maximum(self, levels: Sequence[LevelResult]) -> bool:
        """Return whether more requests in flight are useless: over the limit, or no faster than before."""
        last = levels[-1]
        if last.failed or not self.limit.is_met(last.latency):
            return True
        if len(levels) < 3:
            return False
        before = max(one.throughput for one in levels[:-2])
        return max(last.throughput, levels[-2].throughput) < _GROWTH * before


def model_index(configuration: Configuration, name: str) -> int:
    """Return a model's index in ``models``; raise BenchOptionError if it is unknown or an ensemble."""
    entries = configuration.entries.models
    names = [one.name for one in entries]
    if name not in names:
        raise BenchOptionError("--model", f"the file has no model {name!r}, only {', '.join(names)}")
    index = names.index(name)
    if entries[index].callable is None:
        text = f"{name!r} is an ensemble, which has nothing to tune; tune its steps"
        raise BenchOptionError("--model", text)
    return index


_END_TIMEOUT_S: Final = 30.0
_LABEL: Final = "gpuserve tune"
_ADDRESS = re.compile(r"(HTTP|gRPC) (?:https?://|grpcs?://)?([\w.:\[\]-]+)")
_TITLES: Final = {"http": "HTTP", "grpc": "gRPC"}
#: Settings of a trial's server, which listens on this machine for the load generator only.
_ON_THIS_MACHINE: Final[dict[str, Any]] = {
    "host": "127.0.0.1",
    "http_port": 0,
    "grpc_port": 0,
    "metrics_port": None,
    "health_port": None,
    "lame_duck_s": 0.0,
    "log_format": "json",
    "log_level": "info",
    "tls_certfile": None,
    "tls_keyfile": None,
    "tls_client_ca": None,
    "restricted_endpoints": [],
    "access_token": None,
    "access_rules": [],
}


class TrialFailed(BenchError):
    """The server does not start with these settings. The text is its last message."""


def trial_overrides(values: Mapping[Path, Any]) -> list[tuple[Path, Any]]:
    """Return the values that a trial's server has instead of the file's."""
    return [*((("server", key), value) for key, value in _ON_THIS_MACHINE.items()), *values.items()]


def trial_configuration(config: str, values: Iterable[tuple[Iterable[str | int], Any]]) -> Configuration:
    """Return a file's configuration with other values at paths; raise ConfigProblems if they do not fit."""
    overrides = [Override(tuple(path), value, _LABEL, Origin.FLAG) for path, value in values]
    return load_file(config, os.environ, overrides)


@contextlib.contextmanager
def trial_server(config: str, values: Mapping[Path, Any], protocol: str) -> Iterator[ServerUrl]:
    """Run a server in its own session within the block; yield its URL, or raise TrialFailed."""
    overrides = json.dumps(trial_overrides(values))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "gpuserve.cli.tune_trial", str(os.getpid()), config, overrides],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    reader: threading.Thread | None = None
    try:
        address = _wait_until_ready(process.stderr, protocol)
        reader = threading.Thread(target=deque, args=(process.stderr, 0), daemon=True)
        reader.start()  # drops the lines: a full pipe would block the server
        yield ServerUrl.parse(f"{protocol}://{address}")
    finally:
        _stop_process(process)
        if reader is not None:
            reader.join(_END_TIMEOUT_S)
        process.stderr.close()


def _wait_until_ready(stderr: IO[str], protocol: str) -> str:
    last = "the server ended without a message"
    for line in stderr:
        message = _message(line)
        if message.startswith("ready: "):
            found: dict[str, str] = dict(_ADDRESS.findall(message))
            if _TITLES[protocol] not in found:
                raise TrialFailed(f"the server has no port for {_TITLES[protocol]}")
            return found[_TITLES[protocol]]
        last = message or last
    raise TrialFailed(last)


def _message(line: str) -> str:
    """Return the message of a log line, or the line itself if it is not JSON."""
    try:
        return str(json.loads(line)["msg"])
    except (KeyError, TypeError, ValueError):
        return line.strip()


def _stop_process(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
