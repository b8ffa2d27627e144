"""``scripts/bench --scenarios``: which scenarios are run, how long, and where the result goes.

stdout gets the Markdown, stderr the progress. Exit codes as for the other benchmarks: a goal that is not
reached is a result.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import LoadFailed
from benchmarks.peers import PeerCache, ServerMissing
from benchmarks.scenarios.connections import Connections
from benchmarks.scenarios.deadlines import Deadlines
from benchmarks.scenarios.deployment import DEPLOYABLE
from benchmarks.scenarios.endurance import Endurance
from benchmarks.scenarios.fairness import Fairness
from benchmarks.scenarios.many_models import ManyModels
from benchmarks.scenarios.report import ScenarioReport, markdown, write_json
from benchmarks.scenarios.scaling import Scaling
from benchmarks.scenarios.scenario import Effort, Scenario, Site
from benchmarks.scenarios.starting import Starting
from benchmarks.scenarios.tail import Tail
from benchmarks.servers import ServerFailed

_BENCHMARKS = Path(__file__).parent.parent
SCENARIOS: tuple[Scenario, ...] = (
    Tail(),
    Scaling(),
    ManyModels(),
    Connections(),
    Endurance(),
    Starting(),
    Deadlines(),
    Fairness(),
)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line."""

    scenarios: tuple[str, ...]
    servers: tuple[str, ...]
    effort: Effort
    json: Path
    cache: PeerCache
    real_time: bool


def main(arguments: Sequence[str], machine: dict[str, str], say: Callable[[str], None]) -> int:
    """Run the scenarios and print; returns the exit code."""
    options = parse(arguments)
    if options.real_time and not _take_precedence():
        say("error: --real-time needs the right to real-time priorities (CAP_SYS_NICE)")
        return 1
    chosen = [one for one in SCENARIOS if one.name in options.scenarios]
    report = ScenarioReport(machine, options.effort, chosen)
    for scenario in chosen:
        for server in options.servers:
            _run(scenario, server, options, report, say)
    print(markdown(report), end="")
    write_json(report, options.json)
    for name, failed in report.failed.items():
        for title, text in failed.items():
            say(f"error: {name}, {title}: {text}")
    return 1 if report.failed or not report.found else 0


def parse(arguments: Sequence[str]) -> Options:
    """The options; ends the program with 2 on a usage error."""
    names = tuple(one.name for one in SCENARIOS)
    parser = argparse.ArgumentParser(
        prog="scripts/bench --scenarios", description="Hold servers against what is possible, over time."
    )
    parser.add_argument("scenarios", type=_names(names), nargs="?", default=names, help=", ".join(names))
    parser.add_argument("--servers", type=_names(tuple(DEPLOYABLE)), default=("gpuserve",))
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run; default: %(default)s")
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the scenario endurance")
    parser.add_argument("--json", type=Path, default=_BENCHMARKS / "results/scenarios.json", metavar="OUT")
    parser.add_argument("--cache", type=Path, default=_BENCHMARKS.parent / ".cache/bench")
    parser.add_argument("--peer-python", type=Path, default=Path("/usr/bin/python3"), help="runs the peers")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="server and load before all other programs: for a machine that does other things as well",
    )
    given = parser.parse_args(arguments)
    cache = PeerCache(given.cache.absolute(), given.peer_python)
    effort = Effort(max(1, given.rounds), given.seconds, given.requests)
    return Options(given.scenarios, given.servers, effort, given.json, cache, given.real_time)


def _take_precedence() -> bool:
    """Every server and load generator inherits the scheduling of this process. Whether it could be had."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except PermissionError:
        return False
    return True


def _run(
    scenario: Scenario, server: str, options: Options, report: ScenarioReport, say: Callable[[str], None]
) -> None:
    kind = DEPLOYABLE[server]
    reason = scenario.servers[server]
    if reason is None and scenario.program is not None and shutil.which(scenario.program) is None:
        reason = f"{scenario.program} is not on PATH"
    if reason is not None:
        report.skipped[f"{scenario.name}, {server}"] = reason
        return
    say(f"scenario {scenario.name}, {kind.title}")
    try:
        figures = scenario.run(Site(kind, options.cache, options.effort, say))
    except ServerMissing as error:
        report.skipped[f"{scenario.name}, {server}"] = str(error)
    except (ServerFailed, LoadFailed) as error:
        report.failed.setdefault(scenario.name, {})[kind.title] = str(error)
    else:
        report.found.setdefault(scenario.name, {})[kind.title] = figures


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """A list of names, parted by commas, each one of those that exist."""

    def names(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return given

    return names
