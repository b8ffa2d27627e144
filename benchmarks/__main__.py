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
from pathlib import Path

from benchmarks.command_line import exit_on_sigterm, names_of, say
from benchmarks.extra_rows import ModelPy
from benchmarks.footprint import Imports, Starts
from benchmarks.peers import PeerCache, ServerMissing
from benchmarks.processes import cpu_name
from benchmarks.report import Part, Plan, Report, Section
from benchmarks.request_section import Requests
from benchmarks.servers import SERVERS
from benchmarks.servers.server import Server

_ROOT = Path(__file__).parent.parent
_RESULTS = _ROOT / "benchmarks/results"
#: In the order in which they are measured: the quiet ones first.
SECTIONS: tuple[Section, ...] = (Imports(), Starts(), Requests(), ModelPy())


def main(arguments: Sequence[str]) -> int:
    exit_on_sigterm()
    # A shell starts its background jobs with SIGINT ignored; the servers would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = parse(arguments)
    skipped: dict[str, str] = {}
    servers = prepared(options, skipped)
    names = runnable(options, skipped)
    parts = measured(options, servers, names)
    if not parts:
        say("error: nothing is left to measure")
        return 1
    titles = {server.name: server.title for server in servers}
    report = Report(machine(), options.rounds, options.seconds, titles, skipped, parts)
    print(report.markdown(), end="")
    report.write_json(options.json)
    for what, text in report.failures.items():
        say(f"error: {what}: {text}")
    return 1 if report.failures else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Compare this server with its peers.")
    known = tuple(name for section in SECTIONS for name in section.names)
    parser.add_argument("--rounds", type=_at_least_one, default=5, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=5.0, help="load in each run; default: %(default)s")
    parser.add_argument("--rows", type=names_of(known), default=known, help=", ".join(known))
    parser.add_argument("--servers", type=names_of(SERVERS), default=tuple(SERVERS), help=", ".join(SERVERS))
    parser.add_argument("--json", type=Path, metavar="OUT", default=_RESULTS / "latest.json")
    parser.add_argument("--cache", type=Path, default=_ROOT / ".cache/bench", help="default: %(default)s")
    parser.add_argument("--peer-python", type=Path, default=Path("/usr/bin/python3"), help="runs the peers")
    given = parser.parse_args(arguments)
    given.cache = PeerCache(given.cache.absolute(), given.peer_python)
    return given


def prepared(options: argparse.Namespace, skipped: dict[str, str]) -> list[Server]:
    """The chosen servers, installed; those that cannot be had go to ``skipped`` with the reason."""
    servers = []
    for server in (SERVERS[name](options.cache) for name in options.servers):
        try:
            server.prepare()
        except ServerMissing as error:
            skipped[server.name] = str(error)
            say(f"skipping {server.name}: {error}")
        else:
            servers.append(server)
    return servers


def runnable(options: argparse.Namespace, skipped: dict[str, str]) -> frozenset[str]:
    """The chosen rows that can be measured here; the others go to ``skipped`` with the reason."""
    names = set()
    for section in SECTIONS:
        for name in section.names:
            if name not in options.rows:
                continue
            if reason := section.missing(name):
                skipped[name] = reason
                say(f"skipping {name}: {reason}")
            else:
                names.add(name)
    return frozenset(names)


def measured(options: argparse.Namespace, servers: list[Server], names: frozenset[str]) -> list[Part]:
    plan = Plan(names, servers, options.rounds, options.seconds, options.cache.folder / "logs", say)
    return [part for section in SECTIONS if (part := section.measure(plan)) is not None]


def machine() -> dict[str, str]:
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "CPU": f"{cpu_name()}, {os.cpu_count()} cores",
        "memory": f"{memory_nbytes / (1 << 30):.0f} GiB",
        "Linux": platform.release(),
        "Python": platform.python_version(),
    }


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
