"""The output of a run: progress and table on a terminal, and report files in Markdown, CSV, JSON or HTML by
the file's ending. HTML has plots as SVG and loads no other resource. rich and matplotlib are imported when
used.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import html
import io
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeAlias

from gpuserve.cli.bench.bench_report import BenchReport, fit_table, report_notes, report_table, report_to_json
from gpuserve.cli.bench.bench_session import BenchObserver
from gpuserve.cli.bench.level_results import LevelResult, Window, histogram_type, percentile_curve
from gpuserve.cli.bench.load_plan import (
    BenchOptionError,
    LoadKind,
    LoadLevel,
    LoadPlan,
    MissingPackage,
    error_reason,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class BenchLines(BenchObserver):
    """An observer that writes a line for each level, for output that is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def level_ended(self, result: LevelResult) -> None:
        self._stream.write(f"{_level_line(result)}\n")
        self._stream.flush()


class BenchProgress(BenchObserver):
    """An observer that draws a progress bar for the current level, with figures of its last second."""

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
    """Yield the observer for a stream: bars on a terminal, lines elsewhere."""
    if not stream.isatty():
        yield BenchLines(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bars = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    columns = *bars, TextColumn("{task.fields[figures]}")
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        yield BenchProgress(progress, plan)


def print_report(report: BenchReport, baseline: BenchReport | None, stream: TextIO) -> None:
    """Write the table of a report: drawn on a terminal, as Markdown elsewhere."""
    if not stream.isatty():
        stream.write(markdown_text(report, baseline))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream)
    made, hidden = fit_table(report_table(report, baseline), console.width)
    drawn = Table(box=None, pad_edge=False, title=f"{report.model} at {report.url}", title_justify="left")
    for position, title in enumerate(made.titles):
        drawn.add_column(title, justify="right" if position else "left", no_wrap=True)
    for row in made.rows:
        drawn.add_row(*row)
    console.print(drawn)
    if hidden:
        text = f"- not enough room for: {', '.join(hidden)}; use a wider terminal or --output"
        console.print(text, highlight=False, markup=False)
    for one in report_notes(report, baseline):
        console.print(f"- {one}", highlight=False, markup=False)


def _level_line(result: LevelResult) -> str:
    latency = result.latency
    failed = f", {result.failed} failed" if result.failed else ""
    line = (
        f"{result.level.kind.value} {result.level}: {result.throughput:,.0f} req/s, "
        f"p50 {latency.p50_ms:.3g} ms, p99 {latency.p99_ms:.3g} ms"
    )
    if result.gaps.count:
        line += f", first {result.first.p50_ms:.3g} ms, {result.responses_per_s:,.0f} responses/s"
    return line + failed


OUTPUT_OPTION: Final = "--output"
_STYLE: Final = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums }
table { font-size: .87rem }
th, td { padding: .25rem .45rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap }
th { vertical-align: bottom; white-space: normal }
th:first-child, td:first-child { text-align: left }
figure { display: inline-block; margin: 1rem 1rem 0 0 }
figure svg { background: white; max-width: 100%; height: auto }
"""
ReportRenderer: TypeAlias = Callable[[BenchReport, BenchReport | None], str]


def check_output(path: str) -> None:
    """Check a report's path before the run; raise BenchOptionError, or MissingPackage for its format."""
    ending = os.path.splitext(path)[1]
    if ending not in _RENDERERS:
        text = f"expected a file that ends in {', '.join(_RENDERERS)}, given {path!r}"
        raise BenchOptionError(OUTPUT_OPTION, text)
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise BenchOptionError(OUTPUT_OPTION, f"there is no folder {os.path.dirname(path)!r}")
    histogram_type()
    if ending == ".html":
        require_matplotlib()


def write_report(path: str, report: BenchReport, baseline: BenchReport | None) -> None:
    """Write a report in the format of the file's ending. Raise BenchOptionError if that fails."""
    text = _RENDERERS[os.path.splitext(path)[1]](report, baseline)
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise BenchOptionError(OUTPUT_OPTION, f"{path} cannot be written: {error_reason(error)}") from None


def markdown_text(report: BenchReport, baseline: BenchReport | None) -> str:
    table = report_table(report, baseline)
    rule = ["---", *["---:"] * (len(table.titles) - 1)]
    rows = [f"| {' | '.join(row)} |" for row in (table.titles, rule, *table.rows)]
    lines = [f"# {report.model}", "", _subtitle(report), "", *rows]
    noted = report_notes(report, baseline)
    if noted:
        lines += ["", *(f"- {one}" for one in noted)]
    return "\n".join(lines) + "\n"


