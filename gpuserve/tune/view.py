"""What is seen of a search: a line for each trial, and at the end the front as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from gpuserve.bench.plan.plan import LoadLevel
from gpuserve.bench.reports.results import LevelResult, Window
from gpuserve.bench.session import BenchObserver
from gpuserve.tune.axes import Axis, Settings
from gpuserve.tune.search import LatencyLimit, Point, best, front


class TrialLines:
    """Shows a line for each trial, and on a terminal the level that is being measured."""

    def __init__(self, axes: Sequence[Axis], limit: LatencyLimit, stream: TextIO) -> None:
        self._axes = axes
        self._limit = limit
        self._stream = stream
        self._number = 0

    def trial_started(self, number: int, settings: Settings) -> BenchObserver:
        self._number = number
        return self

    def trial_ended(self, settings: Settings, points: Sequence[Point], failure: str) -> None:
        self._passing("")
        text = failure or _result(points, self._limit)
        self._stream.write(f"{self._number:>3}  {settings_text(self._axes, settings)}: {text}\n")
        self._stream.flush()

    def level_started(self, level: LoadLevel, position: int, levels: int) -> None:
        self._passing(f"{self._number:>3}  {level} in flight …")

    def progressed(self, elapsed_s: float, window: Window, failed: int) -> None:
        self._passing(f"{self._number:>3}  {window.throughput:,.0f} req/s, p99 {window.p99_ms:.3g} ms …")

    def level_ended(self, result: LevelResult) -> None:
        pass

    def _passing(self, text: str) -> None:
        """Show a line that the next one replaces."""
        if self._stream.isatty():
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()


def show_front(
    model: str, axes: Sequence[Axis], points: Sequence[Point], limit: LatencyLimit, stream: TextIO
) -> None:
    """The front, then a row for each other trial; the best under the limit is marked. Drawn on a terminal,
    Markdown elsewhere.
    """
    chosen = best(points, limit)
    shown = front(points)
    shown += _others(points, shown, limit)
    titles = [*(axis.title for axis in axes), "in flight", "req/s", f"{limit.figure} ms", ""]
    rows = [
        [
            *map(str, one.settings),
            f"{one.concurrency:g}",
            f"{one.throughput:,.0f}",
            f"{one.latency_ms:.3g}",
            _mark(one, chosen, limit),
        ]
        for one in shown
    ]
    if stream.isatty():
        _draw(model, titles, rows, stream)
        return
    rule = ["---:"] * (len(titles) - 1) + ["---"]
    lines = [f"| {' | '.join(row)} |" for row in (titles, rule, *rows)]
    stream.write("\n".join([f"# {model}", "", *lines]) + "\n")


def _others(points: Sequence[Point], shown: Sequence[Point], limit: LatencyLimit) -> list[Point]:
    """Of each settings that are not shown the best point, or where none is under the limit the quickest."""
    left: dict[Settings, list[Point]] = {
        one.settings: [] for one in points if one.settings not in {each.settings for each in shown}
    }
    for one in points:
        if one.settings in left:
            left[one.settings].append(one)
    return [best(each, limit) or min(each, key=lambda one: one.latency_ms) for each in left.values()]


def _mark(one: Point, chosen: Point | None, limit: LatencyLimit) -> str:
    if one is chosen:
        return "best"
    return "over the limit" if one.latency_ms > limit.most_ms else ""


def settings_text(axes: Sequence[Axis], settings: Settings) -> str:
    """Settings as ``key value``, with the keys of the config file."""
    return ", ".join(
        f"{'.'.join(str(key) for key in axis.keys if not isinstance(key, int))} {value}"
        for axis, value in zip(axes, settings, strict=True)
    )


def _draw(model: str, titles: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*titles, box=None, pad_edge=False, title=model, title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(*row, style="bold" if row[-1] else "")
    Console(file=stream).print(table)


def _result(points: Sequence[Point], limit: LatencyLimit) -> str:
    found = best(points, limit)
    if found is None:
        return f"{limit.figure} is over the limit"
    return (
        f"{found.throughput:,.0f} req/s, {limit.figure} {found.latency_ms:.3g} ms, "
        f"{found.concurrency:g} in flight"
    )
