"""``scripts/bench --scenarios``: which scenarios are run, how long, and where the result goes.

stdout gets the Markdown, stderr the progress. Exit codes as for the other benchmarks: a goal that is not
reached is a result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, cells, detail, document, table
from benchmarks.load import LoadFailed
from benchmarks.peers import PeerCache, ServerMissing
from benchmarks.report import names_of
from benchmarks.scenarios.closed_loop import Endurance, ManyModels, Scaling
from benchmarks.scenarios.open_loop import Connections, Deadlines, Fairness, Tail
from benchmarks.scenarios.scenario import DEPLOYABLE, Effort, Scenario, Site
from benchmarks.scenarios.starting import Starting
from benchmarks.servers.server import ServerFailed

_BENCHMARKS = Path(__file__).parent.parent
_CLASSES = (Tail, Scaling, ManyModels, Connections, Endurance, Starting, Deadlines, Fairness)
SCENARIOS: tuple[Scenario, ...] = tuple(one() for one in _CLASSES)


@dataclass(frozen=True, slots=True)
class ScenarioReport:
    """What was found. ``found`` and ``failed`` by scenario, then by the server's title."""

    machine: Mapping[str, str]
    effort: Effort
    scenarios: Sequence[Scenario]
    found: dict[str, dict[str, list[Figure]]] = field(default_factory=dict)
    failed: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def markdown(report: ScenarioReport) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    effort = report.effort
    parts = [f"Medians of {effort.rounds} rounds of {effort.seconds:g} s. {machine}."]
    for scenario in report.scenarios:
        found, failed = report.found.get(scenario.name, {}), report.failed.get(scenario.name, {})
        if found or failed:
            parts.append(f"### {scenario.title[0].upper()}{scenario.title[1:]}\n\nGoal: {scenario.goal}.")
        parts += [_table(title, list(map(document, figures))) for title, figures in found.items()]
        parts += [f"{title}: FAILED." for title in failed]
    parts += [f"Skipped: {name}: {reason}." for name, reason in report.skipped.items()]
    return "\n\n".join(parts) + "\n"


def write_json(report: ScenarioReport, path: Path) -> None:
    scenarios = {
        one.name: {
            "title": one.title,
            "goal": one.goal,
            "servers": {
                title: list(map(document, figures))
                for title, figures in report.found.get(one.name, {}).items()
            },
            "failed": list(report.failed.get(one.name, {})),
        }
        for one in report.scenarios
    }
    whole = {
        "machine": dict(report.machine),
        "effort": asdict(report.effort),
        "skipped": report.skipped,
        "scenarios": scenarios,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def _table(title: str, figures: Sequence[Mapping[str, Any]]) -> str:
    details = list(dict.fromkeys(name for one in figures for name in one["details"]))
    lines = [[*cells(one), *(detail(one, name) for name in details)] for one in figures]
    return table([title, "median (range)", "goal", "reached", *details], lines)


def main(arguments: Sequence[str], machine: dict[str, str], say: Callable[[str], None]) -> int:
    given = parse(arguments)
    if given.real_time and not _take_precedence():
        say("error: --real-time needs the right to real-time priorities (CAP_SYS_NICE)")
        return 1
    chosen = [one for one in SCENARIOS if one.name in given.scenarios]
    effort = Effort(max(1, given.rounds), given.seconds, given.requests)
    report = ScenarioReport(machine, effort, chosen)
    cache = PeerCache(given.cache.absolute(), given.peer_python)
    for scenario in chosen:
        for server in given.servers:
            _run(scenario, server, cache, report, say)
    print(markdown(report), end="")
    write_json(report, given.json)
    for name, failed in report.failed.items():
        for title, text in failed.items():
            say(f"error: {name}, {title}: {text}")
    return 1 if report.failed or not report.found else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = tuple(one.name for one in SCENARIOS)
    parser = argparse.ArgumentParser(
        prog="scripts/bench --scenarios", description="Hold servers against what is possible, over time."
    )
    parser.add_argument("scenarios", type=names_of(names), nargs="?", default=names, help=", ".join(names))
    parser.add_argument("--servers", type=names_of(DEPLOYABLE), default=("gpuserve",))
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
    return parser.parse_args(arguments)


def _take_precedence() -> bool:
    """Every server and load generator inherits the scheduling of this process. Whether it could be had."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except PermissionError:
        return False
    return True


def _run(
    scenario: Scenario, server: str, cache: PeerCache, report: ScenarioReport, say: Callable[[str], None]
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
        figures = scenario.run(Site(kind, cache, report.effort, say))
    except ServerMissing as error:
        report.skipped[f"{scenario.name}, {server}"] = str(error)
    except (ServerFailed, LoadFailed) as error:
        report.failed.setdefault(scenario.name, {})[kind.title] = str(error)
    else:
        report.found.setdefault(scenario.name, {})[kind.title] = figures
