"""``gpuserve tune``: from a config file to the settings that give the most under a latency limit."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from gpuserve.cli import tune_options as options
from gpuserve.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from gpuserve.bench.preparation import Data
    from gpuserve.config.load import Configuration
    from gpuserve.config.positions import Path
    from gpuserve.tune.tuning import Goal, Subject, Tuning


def tune(
    ctx: typer.Context,
    config: options.Config,
    models: options.Models = None,
    latency_limit: options.LatencyLimit = None,
    trials: options.Trials = 30,
    time_budget: options.TimeBudget = "10m",
    output: options.Output = None,
    max_batch_sizes: options.MaxBatchSizes = None,
    delays_us: options.DelaysUs = None,
    instances: options.Instances = None,
    prefetch: options.Prefetch = None,
    concurrency: options.Concurrency = "1:256:x2",
    duration_s: options.DurationS = 3.0,
    warmup_s: options.WarmupS = 0.5,
    protocol: options.Protocol = "grpc",
    shapes: options.Shapes = None,
    batch_size: options.BatchSize = 1,
    data: options.Data = "random",
) -> None:
    """Search max_batch_size, batching delay, instances and prefetch of each model for the most throughput.

    Every trial starts a server of its own on free ports and loads it more and more, until the latency is
    over the limit or the throughput stops growing. Ctrl-C ends the search with the best so far.

    Examples:
      gpuserve tune config.yaml --shape x:16 --latency-limit p99=50ms --output best.yaml
      gpuserve tune config.yaml --model linear --instances 1,2,4 --prefetch 0 --time-budget 5m
    """
    from gpuserve.bench.errors import BenchOptionError

    given = dict(ctx.params)
    try:
        raise typer.Exit(_tune(given))
    except BenchOptionError as error:
        raise typer.BadParameter(error.args[0], param_hint=error.option) from None


def _tune(given: dict[str, Any]) -> int:
    from gpuserve.bench.latencies import histogram_type
    from gpuserve.config.load import load_file
    from gpuserve.tune.view import TrialLines, show_front

    histogram_type()
    goal = _goal(given)
    _check_output(given["output"])
    configuration = load_file(given["config"], os.environ)
    subjects = [_subject(given, configuration, name) for name in _names(given, configuration)]
    deadline_s = time.monotonic() + goal.budget_s
    chosen: dict[Path, int] = {}
    values: dict[Path, Any] = {}
    found = missed = False
    for subject in subjects:
        sys.stderr.write(f"{subject.name}\n")
        tuning = _tuning(subject, goal, TrialLines(subject.axes, goal.limit, sys.stderr), values)
        tuning.run(deadline_s)
        show_front(subject.name, subject.axes, tuning.points, goal.limit, sys.stdout)
        best = tuning.best
        if best is None:
            missed = True
            sys.stderr.write(f"{subject.name}: no settings that were tried stay under the latency limit\n")
        else:
            found = True
            chosen |= subject.changes(best.settings)
            values |= subject.values(best.settings)
        if tuning.interrupted:
            sys.stderr.write("the search was interrupted: other settings may be better\n")
            break
    if found:
        _write(given, chosen)
    return ExitCode.RUNTIME_FAILURE if missed else ExitCode.OK


def _tuning(subject: Subject, goal: Goal, view: Any, values: dict[Path, Any]) -> Tuning:
    from gpuserve.tune.tuning import Tuning

    return Tuning(subject, goal, view, dict(values))


def _goal(given: dict[str, Any]) -> Goal:
    from gpuserve.tune.limits import LatencyLimit, parse_limit, parse_seconds
    from gpuserve.tune.tuning import Goal

    text = given["latency_limit"]
    limit = LatencyLimit() if text is None else parse_limit(text)
    return Goal(limit, given["trials"], parse_seconds("--time-budget", given["time_budget"]))


def _names(given: dict[str, Any], configuration: Configuration) -> list[str]:
    from gpuserve.bench.errors import BenchOptionError

    names = given["models"] or [one.name for one in configuration.entries.models if one.callable is not None]
    names = list(dict.fromkeys(names))
    if not names:
        raise BenchOptionError("CONFIG", "the file has no model to tune")
    if len(names) > 1 and given["data"] not in {"random", "zero"}:
        raise BenchOptionError("--data", "a file holds the inputs of one model: name it with --model")
    return names


def _subject(given: dict[str, Any], configuration: Configuration, name: str) -> Subject:
    from gpuserve.tune.axes import axes_of, parse_wishes
    from gpuserve.tune.tuning import Subject, model_index

    index = model_index(configuration, name)
    entry = configuration.entries.models[index]
    instances = [one.model_dump(mode="json", exclude_none=True) for one in entry.instances]
    axes = axes_of(
        configuration.models[index],
        [one.count for one in entry.instances],
        os.cpu_count() or 1,
        given["batch_size"],
        parse_wishes(given),
    )
    inputs = {one.name for one in entry.inputs}
    return Subject(
        given["config"], index, name, instances, axes, _data(given, inputs), _plan(given), given["protocol"]
    )


def _data(given: dict[str, Any], inputs: set[str]) -> Data:
    """What requests to this model hold; shapes of inputs of other models are theirs."""
    from gpuserve.bench.model_metadata import parse_shapes
    from gpuserve.bench.preparation import Data

    shapes = parse_shapes(given["shapes"] or ())
    own = {name: shape for name, shape in shapes.items() if name in inputs}
    return Data.of(given["data"], own, given["batch_size"])


def _plan(given: dict[str, Any]) -> Any:
    from gpuserve.bench.errors import BenchOptionError
    from gpuserve.bench.levels import LoadKind, parse_levels
    from gpuserve.bench.plan import Plan, check_times, default_processes
    from gpuserve.bench.target import PROTOCOLS

    if given["protocol"] not in PROTOCOLS:
        raise BenchOptionError("--protocol", f"expected grpc or http, given {given['protocol']!r}")
    check_times(given["duration_s"], given["warmup_s"])
    levels = parse_levels(LoadKind.CONCURRENCY, given["concurrency"])
    return Plan(
        tuple(sorted(levels, key=lambda one: one.value)),
        given["duration_s"],
        given["warmup_s"],
        processes=default_processes(os.cpu_count() or 1),
    )


def _check_output(path: str | None) -> None:
    from gpuserve.bench.errors import BenchOptionError

    if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
        raise BenchOptionError("--output", f"there is no folder {os.path.dirname(path)!r}")


def _write(given: dict[str, Any], chosen: dict[Path, int]) -> None:
    from gpuserve.bench.errors import BenchOptionError
    from gpuserve.tune.yaml_edit import with_values

    if given["output"] is None:
        return
    with open(given["config"], encoding="utf-8-sig") as file:
        text = with_values(file.read(), chosen)
    try:
        with open(given["output"], "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise BenchOptionError("--output", f"{given['output']} cannot be written: {reason}") from None
