"""The command line of the benchmarks: what to measure, in which order, and where the result goes.

stdout gets the Markdown, stderr the progress. Exit codes: 0 measured (a ratio that is not reached is a
result), 1 a server failed, gave a wrong answer or failed requests under load, or nothing could be measured,
2 usage.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import load
from benchmarks.footprint import ImportCost, Start, measure_import, measure_starts
from benchmarks.peers import PeerCache, ServerMissing
from benchmarks.report import OURS, Report, markdown, write_json
from benchmarks.rounds import Samples, measure
from benchmarks.rows import ROWS, Row
from benchmarks.servers import SERVERS, Server, ServerFailed, running

_ROOT = Path(__file__).parent.parent
_STARTS, _IMPORTS = "starts", "imports"
_STATEMENTS = ("import gpuserve", "from gpuserve import ModelConfig, Server, Tensor")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line said."""

    rounds: int
    seconds: float
    rows: tuple[str, ...]
    servers: tuple[str, ...]
    json: Path
    cache: PeerCache


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    options = parse(arguments)
    _take_signals()
    skipped: dict[str, str] = {}
    servers = prepared(options, skipped)
    rows = runnable(options, skipped)
    if not servers or not (rows or {_STARTS, _IMPORTS} & set(options.rows)):
        say("error: nothing is left to measure")
        return 1
    try:
        report = run(options, servers, rows, skipped)
    except ServerFailed as error:
        say(f"error: {error}")
        return 1
    print(markdown(report), end="")
    write_json(report, options.json)
    for (row, server), text in report.samples.failures.items():
        say(f"error: row {row}, server {server}: {text}")
    return 1 if report.samples.failures else 0


def parse(arguments: Sequence[str]) -> Options:
    """The options; ends the program with 2 on a usage error."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Compare this server with its peers.")
    row_names = [*(row.name for row in ROWS), _STARTS, _IMPORTS]
    parser.add_argument("--rounds", type=_at_least_one, default=5, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=5.0, help="load in each run; default: %(default)s")
    parser.add_argument("--rows", type=_names(row_names), default=tuple(row_names), help=", ".join(row_names))
    parser.add_argument("--servers", type=_names(SERVERS), default=tuple(SERVERS), help=", ".join(SERVERS))
    parser.add_argument("--json", type=Path, default=_ROOT / "benchmarks/results/latest.json", metavar="OUT")
    parser.add_argument("--cache", type=Path, default=_ROOT / ".cache/bench", help="default: %(default)s")
    parser.add_argument("--peer-python", type=Path, default=Path("/usr/bin/python3"), help="runs the peers")
    given = parser.parse_args(arguments)
    cache = PeerCache(given.cache.absolute(), given.peer_python)
    return Options(given.rounds, given.seconds, given.rows, given.servers, given.json, cache)


def prepared(options: Options, skipped: dict[str, str]) -> list[Server]:
    """The chosen servers, installed; those that cannot be had go to ``skipped`` with the reason."""
    servers = []
    for name in options.servers:
        server = SERVERS[name](options.cache)
        try:
            server.prepare()
        except ServerMissing as error:
            skipped[name] = str(error)
            say(f"skipping {name}: {error}")
        else:
            servers.append(server)
    return servers


def runnable(options: Options, skipped: dict[str, str]) -> list[Row]:
    """The chosen rows whose load generator is here; the others go to ``skipped`` with the reason."""
    rows = []
    for row in ROWS:
        if row.name not in options.rows:
            continue
        if reason := load.missing(row.load):
            skipped[row.name] = reason
            say(f"skipping {row.name}: {reason}")
        else:
            rows.append(row)
    return rows


def run(options: Options, servers: list[Server], rows: list[Row], skipped: dict[str, str]) -> Report:
    """Everything that was asked for, the quiet measurements first.

    Raises:
        ServerFailed: a server did not come up or did not answer right.
    """
    starts: dict[str, list[Start]] = {}
    imports: list[ImportCost] = []
    samples = Samples()
    logs = options.cache.folder / "logs"
    if _IMPORTS in options.rows and any(server.name == OURS for server in servers):
        imports = [measure_import(statement, options.rounds) for statement in _STATEMENTS]
    if _STARTS in options.rows:
        say("starting each server by itself")
        starts = measure_starts(servers, options.rounds, logs)
    if rows and servers:
        with ExitStack() as stack:
            up = [stack.enter_context(running(server, logs)) for server in servers]
            samples = measure(rows, up, options.rounds, options.seconds, say)
    titles = {server.name: server.title for server in servers}
    return Report(machine(), options.rounds, options.seconds, titles, skipped, rows, samples, starts, imports)


def machine() -> dict[str, str]:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "CPU": f"{(models or [platform.machine()])[0]}, {os.cpu_count()} cores",
        "memory": f"{memory_nbytes / (1 << 30):.0f} GiB",
        "Linux": platform.release(),
        "Python": platform.python_version(),
    }


def _take_signals() -> None:
    """SIGTERM and Ctrl-C end the program as an exception does: the servers are stopped on the way out."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    # A shell starts its background jobs with SIGINT ignored; the servers would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def say(line: str) -> None:
    """One line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)


class _names:  # noqa: N801 - argparse shows the name of a type in its errors
    """A list of names, parted by commas, each one of those that exist."""

    def __init__(self, known: Sequence[str] | dict[str, type[Server]]) -> None:
        self._known = tuple(known)

    def __call__(self, text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in self._known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(self._known)}")
        return names


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
