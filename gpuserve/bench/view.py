"""What is seen while a server is measured, and the table at the end. rich draws; nothing is computed here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from gpuserve.bench.plan.plan import LoadLevel, LoadPlan
from gpuserve.bench.reports.output import markdown
from gpuserve.bench.reports.report import BenchReport
from gpuserve.bench.reports.results import LevelResult, Window
from gpuserve.bench.reports.table import fitted, notes, table
from gpuserve.bench.session import BenchObserver

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class LineView:
    """One line for each level, where nobody looks at a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def level_started(self, level: LoadLevel, position: int, levels: int) -> None:
        pass

    def progressed(self, elapsed_s: float, window: Window, failed: int) -> None:
        pass

    def level_ended(self, result: LevelResult) -> None:
        self._stream.write(f"{_level_line(result)}\n")
        self._stream.flush()


class LiveView:
    """A bar for the level that is measured, with what its last second gave."""

    def __init__(self, progress: Progress, plan: LoadPlan) -> None:
        self._progress = progress
        self._plan = plan
        self._task: TaskID | None = None

    def level_started(self, level: LoadLevel, position: int, levels: int) -> None:
        title = f"{level.kind.value} {level} ({position + 1}/{levels})"
        self._task = self._progress.add_task(title, total=self._plan.duration_s, figures="warming up")

    def progressed(self, elapsed_s: float, window: Window, failed: int) -> None:
        figures = f"{window.throughput:,.0f} req/s  p50 {window.p50_ms:.3g} ms  p99 {window.p99_ms:.3g} ms"
        if failed:
            figures += f"  [red]{failed} failed[/red]"
        if self._task is not None:
            self._progress.update(self._task, completed=elapsed_s, figures=figures)

    def level_ended(self, result: LevelResult) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._progress.console.print(_level_line(result), highlight=False, markup=False)


@contextlib.contextmanager
def progress_view(plan: LoadPlan, stream: TextIO) -> Iterator[BenchObserver]:
    """The view for a stream: bars on a terminal, lines elsewhere."""
    if not stream.isatty():
        yield LineView(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        yield LiveView(progress, plan)


def show(report: BenchReport, baseline: BenchReport | None, stream: TextIO) -> None:
    """Write the table of a report: drawn on a terminal, as Markdown elsewhere."""
    if not stream.isatty():
        stream.write(markdown(report, baseline))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream)
    made, gone = fitted(table(report, baseline), console.width)
    drawn = Table(box=None, pad_edge=False, title=f"{report.model} at {report.url}", title_justify="left")
    for position, title in enumerate(made.titles):
        drawn.add_column(title, justify="right" if position else "left", no_wrap=True)
    for row in made.rows:
        drawn.add_row(*row)
    console.print(drawn)
    if gone:
        text = f"- not shown for want of room: {', '.join(gone)}; a wider terminal or --output has them"
        console.print(text, highlight=False, markup=False)
    for one in notes(report, baseline):
        console.print(f"- {one}", highlight=False, markup=False)


def _level_line(result: LevelResult) -> str:
    latency = result.latency
    failed = f", {result.failed} failed" if result.failed else ""
    return (
        f"{result.level.kind.value} {result.level}: {result.throughput:,.0f} req/s, "
        f"p50 {latency.p50_ms:.3g} ms, p99 {latency.p99_ms:.3g} ms{failed}"
    )
