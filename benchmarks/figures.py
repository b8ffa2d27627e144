"""Figures with their goals, the arithmetic behind them, and tables of Markdown. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit that a figure is to keep: at most, or at least."""

    limit: float
    at_least: bool = False

    def met_by(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One case of a scenario on one server: a sample a round.

    ``details`` is what was seen beside it, by the heading of its column, a sample a round as well.
    """

    case: str
    unit: str
    samples: tuple[float, ...]
    goal: Goal | None = None
    details: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return median(self.samples)

    @property
    def reached(self) -> bool | None:
        """Whether the goal is kept; None where there is none."""
        return None if self.goal is None else self.goal.met_by(self.value)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least so many per cent of them do not exceed. Raises ValueError:
    there are no values.
    """
    if not values:
        raise ValueError("no values have no percentile")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def table(header: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table of Markdown; so many columns from the left hold words, the others numbers."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *lines])


def document(one: Figure) -> dict[str, Any]:
    goal = None if one.goal is None else str(one.goal)
    found: Any = {
        "case": one.case,
        "unit": one.unit,
        "median": one.value,
        "goal": goal,
        "reached": one.reached,
    }
    found |= {"rounds": len(one.samples), "samples": one.samples, "details": one.details}
    return {key: rounded(value) for key, value in found.items()}


def cells(figure: Mapping[str, Any], *, is_judged: bool = True) -> tuple[str, ...]:
    """Return the case of a figure's document, its median and range, its goal, and whether it is reached."""
    samples = [sample for sample in figure["samples"] if sample is not None]
    shown = number(figure["median"])
    if len(samples) > 1:
        shown += f" ({number(min(samples))} to {number(max(samples))})"
    reached = "-" if figure["reached"] is None or not is_judged else yes_or_no(figure["reached"])
    return f"{figure['case']} ({figure['unit']})", shown, figure["goal"] or "-", reached


def detail(figure: Mapping[str, Any], name: str) -> str:
    seen = [sample for sample in figure["details"].get(name, ()) if sample is not None]
    return number(median(seen) if seen else None)


def yes_or_no(right: bool) -> str:
    return "yes" if right else "**no**"


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def rounded(value: object) -> object:
    """Return the same document with four digits of each float, and None for what JSON has no number for."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return value
