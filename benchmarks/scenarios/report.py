"""Figures to Markdown and JSON. Values in, text out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.scenarios.figures import Figure
from benchmarks.scenarios.scenario import Effort, Scenario


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
    """The report as Markdown: a table a scenario."""
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    effort = report.effort
    parts = [f"Medians of {effort.rounds} rounds of {effort.seconds:g} s. {machine}."]
    for scenario in report.scenarios:
        found, failed = report.found.get(scenario.name, {}), report.failed.get(scenario.name, {})
        if found or failed:
            parts.append(f"### {scenario.title[0].upper()}{scenario.title[1:]}\n\nGoal: {scenario.goal}.")
        parts += [_table(title, figures) for title, figures in found.items()]
        parts += [f"{title}: FAILED." for title in failed]
    parts += [f"Skipped: {name}: {reason}." for name, reason in report.skipped.items()]
    return "\n\n".join(parts) + "\n"


def write_json(report: ScenarioReport, path: Path) -> None:
    """Write every sample as JSON."""
    document = {
        "machine": dict(report.machine),
        "effort": asdict(report.effort),
        "skipped": report.skipped,
        "scenarios": {
            one.name: {
                "title": one.title,
                "goal": one.goal,
                "servers": {
                    title: list(map(_figure, figures))
                    for title, figures in report.found.get(one.name, {}).items()
                },
                "failed": list(report.failed.get(one.name, {})),
            }
            for one in report.scenarios
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _table(title: str, figures: Sequence[Figure]) -> str:
    details = list(dict.fromkeys(name for figure in figures for name in figure.details))
    lines = [[title, "median (range)", "goal", "reached", *details]]
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    lines += [[_case(one), _value(one), *_goal(one), *_details(one, details)] for one in figures]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _case(one: Figure) -> str:
    return f"{one.case} ({one.unit})"


def _value(one: Figure) -> str:
    if len(one.samples) == 1:
        return _number(one.value)
    return f"{_number(one.value)} ({_number(min(one.samples))} to {_number(max(one.samples))})"


def _goal(one: Figure) -> tuple[str, str]:
    if one.goal is None:
        return "-", "-"
    return str(one.goal), "yes" if one.reached else "**no**"


def _details(one: Figure, names: Sequence[str]) -> list[str]:
    return [_number(median(one.details[name])) if name in one.details else "-" for name in names]


def _figure(one: Figure) -> dict[str, object]:
    return {
        "case": one.case,
        "unit": one.unit,
        "goal": None if one.goal is None else str(one.goal),
        "reached": one.reached,
        "samples": list(map(_cut, one.samples)),
        "details": {name: list(map(_cut, samples)) for name, samples in one.details.items()},
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cut(value: float) -> float | None:
    """Four digits; None where a percentile of latencies is that of refused requests."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
