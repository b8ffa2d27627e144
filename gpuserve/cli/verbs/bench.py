"""``gpuserve bench``: from a command line to a measured server and a report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from gpuserve.bench.plan.errors import BenchOptionError
from gpuserve.cli.console.exit_codes import ExitCode
from gpuserve.cli.console.options import duration, integer, option

if TYPE_CHECKING:
    import enum

    from gpuserve.bench.plan.plan import LoadPlan
    from gpuserve.bench.reports.report import BenchReport
    from gpuserve.bench.server.target import Target
    from gpuserve.bench.session import BenchOutcome, BenchRun

    Choice = TypeVar("Choice", bound=enum.Enum)

_LOAD, _DATA, _SERVER, _REPORT = "Load", "Requests", "Server", "Report"

_Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")]
_Url = Annotated[
    str | None,
    option(
        _SERVER, "host, host:port, or a URL with grpc://, grpcs://, http:// or https://. Default localhost."
    ),
]
_Protocol = Annotated[
    str | None, option(_SERVER, "Protocol, where --url has none. Default grpc.", metavar="grpc|http")
]
_Version = Annotated[
    str, option(_SERVER, "Version of the model. Default: the server's choice.", "--model-version")
]
_Headers = Annotated[
    list[str] | None,
    option(_SERVER, "A header of every request; repeatable.", "--header", metavar="NAME: VALUE"),
]
_TlsCa = Annotated[
    str, option(_SERVER, "PEM file of the authority that signed the server's certificate.", metavar="FILE")
]
_TlsCert = Annotated[str, option(_SERVER, "PEM file of the client's certificate.", metavar="FILE")]
_TlsKey = Annotated[str, option(_SERVER, "PEM file of the key of --tls-cert.", metavar="FILE")]
_TlsNoVerify = Annotated[bool, option(_SERVER, "Accept any certificate (HTTP only).", "--tls-no-verify")]
_TimeoutS = Annotated[float, duration(_SERVER, "Time limit of each request: 30s, 500ms.", "--timeout")]
_Concurrency = Annotated[
    str | None,
    option(
        _LOAD,
        "Requests in flight (closed loop): 16, 1,2,8, 1:64:x2 or 8:64:8. Default 1:64:x2.",
        metavar="LEVELS",
    ),
]
_Rate = Annotated[
    str | None,
    option(
        _LOAD,
        "Requests a second (open loop), in the same forms. Latency counts from when each was due.",
        metavar="LEVELS",
    ),
]
_Arrivals = Annotated[
    str, option(_LOAD, "How the requests of a rate are spaced.", metavar="poisson|constant")
]
_DurationS = Annotated[float, duration(_LOAD, "Length of each level: 10s, 2m.", "--duration")]
_WarmupS = Annotated[float, duration(_LOAD, "Load before each level that is not measured.", "--warmup")]
_Stable = Annotated[
    bool, option(_LOAD, "End a level early, once three seconds in a row agree to 10 %.", "--stable")
]
_Connections = Annotated[
    int | None,
    integer(
        _LOAD,
        "Default: gRPC one for 32 in flight (rate: 4), HTTP one for each in flight (rate: 128).",
        least=1,
    ),
]
_MaxInFlight = Annotated[
    int, integer(_LOAD, "Most requests in flight in an open loop; others wait in the client.", least=1)
]
_Processes = Annotated[
    int | None, integer(_LOAD, "Processes that send. Default half of the cores, at most 4.", least=1)
]
_Shapes = Annotated[
    list[str] | None,
    option(
        _DATA,
        "Shape of an input without the batch axis, such as x:3,224,224.",
        "--shape",
        metavar="NAME:DIMS",
    ),
]
_BatchSize = Annotated[int, integer(_DATA, "Rows of each request.")]
_Data = Annotated[str, option(_DATA, "What inputs hold; FILE is .json or .npz.", metavar="random|zero|FILE")]
_StringLength = Annotated[int, integer(_DATA, "Bytes in each random BYTES element.", least=0)]
_SharedMemory = Annotated[
    str, option(_DATA, "Kind of shared memory that carries tensors.", metavar="none|system|cuda")
]
_Seed = Annotated[int, integer(_DATA, "Seed of random data and arrivals.", least=0)]
_Outputs = Annotated[
    list[str] | None,
    option(_REPORT, "A report: .md, .csv, .json or .html; repeatable.", "--output", metavar="FILE"),
]
_Baseline = Annotated[
    str | None, option(_REPORT, "An earlier .json report: shows ratios to it.", metavar="FILE")
]


def bench(
    ctx: typer.Context,
    model: _Model,
    url: _Url = None,
    protocol: _Protocol = None,
    version: _Version = "",
    headers: _Headers = None,
    tls_ca: _TlsCa = "",
    tls_cert: _TlsCert = "",
    tls_key: _TlsKey = "",
    tls_no_verify: _TlsNoVerify = False,
    timeout_s: _TimeoutS = 30.0,
    concurrency: _Concurrency = None,
    rate: _Rate = None,
    arrivals: _Arrivals = "poisson",
    duration_s: _DurationS = 10.0,
    warmup_s: _WarmupS = 1.0,
    stable: _Stable = False,
    connections: _Connections = None,
    max_in_flight: _MaxInFlight = 4096,
    processes: _Processes = None,
    shapes: _Shapes = None,
    batch_size: _BatchSize = 1,
    data: _Data = "random",
    string_length: _StringLength = 32,
    shared_memory: _SharedMemory = "none",
    seed: _Seed = 0,
    outputs: _Outputs = None,
    baseline: _Baseline = None,
) -> None:
    """Load a model of a running server, any that speaks v2, and show throughput and latency.

    The table goes to stdout, as Markdown where that is no terminal. Ctrl-C ends the run early.

    Examples:
      gpuserve bench echo --shape x:16
      gpuserve bench echo --shape x:16 --rate 1000:5000:1000 --duration 20 --output report.html
      gpuserve bench echo --url http://host:8000 --data requests.json --baseline earlier.json
    """
    exit_with(_bench, ctx)


def exit_with(work: Callable[[dict[str, Any]], int], ctx: typer.Context) -> NoReturn:
    """Do the work that is asked for by the options of a verb, and end the command with its exit status."""
    try:
        raise typer.Exit(work(dict(ctx.params)))
    except BenchOptionError as error:
        raise typer.BadParameter(error.args[0], param_hint=error.option) from None


def _bench(given: dict[str, Any]) -> int:
    from gpuserve.bench.reports.output import check_output, write
    from gpuserve.bench.session import measure
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


def _run(given: dict[str, Any]) -> BenchRun:
    from gpuserve.bench.plan.plan import SharedMemory
    from gpuserve.bench.preparation import Data
    from gpuserve.bench.server.model_metadata import parse_shapes
    from gpuserve.bench.session import BenchRun

    data = Data.of(
        given["data"],
        parse_shapes(given["shapes"] or ()),
        given["batch_size"],
        given["string_length"],
        given["seed"],
    )
    memory = _choice(SharedMemory, "--shared-memory", given["shared_memory"])
    return BenchRun(_target(given), data, _plan(given), memory)


def _target(given: dict[str, Any]) -> Target:
    from gpuserve.bench.calls.messages import Encryption
    from gpuserve.bench.server.target import Target, parse_headers, parse_url

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


def _plan(given: dict[str, Any]) -> LoadPlan:
    from gpuserve.bench.plan.plan import (
        Arrivals,
        LoadKind,
        LoadPlan,
        check_times,
        default_processes,
        parse_levels,
    )

    if given["concurrency"] is not None and given["rate"] is not None:
        raise BenchOptionError("--rate", "does not go with --concurrency: a level holds one of them constant")
    kind = LoadKind.CONCURRENCY if given["rate"] is None else LoadKind.RATE
    check_times(given["duration_s"], given["warmup_s"])
    return LoadPlan(
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
    try:
        return kind(word)
    except ValueError:
        words = ", ".join(str(one.value) for one in kind)
        raise BenchOptionError(option, f"expected one of {words}, given {word!r}") from None


def _baseline(path: str | None) -> BenchReport | None:
    from gpuserve.bench.reports.report import from_json

    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return from_json(file.read(), "--baseline")
    except (OSError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", None) or "it is no text").lower()
        raise BenchOptionError("--baseline", f"{path} cannot be read: {reason}") from None


def _report(given: dict[str, Any], run: BenchRun, outcome: BenchOutcome, began_at: str) -> BenchReport:
    from gpuserve.bench.reports.report import BenchReport
    from gpuserve.version import VERSION

    return BenchReport(
        run.target.model,
        str(run.target.url),
        began_at,
        VERSION,
        os.cpu_count() or 1,
        _settings(given, run),
        outcome.levels,
        outcome.interrupted,
    )


def _settings(given: dict[str, Any], run: BenchRun) -> dict[str, Any]:
    """Return what makes two reports comparable; nothing that is secret, such as headers."""
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
