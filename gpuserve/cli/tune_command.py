"""``gpuserve tune``: a search for the settings with the most throughput under a latency limit."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpuserve.cli.bench.load_plan import BenchOptionError, MissingPackage, error_reason
from gpuserve.cli.bench_command import run_and_exit
from gpuserve.cli.exit_codes import ExitCode
from gpuserve.cli.option_types import keyword, with_options

if TYPE_CHECKING:
    from gpuserve.cli.bench.preparation import RequestData
    from gpuserve.cli.bench.tune.tuning import TunedModel
    from gpuserve.config.load import Configuration
    from gpuserve.config.yaml_document import Path


_SEARCH, _VALUES, _LOAD = "Search", "Values to try (lists such as 1,2,4; one value is fixed)", "Load"

_Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The config file, which stays unchanged.")]
# fmt: off
_OPTIONS: Final = (
    keyword(_SEARCH, "models", list[str] | None, None,
            "A model to tune; repeatable. Default: every model.", "--model"),
    keyword(_SEARCH, "latency_limit", str | None, None,
            "Limit of the latency: mean, p50, p90, p95, p99, p99.9 or max.", metavar="p99=50ms"),
    keyword(_SEARCH, "trials", int, 30, "Number of settings to try for each model, at most.", least=1),
    keyword(_SEARCH, "time_budget_s", float, "10m",
            "Time for all models together: 90s, 10m, 1h.", "--time-budget"),
    keyword(_SEARCH, "output", str | None, None, "Write the config with the best settings.", metavar="FILE"),
    keyword(_VALUES, "max_batch_sizes", str | None, None, None, metavar="LIST"),
    keyword(_VALUES, "delays_us", str | None, None, "Values of max_queue_delay_us.", metavar="LIST"),
    keyword(_VALUES, "instances", str | None, None, "Numbers of instances.", metavar="LIST"),
    keyword(_VALUES, "prefetch", str | None, None, None, metavar="LIST"),
    keyword(_VALUES, "batch_elements", str | None, None,
            "Values of max_batch_elements of models with ragged inputs.", metavar="LIST"),
    keyword(_VALUES, "bucket_boundaries", str | None, None,
            "Lengths at which two buckets of a ragged input meet; 0: one bucket.", metavar="LIST"),
    keyword(_LOAD, "concurrency", str, "1:256:x2", "Requests in flight, ascending.", metavar="LEVELS"),
    keyword(_LOAD, "duration_s", float, "3s", "Length of each level: 3s, 1m.", "--duration"),
    keyword(_LOAD, "warmup_s", float, "500ms", "Load before each level, without measurement.", "--warmup"),
    keyword(_LOAD, "protocol", str, "grpc", None, metavar="grpc|http"),
    keyword(_LOAD, "shapes", list[str] | None, None,
            "Shape of an input without the batch axis, such as x:3,224,224.", "--shape", metavar="NAME:DIMS"),
    keyword(_LOAD, "batch_size", int, 1, "Rows of each request.", least=1),
    keyword(_LOAD, "data", str, "random", "Content of inputs; as for bench.", metavar="random|zero|FILE"),
)
# fmt: on


@partial(with_options, options=_OPTIONS)
def tune(ctx: typer.Context, config: _Config, **_options: Any) -> None:
    """Search max_batch_size, batching delay, instances and prefetch of each model for the most throughput,
    and limits of elements and buckets of ragged inputs.

    Every trial starts its own server on free ports and raises the load, until the latency exceeds the
    limit or the throughput stops growing. Ctrl-C ends the search with the best settings so far.

    Examples:
      gpuserve tune config.yaml --latency-limit p99=50ms --output best.yaml
      gpuserve tune config.yaml --model linear --instances 1,2,4 --time-budget 5m
    """
    run_and_exit(_run_tune, ctx)


def _run_tune(given: dict[str, Any]) -> int:
    from gpuserve.cli.bench.level_results import histogram_type
    from gpuserve.cli.bench.tune.tune_output import TrialView, print_front
    from gpuserve.cli.bench.tune.tuning import Tuning
    from gpuserve.config.load import load_file

    histogram_type()
    from gpuserve.cli.bench.tune.settings_search import LatencyLimit, parse_limit

    limit = LatencyLimit() if given["latency_limit"] is None else parse_limit(given["latency_limit"])
    path = given["output"]
    if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
        raise BenchOptionError("--output", f"there is no folder {os.path.dirname(path)!r}")
    if path is not None and find_spec("ruamel") is None:
        raise MissingPackage("ruamel.yaml")  # before the search, which may take long
    configuration = load_file(given["config"], os.environ)
    tuned_models = [_tuned_model(given, configuration, name) for name in _model_names(given, configuration)]
    deadline_s = time.monotonic() + given["time_budget_s"]
    chosen: dict[Path, Any] = {}
    values: dict[Path, Any] = {}
    found = missed = False
    for model in tuned_models:
        sys.stderr.write(f"{model.name}\n")
        view = TrialView(model.axes, limit, sys.stderr)
        tuning = Tuning(model, limit, given["trials"], view, dict(values))
        tuning.run(deadline_s)
        print_front(model.name, model.axes, tuning.points, limit, sys.stdout)
        best = tuning.best
        if best is None:
            missed = True
            sys.stderr.write(f"{model.name}: no settings that were tried stay under the latency limit\n")
        else:
            found = True
            chosen |= model.changes(best.settings)
            values |= model.values(best.settings)
        if tuning.interrupted:
            sys.stderr.write("the search was interrupted: other settings may be better\n")
            break
    if found:
        _write_config(given, chosen)
        _report_changes(given, chosen)
    return ExitCode.RUNTIME_FAILURE if missed else ExitCode.OK


def _model_names(given: dict[str, Any], configuration: Configuration) -> list[str]:
    names = given["models"] or [one.name for one in configuration.entries.models if one.callable is not None]
    names = list(dict.fromkeys(names))
    if not names:
        raise BenchOptionError("CONFIG", "the file has no model to tune")
    if len(names) > 1 and given["data"] not in {"random", "zero"}:
        raise BenchOptionError("--data", "a file holds the inputs of one model: name it with --model")
    return names


def _tuned_model(given: dict[str, Any], configuration: Configuration, name: str) -> TunedModel:
    from gpuserve.cli.bench.tune.settings_search import parse_requested, tunable_axes
    from gpuserve.cli.bench.tune.tuning import TunedModel, model_index

    index = model_index(configuration, name)
    entry = configuration.entries.models[index]
    instances = [one.plain(nulls=False) for one in entry.instances]
    axes = tunable_axes(
        configuration.models[index],
        [one.count for one in entry.instances],
        os.cpu_count() or 1,
        given["batch_size"],
        parse_requested(given),
    )
    inputs = {one.name for one in entry.inputs}
    data, load = _request_data(given, inputs), _load_plan(given)
    return TunedModel(given["config"], index, name, instances, axes, data, load, given["protocol"])


def _request_data(given: dict[str, Any], inputs: set[str]) -> RequestData:
    """Return the content of this model's requests; shapes of other models' inputs are left out."""
    from gpuserve.cli.bench.preparation import RequestData
    from gpuserve.cli.bench.request_tensors import parse_shapes

    shapes = parse_shapes(given["shapes"] or ())
    own = {name: shape for name, shape in shapes.items() if name in inputs}
    return RequestData(given["data"], own, given["batch_size"])


def _load_plan(given: dict[str, Any]) -> Any:
    from gpuserve.cli.bench.load_plan import LoadKind, LoadPlan, default_processes, parse_levels
    from gpuserve.cli.bench.request_payloads import parse_url

    parse_url(None, given["protocol"])  # raises BenchOptionError for another protocol
    levels = parse_levels(LoadKind.CONCURRENCY, given["concurrency"])
    return LoadPlan(
        tuple(sorted(levels, key=lambda one: one.value)),
        given["duration_s"],
        given["warmup_s"],
        processes=default_processes(os.cpu_count() or 1),
    )


def _report_changes(given: dict[str, Any], chosen: dict[Path, Any]) -> None:
    from gpuserve.config.problems import dotted

    values = ", ".join(f"{dotted(path)}: {value}" for path, value in chosen.items())
    what = f"with {values}" if values else "as it was: its settings were the best"
    if given["output"] is None:
        text = f"nothing is written; --output FILE writes {given['config']} {what}"
    else:
        text = f"{given['output']} is {given['config']} {what}"
    sys.stderr.write(f"{text}\n")


def _write_config(given: dict[str, Any], chosen: dict[Path, Any]) -> None:
    from gpuserve.cli.bench.tune.tune_output import config_with_values

    if given["output"] is None:
        return
    with open(given["config"], encoding="utf-8-sig") as file:
        text = config_with_values(file.read(), chosen)
    try:
        with open(given["output"], "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        text = f"{given['output']} cannot be written: {error_reason(error)}"
        raise BenchOptionError("--output", text) from None
