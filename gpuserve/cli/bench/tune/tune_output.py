"""The output of a search: trials, Pareto front, and the config file with the best values."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from gpuserve.cli.bench.bench_session import BenchObserver
from gpuserve.cli.bench.level_results import Window
from gpuserve.cli.bench.load_plan import LoadLevel, MissingPackage
from gpuserve.cli.bench.tune import settings_search as search
from gpuserve.cli.bench.tune.settings_search import Axis, LatencyLimit, MeasuredPoint, Settings
from gpuserve.config.schema import canonical_key
from gpuserve.config.yaml_document import Path


class TrialView(BenchObserver):
    """An observer that writes a line for each trial, and on a terminal the current level."""

    def __init__(self, axes: Sequence[Axis], limit: LatencyLimit, stream: TextIO) -> None:
        self._axes = axes
        self._limit = limit
        self._stream = stream
        self._number = 0

    def trial_started(self, number: int, settings: Settings) -> BenchObserver:
        self._number = number
        return self

    def trial_ended(self, settings: Settings, points: Sequence[MeasuredPoint], failure: str) -> None:
        self._show_transient("")
        text, found, figure = failure, search.best_point(points, self._limit), self._limit.figure
        if not failure and found is None:
            text = f"{figure} is over the limit"
        elif not failure and found is not None:
            text = f"{found.throughput:,.0f} req/s, {figure} {found.latency_ms:.3g} ms"
            text += f", {found.concurrency:g} in flight"
        self._stream.write(f"{self._number:>3}  {settings_text(self._axes, settings)}: {text}\n")
        self._stream.flush()

    def level_started(self, level: LoadLevel, position: int, levels: int) -> None:
        self._show_transient(f"{self._number:>3}  {level} in flight …")

    def progressed(self, elapsed_s: float, window: Window, failed: int) -> None:
        figures = f"{window.throughput:,.0f} req/s, p99 {window.p99_ms:.3g} ms"
        self._show_transient(f"{self._number:>3}  {figures} …")

    def _show_transient(self, text: str) -> None:
        if self._stream.isatty():
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()


def print_front(
    model: str, axes: Sequence[Axis], points: Sequence[MeasuredPoint], limit: LatencyLimit, stream: TextIO
) -> None:
    """Write the Pareto front, then the best point of all other settings; the best point within the limit is
    marked. The table is drawn on a terminal, and Markdown elsewhere.
    """
    chosen = search.best_point(points, limit)
    shown = search.pareto_front(points)
    shown += _best_of_others(points, shown, limit)
    titles = [*(axis.title for axis in axes), "in flight", "req/s", f"{limit.figure} ms", ""]
    rows = []
    for one in shown:
        remark = "best" if one is chosen else "over the limit" if one.latency_ms > limit.limit_ms else ""
        figures = [f"{one.concurrency:g}", f"{one.throughput:,.0f}", f"{one.latency_ms:.3g}"]
        rows.append([*map(str, one.settings), *figures, remark])
    if stream.isatty():
        _draw_table(model, titles, rows, stream)
        return
    rule = ["---:"] * (len(titles) - 1) + ["---"]
    lines = [f"| {' | '.join(row)} |" for row in (titles, rule, *rows)]
    stream.write("\n".join([f"# {model}", "", *lines]) + "\n")


def _best_of_others(
    points: Sequence[MeasuredPoint], shown: Sequence[MeasuredPoint], limit: LatencyLimit
) -> list[MeasuredPoint]:
    """Return the best point of all settings not shown, or of lowest latency if none is within the limit."""
    left: dict[Settings, list[MeasuredPoint]] = {}
    for one in points:
        if one.settings not in {each.settings for each in shown}:
            left.setdefault(one.settings, []).append(one)
    best = search.best_point
    return [best(each, limit) or min(each, key=lambda one: one.latency_ms) for each in left.values()]


def settings_text(axes: Sequence[Axis], settings: Settings) -> str:
    """Return settings as ``key value``, with the keys of the config file."""
    return ", ".join(
        f"{'.'.join(str(key) for key in axis.keys if not isinstance(key, int))} {value}"
        for axis, value in zip(axes, settings, strict=True)
    )


def _draw_table(model: str, titles: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*titles, box=None, pad_edge=False, title=model, title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(*row, style="bold" if row[-1] else "")
    Console(file=stream).print(table)


_FIRST_ITEM = re.compile(r"^models:[^\n]*\n(?:[ ]*(?:#[^\n]*)?\n)*([ ]*)- ", re.MULTILINE)
_WIDE = 10_000


def config_with_values(text: str, values: Mapping[Path, Any]) -> str:
    """Return the text of a config file with these values at these paths; missing parents are created."""
    try:
        from ruamel.yaml import YAML
    except ImportError:
        raise MissingPackage("ruamel.yaml") from None
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = _WIDE
    first = _FIRST_ITEM.search(text)
    offset = len(first[1]) if first else 0
    yaml.indent(mapping=2, sequence=offset + 2, offset=offset)
    document = yaml.load(text)
    for path, value in values.items():
        _set_value(document, path, value)
    buffer = io.StringIO()
    yaml.dump(document, buffer)
    return buffer.getvalue()


def _set_value(whole: Any, path: Path, value: Any) -> None:
    *parents, last = path
    for step, following in zip(parents, path[1:], strict=True):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(whole, list):
            if step == len(whole):
                whole.append(empty)
        elif whole.get(step) is None or isinstance(whole[step], int):  # ``instances: 2`` is short for a list
            whole[step] = empty
        whole = whole[step]
    if isinstance(whole, list) and last == len(whole):
        whole.append(value)
    elif isinstance(whole, dict):  # the file may use Triton's name for the key
        whole[next((key for key in whole if canonical_key((*parents, key)) == last), last)] = value
    else:
        whole[last] = value
