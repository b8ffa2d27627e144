"""``gpuserve bench``: from a command line to a measured server and a report."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from gpuserve.cli import bench_options as options
from gpuserve.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    import enum

    from gpuserve.bench.plan import Plan
    from gpuserve.bench.report import Report
    from gpuserve.bench.runner import Outcome, Run
    from gpuserve.bench.target import Target

    Choice = TypeVar("Choice", bound=enum.Enum)


def bench(
    ctx: typer.Context,
    model: options.Model,
    url: options.Url = None,
    protocol: options.Protocol = None,
    version: options.Version = "",
    headers: options.Headers = None,
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    tls_no_verify: options.TlsNoVerify = False,
    timeout_s: options.TimeoutS = 30.0,
    concurrency: options.Concurrency = None,
    rate: options.Rate = None,
    arrivals: options.Arrivals = "poisson",
    duration_s: options.DurationS = 10.0,
    warmup_s: options.WarmupS = 1.0,
    stable: options.Stable = False,
    connections: options.Connections = None,
    max_in_flight: options.MaxInFlight = 4096,
    processes: options.Processes = None,
    shapes: options.Shapes = None,
    batch_size: options.BatchSize = 1,
    data: options.Data = "random",
    string_length: options.StringLength = 32,
    shared_memory: options.SharedMemory = "none",
    seed: options.Seed = 0,
    outputs: options.Outputs = None,
    baseline: options.Baseline = None,
) -> None:
    """Load a model of a running server, any that speaks v2, and show throughput and latency.

    The table goes to stdout, as Markdown where that is no terminal. Ctrl-C ends the run early.

    Examples:
      gpuserve bench echo --shape x:16
      gpuserve bench echo --shape x:16 --rate 1000:5000:1000 --duration 20 --output report.html
      gpuserve bench echo --url http://host:8000 --data requests.json --baseline earlier.json
    """
    from gpuserve.bench.errors import BenchOptionError

    given = dict(ctx.params)
    try:
        raise typer.Exit(_bench(given))
    except BenchOptionError as error:
        raise typer.BadParameter(error.args[0], param_hint=error.option) from None


def _bench(given: dict[str, Any]) -> int:
    from gpuserve.bench.output import check_output, write
    from gpuserve.bench.runner import measure
    from gpuserve.bench.view import progress_view, show

    outputs = given["outputs"] or ()
    for path in outputs:
        check_output(path)
    earlier = _baseline(given["baseline"])
    run = _run(given)
    began_at = _now()
    with progress_view(run.plan, sys.stderr) as view:
        outcome = measure(run, view)
    report = _report(given, run, outcome, began_at)
    if report.levels:
        show(report, earlier, sys.stdout)
        for path in outputs:
            write(path, report, earlier)
    return ExitCode.RUNTIME_FAILURE if report.failed else ExitCode.OK


def _run(given: dict[str, Any]) -> Run:
    from gpuserve.bench.model_metadata import parse_shapes
    from gpuserve.bench.plan import SharedMemory
    from gpuserve.bench.preparation import Data
    from gpuserve.bench.runner import Run

    data = Data.of(
        given["data"],
        parse_shapes(given["shapes"] or ()),
        given["batch_size"],
        given["string_length"],
        given["seed"],
    )
    memory = _choice(SharedMemory, "--shared-memory", given["shared_memory"])
    return Run(_target(given), data, _plan(given), memory)


def _target(given: dict[str, Any]) -> Target:
    from gpuserve.bench.errors import BenchOptionError
    from gpuserve.bench.messages import Encryption
    from gpuserve.bench.target import Target, parse_headers, parse_url

    url = parse_url(given["url"], given["protocol"])
    options = ("tls_ca", "tls_cert", "tls_key", "tls_no_verify")
    wanted = ["--" + name.replace("_", "-") for name in options if given[name]]
    if wanted and not url.tls:
        raise BenchOptionError(wanted[0], f"goes with --url grpcs:// or https://, given {url}")
    if given["timeout_s"] <= 0:
        raise BenchOptionError("--timeout", f"expected more than 0 seconds, given {given['timeout_s']:g}")
    tls = Encryption(given["tls_ca"], given["tls_cert"], given["tls_key"], not given["tls_no_verify"])
    headers = parse_headers(tuple(given["headers"] or ()))
    return Target(
        url, given["model"], given["version"], headers, tls if url.tls else None, given["timeout_s"]
    )


def _plan(given: dict[str, Any]) -> Plan:
    from gpuserve.bench.arrivals import Arrivals
    from gpuserve.bench.errors import BenchOptionError
    from gpuserve.bench.levels import LoadKind, parse_levels
    from gpuserve.bench.plan import Plan, check_times, default_processes

    if given["concurrency"] is not None and given["rate"] is not None:
        raise BenchOptionError("--rate", "does not go with --concurrency: a level holds one of them constant")
    kind = LoadKind.CONCURRENCY if given["rate"] is None else LoadKind.RATE
    check_times(given["duration_s"], given["warmup_s"])
    return Plan(
        parse_levels(kind, given[kind.value] or "1:64:x2"),
        given["duration_s"],
        given["warmup_s"],
        given["stable"],
        _choice(Arrivals, "--arrivals", given["arrivals"]),
        given["connections"],
        given["processes"] or default_processes(os.cpu_count() or 1),
        given["max_in_flight"],
        seed=given["seed"],
    )


def _choice(kind: type[Choice], option: str, word: str) -> Choice:
    from gpuserve.bench.errors import BenchOptionError

    try:
        return kind(word)
    except ValueError:
        words = ", ".join(str(one.value) for one in kind)
        raise BenchOptionError(option, f"expected one of {words}, given {word!r}") from None


def _baseline(path: str | None) -> Report | None:
    from gpuserve.bench.errors import BenchOptionError
    from gpuserve.bench.report import from_json

    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return from_json(file.read(), "--baseline")
    except (OSError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", None) or "it is no text").lower()
        raise BenchOptionError("--baseline", f"{path} cannot be read: {reason}") from None


def _report(given: dict[str, Any], run: Run, outcome: Outcome, began_at: str) -> Report:
    from gpuserve import __version__
    from gpuserve.bench.report import Report

    return Report(
        run.target.model,
        str(run.target.url),
        began_at,
        __version__,
        os.cpu_count() or 1,
        _settings(given, run),
        outcome.levels,
        outcome.interrupted,
    )


def _settings(given: dict[str, Any], run: Run) -> dict[str, Any]:
    """What makes two reports comparable; nothing that is secret, such as headers."""
    found = {
        "duration": f"{run.plan.duration_s:g} s",
        "warmup": f"{run.plan.warmup_s:g} s",
        "batch size": run.data.batch_size,
        "data": os.path.basename(given["data"]),
        "shared memory": run.memory.value,
        "processes": run.plan.processes,
    }
    if given["shapes"]:
        found["shapes"] = " ".join(given["shapes"])
    if given["rate"] is not None:
        found["arrivals"] = run.plan.arrivals.value
    return found


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat(timespec="seconds")
