"""``gpuserve bench``: options, the measurement, and its report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar

import typer

from gpuserve.cli.bench.load_plan import BenchOptionError
from gpuserve.cli.exit_codes import ExitCode
from gpuserve.cli.option_types import keyword, with_options
from gpuserve.cli.serve_command_line import given_name

if TYPE_CHECKING:
    import enum

    from gpuserve.cli.bench.bench_report import BenchReport
    from gpuserve.cli.bench.bench_session import BenchRun
    from gpuserve.cli.bench.load_plan import LoadPlan
    from gpuserve.cli.bench.request_payloads import Target

    Choice = TypeVar("Choice", bound=enum.Enum)


_LOAD, _DATA, _SERVER, _REPORT = "Load", "Requests", "Server", "Report"

_Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")]
# fmt: off
_OPTIONS: Final = (
    keyword(_SERVER, "url", str | None, None,
            "host, host:port, or a URL with grpc://, grpcs://, http:// or https://. Default localhost.",
            "--server", "--url"),
    keyword(_SERVER, "protocol", str | None, None,
            "Protocol, if --server has none. Default grpc.", metavar="grpc|http"),
    keyword(_SERVER, "version", str, "",
            "Version of the model. Default: the server's choice.", "--model-version"),
    keyword(_SERVER, "headers", list[str] | None, None,
            "A header of every request; repeatable.", "--header", metavar="NAME: VALUE"),
    keyword(_SERVER, "tls_ca", str, "",
            "PEM file of the authority that signed the server's certificate.", metavar="FILE"),
    keyword(_SERVER, "tls_cert", str, "", "PEM file of the client's certificate.", metavar="FILE"),
    keyword(_SERVER, "tls_key", str, "", "PEM file of the key of --tls-cert.", metavar="FILE"),
    keyword(_SERVER, "tls_no_verify", bool, False, "Accept any certificate (HTTP only).", "--tls-no-verify"),
    keyword(_SERVER, "timeout_s", float, "30s", "Time limit of each request: 30s, 500ms.", "--timeout"),
    keyword(_LOAD, "concurrency", str | None, None,
            "Requests in flight (closed loop): 16, 1,2,8, 1:64:x2 or 8:64:8. Default 1:64:x2.",
            metavar="LEVELS"),
    keyword(_LOAD, "rate", str | None, None,
            "Requests a second (open loop), in the same forms. Latency counts from the due time.",
            metavar="LEVELS"),
    keyword(_LOAD, "arrivals", str, "poisson",
            "Spacing of the requests of a rate.", metavar="poisson|constant"),
    keyword(_LOAD, "duration_s", float, "10s", "Length of each level: 10s, 2m.", "--duration"),
    keyword(_LOAD, "warmup_s", float, "1s", "Load before each level, without measurement.", "--warmup"),
    keyword(_LOAD, "stable", bool, False,
            "End a level early, once three seconds in a row agree to 10 %.", "--stable"),
    keyword(_LOAD, "connections", int | None, None,
            "Default: gRPC 1 for 32 in flight (rate: 4), HTTP 1 for each in flight (rate: 128).", least=1),
    keyword(_LOAD, "max_in_flight", int, 4096,
            "Most requests in flight in an open loop; others wait in the client.", least=1),
    keyword(_LOAD, "processes", int | None, None,
            "Processes that send requests. Default half of the cores, at most 4.", least=1),
    keyword(_DATA, "shapes", list[str] | None, None,
            "Shape of an input without the batch axis, such as x:3,224,224.", "--shape", metavar="NAME:DIMS"),
    keyword(_DATA, "batch_size", int, 1, "Rows of each request."),
    keyword(_DATA, "data", str, "random",
            "Content of inputs; FILE is .json or .npz.", metavar="random|zero|FILE"),
    keyword(_DATA, "string_length", int, 32, "Bytes in each random BYTES element.", least=0),
    keyword(_DATA, "shared_memory", str, "none",
            "Kind of shared memory that carries tensors.", metavar="none|system|cuda"),
    keyword(_DATA, "seed", int, 0, "Seed of random data and arrivals.", least=0),
    keyword(_REPORT, "outputs", list[str] | None, None,
            "A report: .md, .csv, .json or .html; repeatable.", "--output", metavar="FILE"),
    keyword(_REPORT, "stream", bool, False,
            "Report a decoupled model as a source of tokens: time to first, between, tokens/s.", "--stream"),
    keyword(_REPORT, "baseline", str | None, None,
            "An earlier .json report; the table shows ratios to its figures.", metavar="FILE"),
)
# fmt: on


@partial(with_options, options=_OPTIONS)
def bench(ctx: typer.Context, model: _Model, **_options: Any) -> None:
    """Measure throughput and latency of a model on a running server, any that speaks v2.

    The table goes to stdout, as Markdown unless that is a terminal. Ctrl-C ends the run early.

    Examples:
      gpuserve bench echo --shape x:16
      gpuserve bench echo --shape x:16 --rate 1000:5000:1000 --output report.html
      gpuserve bench writer --stream --data prompts.json --rate 20,40,80
      gpuserve bench echo --server http://host:8000 --baseline earlier.json
    """
    run_and_exit(_run_bench, ctx)


def run_and_exit(work: Callable[[dict[str, Any]], int], ctx: typer.Context) -> NoReturn:
    """Call ``work`` with the options of a command, and end the command with the exit status it returns."""
    try:
        raise typer.Exit(work(dict(ctx.params)))
    except BenchOptionError as error:
        text, option = error.args[0], error.option
        for name, *others in [one.opts for one in ctx.command.params]:
            if (given := given_name(name, *others)) != name:
                text, option = text.replace(name, given), option.replace(name, given)
        raise typer.BadParameter(text, param_hint=option) from None


def _run_bench(given: dict[str, Any]) -> int:
    from datetime import UTC, datetime

    from gpuserve.cli.bench.bench_report import BenchReport
    from gpuserve.cli.bench.bench_session import run_bench
    from gpuserve.cli.bench.report_output import check_output, print_report, progress_view, write_report
    from gpuserve.core.version import VERSION

    outputs = given["outputs"] or ()
    for path in outputs:
        check_output(path)
    earlier = _read_baseline(given["baseline"])
    run = _bench_run(given)
    began_at = datetime.now(UTC).isoformat(timespec="seconds")
    with progress_view(run.plan, sys.stderr) as view:
        outcome = run_bench(run, view)
    about = (run.target.model, str(run.target.url), began_at, VERSION, os.cpu_count() or 1)
    report = BenchReport(*about, _report_settings(given, run), outcome.levels, outcome.interrupted)
    if report.levels:
        print_report(report, earlier, sys.stdout)
        for path in outputs:
            write_report(path, report, earlier)
    return ExitCode.RUNTIME_FAILURE if report.failed else ExitCode.OK


def _bench_run(given: dict[str, Any]) -> BenchRun:
    from gpuserve.cli.bench.bench_session import BenchRun
    from gpuserve.cli.bench.load_plan import SharedMemory
    from gpuserve.cli.bench.preparation import RequestData
    from gpuserve.cli.bench.request_tensors import parse_shapes

    shapes = parse_shapes(given["shapes"] or ())
    data = RequestData(given["data"], shapes, given["batch_size"], given["string_length"], given["seed"])
    memory = _parse_choice(SharedMemory, "--shared-memory", given["shared_memory"])
    return BenchRun(_bench_target(given), data, _load_plan(given), memory, given["stream"])


def _bench_target(given: dict[str, Any]) -> Target:
    from gpuserve.cli.bench.loader_messages import ClientTlsFiles
    from gpuserve.cli.bench.request_payloads import Target, parse_headers, parse_url

    url = parse_url(given["url"], given["protocol"])
    options = ("tls_ca", "tls_cert", "tls_key", "tls_no_verify")
    wanted = ["--" + name.replace("_", "-") for name in options if given[name]]
    if wanted and not url.tls:
        raise BenchOptionError(wanted[0], f"goes with --server grpcs:// or https://, given {url}")
    if given["timeout_s"] <= 0:
        raise BenchOptionError("--timeout", f"expected more than 0 seconds, given {given['timeout_s']:g}")
    tls = ClientTlsFiles(given["tls_ca"], given["tls_cert"], given["tls_key"], not given["tls_no_verify"])
    headers = parse_headers(tuple(given["headers"] or ()))
    certificates = tls if url.tls else None
    return Target(url, given["model"], given["version"], headers, certificates, given["timeout_s"])


def _load_plan(given: dict[str, Any]) -> LoadPlan:
    from gpuserve.cli.bench.load_plan import (
        ArrivalPattern,
        LoadKind,
        LoadPlan,
        default_processes,
        parse_levels,
    )

    if given["concurrency"] is not None and given["rate"] is not None:
        raise BenchOptionError("--rate", "does not go with --concurrency: a level holds one of them constant")
    kind = LoadKind.CONCURRENCY if given["rate"] is None else LoadKind.RATE
    return LoadPlan(
        parse_levels(kind, given[kind.value] or "1:64:x2"),
        given["duration_s"],
        given["warmup_s"],
        given["stable"],
        _parse_choice(ArrivalPattern, "--arrivals", given["arrivals"]),
        given["connections"],
        given["processes"] or default_processes(os.cpu_count() or 1),
        given["max_in_flight"],
        seed=given["seed"],
    )


def _parse_choice(kind: type[Choice], option: str, word: str) -> Choice:
    try:
        return kind(word)
    except ValueError:
        words = ", ".join(str(one.value) for one in kind)
        raise BenchOptionError(option, f"expected one of {words}, given {word!r}") from None


def _read_baseline(path: str | None) -> BenchReport | None:
    from gpuserve.cli.bench.bench_report import report_from_json

    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return report_from_json(file.read())
    except (OSError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", None) or "not a text file").lower()
        raise BenchOptionError("--baseline", f"{path} cannot be read: {reason}") from None


def _report_settings(given: dict[str, Any], run: BenchRun) -> dict[str, Any]:
    """Return the options that decide whether two reports are comparable; no secrets such as headers."""
    from gpuserve.cli.bench.bench_report import STREAM

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
    if given["stream"]:
        found[STREAM] = "tokens are responses"
    return found