def csv_text(report: BenchReport, _baseline: BenchReport | None) -> str:
    """Return a row for each level, with every figure by its full name."""
    rows = []
    for one in report.levels:
        row: dict[str, Any] = {one.level.kind.value: one.level.value}
        for name, value in dataclasses.asdict(one).items():
            if name in {"level", "histogram", "warnings", "failures"}:
                continue
            if isinstance(value, dict):
                row |= {f"{name}_{key}": figure for key, figure in value.items()}
            elif value is not None:
                row[name] = value
        rows.append(row | {"failed": one.failed})
    titles = list(dict.fromkeys(title for row in rows for title in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, titles, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def html_page(report: BenchReport, baseline: BenchReport | None) -> str:
    made = report_table(report, baseline)
    noted = "".join(f"<li>{html.escape(one)}</li>" for one in report_notes(report, baseline))
    figures = "".join(
        f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>"
        for title, svg in svg_plots(report)
    )
    title = html.escape(report.model)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>{html.escape(_subtitle(report))}</p>"
        f"<table>{_html_row('th', made.titles)}{''.join(_html_row('td', row) for row in made.rows)}</table>"
        f"<ul>{noted}</ul>{figures}</html>\n"
    )


def _html_row(cell: str, texts: list[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{html.escape(text)}</{cell}>' for text in texts)}</tr>"


def _subtitle(report: BenchReport) -> str:
    options = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    return f"{report.url}, {report.began_at}, gpuserve {report.gpuserve}, {report.cores} cores; {options}"


_RENDERERS: Final[dict[str, ReportRenderer]] = {
    ".md": markdown_text,
    ".csv": csv_text,
    ".json": lambda report, _baseline: report_to_json(report),
    ".html": html_page,
}

_SIZE_INCHES = (6.4, 3.6)
_PERCENTILE_TICKS = (50, 90, 99, 99.9, 99.99)


def svg_plots(report: BenchReport) -> list[tuple[str, str]]:
    """Return the plots of a report as (title, SVG); raise MissingPackage if matplotlib is not installed."""
    titles: list[tuple[str, Callable[[Any, BenchReport], None]]] = [("Latency by percentile", _percentiles)]
    if len(report.levels) > 1:
        titles = [("Throughput", _throughput), ("Latency against throughput", _latency), *titles]
    return [(title, _svg(report, draw)) for title, draw in titles]


def require_matplotlib() -> Any:
    """Return ``matplotlib.figure``, which draws without a display. Raise MissingPackage if it is absent."""
    try:
        from matplotlib import figure
    except ImportError:
        raise MissingPackage("matplotlib") from None
    return figure


def _svg(report: BenchReport, draw: Callable[[Any, BenchReport], None]) -> str:
    figure = require_matplotlib().Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, report)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)


def _throughput(axes: Any, report: BenchReport) -> None:
    axes.plot([one.level.value for one in report.levels], [one.throughput for one in report.levels], "o-")
    axes.set(xlabel=_load_label(report), ylabel="requests/s", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _latency(axes: Any, report: BenchReport) -> None:
    rates = [one.throughput for one in report.levels]
    for label, values in (
        ("p50", [one.latency.p50_ms for one in report.levels]),
        ("p99", [one.latency.p99_ms for one in report.levels]),
    ):
        axes.plot(rates, values, "o-", label=label)
    axes.set(xlabel="requests/s", ylabel="ms", yscale="log")
    _plain_numbers(axes)
    axes.legend(frameon=False)


def _percentiles(axes: Any, report: BenchReport) -> None:
    """Draw latency over 1 / (1 - percentile), the axis of HdrHistogram's own plots."""
    for one in report.levels:
        if one.latency.count:
            curve = percentile_curve(one.histogram)
            axes.plot([100 / (100 - at) for at, _ in curve], [ms for _, ms in curve], label=str(one.level))
    axes.set(xlabel="percentile", ylabel="ms", xscale="log", yscale="log")
    _plain_numbers(axes)
    axes.set_xticks([100 / (100 - at) for at in _PERCENTILE_TICKS], [f"{at:g}" for at in _PERCENTILE_TICKS])
    axes.minorticks_off()
    axes.legend(frameon=False, title=_load_label(report))


def _plain_numbers(axes: Any) -> None:
    """Label the vertical axis with plain numbers such as 0.5, few enough that labels do not overlap."""
    from matplotlib.ticker import LogLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.tick_params(axis="y", which="minor", left=False, labelleft=False)


def _load_label(report: BenchReport) -> str:
    is_rate = report.levels[0].level.kind is LoadKind.RATE
    return "requests due a second" if is_rate else "requests in flight"
