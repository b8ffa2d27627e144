"""The table of a report: its columns, said once for the terminal, Markdown and HTML. Pure. Columns that would
be empty in every row are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from gpuserve.bench.plan.plan import LoadKind
from gpuserve.bench.reports.report import BenchReport
from gpuserve.bench.reports.results import LevelResult
from gpuserve.bench.server.server_time import ServerTime


@dataclass(frozen=True, slots=True)
class Ratios:
    """The ratios of new to old figures of one level; None where there is nothing to divide by."""

    throughput: float | None
    p50: float | None
    p99: float | None


def compared(report: BenchReport, baseline: BenchReport | None) -> list[Ratios | None]:
    """For each level the ratios to the baseline; None where that has no such level."""
    earlier = {one.level: one for one in baseline.levels} if baseline else {}
    return [_ratios(one, earlier.get(one.level)) for one in report.levels]


def _ratios(new: LevelResult, old: LevelResult | None) -> Ratios | None:
    if old is None:
        return None
    return Ratios(
        _ratio(new.throughput, old.throughput),
        _ratio(new.latency.p50_ms, old.latency.p50_ms),
        _ratio(new.latency.p99_ms, old.latency.p99_ms),
    )


def _ratio(new: float, old: float) -> float | None:
    return new / old if new and old else None


_NOTHING = ""


class Table(NamedTuple):
    titles: list[str]
    rows: list[list[str]]


Cell: TypeAlias = Callable[[LevelResult, Ratios | None], str]


def table(report: BenchReport, baseline: BenchReport | None) -> Table:
    ratios = compared(report, baseline)
    columns = _columns(report)
    rows = [
        [cell(one, ratio) for _, cell in columns] for one, ratio in zip(report.levels, ratios, strict=True)
    ]
    kept = [at for at in range(len(columns)) if any(row[at] for row in rows)]
    return Table([columns[at][0] for at in kept], [[row[at] for at in kept] for row in rows])


#: Columns that a narrow terminal can do without, the first of them first.
_DISPENSABLE: Final = (
    *("max ms", "mean ms", "client CPU", "p90 ms", "p99.9 ms", "between p50 ms", "rows/batch"),
    *("compute ms", "queue ms", "first p50 ms", "responses/s", "between p99 ms", "p50 ratio"),
)
#: Between two columns of a terminal.
_GAP: Final = 2


def fitted(made: Table, width: int) -> tuple[Table, list[str]]:
    """The table without the columns for which a terminal has no room, and their titles."""
    gone: list[str] = []
    for title in _DISPENSABLE:
        if _width(made) <= width:
            break
        if title in made.titles:
            at = made.titles.index(title)
            made = Table(_without(made.titles, at), [_without(row, at) for row in made.rows])
            gone.append(title)
    return made, gone


def _without(texts: list[str], at: int) -> list[str]:
    return [*texts[:at], *texts[at + 1 :]]


def _width(made: Table) -> int:
    columns = zip(made.titles, *made.rows, strict=True)
    return sum(max(map(len, column)) + _GAP for column in columns) - _GAP


def notes(report: BenchReport, baseline: BenchReport | None = None) -> list[str]:
    """The warnings and failures of a report, a sentence each, and what its baseline is of no use for."""
    found = ["the run was interrupted: levels are missing"] if report.interrupted else []
    if baseline is not None and report.levels and not any(compared(report, baseline)):
        levels = ", ".join(_load(one) for one in baseline.levels) or "none"
        found.append(f"there are no ratios: the baseline has no level in common with this run, only {levels}")
    for one in report.levels:
        found += [f"{_load(one)}: {warning}" for warning in one.warnings]
        found += [
            f"{_load(one)}: {count} times {kind}" + (f" ({text})" if text else "")
            for kind, (count, text) in sorted(one.failures.items())
        ]
    return found


def _columns(report: BenchReport) -> list[tuple[str, Cell]]:
    streams = report.has_streams
    return [
        ("load", lambda one, _: _load(one)),
        ("req/s", lambda one, _: _count(one.throughput)),
        ("req/s ratio", lambda _, ratio: _NOTHING if ratio is None else _times(ratio.throughput)),
        ("responses/s", lambda one, _: _count(one.responses_per_s) if streams else _NOTHING),
        ("mean ms", lambda one, _: _ms(one.latency.mean_ms)),
        ("p50 ms", lambda one, _: _ms(one.latency.p50_ms)),
        ("p50 ratio", lambda _, ratio: _NOTHING if ratio is None else _times(ratio.p50)),
        ("p90 ms", lambda one, _: _ms(one.latency.p90_ms)),
        ("p99 ms", lambda one, _: _ms(one.latency.p99_ms)),
        ("p99 ratio", lambda _, ratio: _NOTHING if ratio is None else _times(ratio.p99)),
        ("p99.9 ms", lambda one, _: _ms(one.latency.p999_ms)),
        ("max ms", lambda one, _: _ms(one.latency.max_ms)),
        ("first p50 ms", lambda one, _: _ms(one.first.p50_ms) if streams else _NOTHING),
        ("first p99 ms", lambda one, _: _ms(one.first.p99_ms) if streams else _NOTHING),
        ("between p50 ms", lambda one, _: _ms(one.gaps.p50_ms) if streams else _NOTHING),
        ("between p99 ms", lambda one, _: _ms(one.gaps.p99_ms) if streams else _NOTHING),
        ("queue ms", lambda one, _: _server(one, lambda server: _ms(server.queue_ms))),
        ("compute ms", lambda one, _: _server(one, lambda server: _ms(_compute_ms(server)))),
        ("rows/batch", lambda one, _: _server(one, lambda server: f"{server.rows_per_execution:.1f}")),
        ("client CPU", lambda one, _: f"{one.client_cpu:.0%}"),
        ("failed", lambda one, _: str(one.failed) if report.failed else _NOTHING),
    ]


def _load(one: LevelResult) -> str:
    return str(one.level) if one.level.kind is LoadKind.RATE else f"{one.level} in flight"


def _server(one: LevelResult, text: Callable[[ServerTime], str]) -> str:
    return _NOTHING if one.server is None else text(one.server)


def _compute_ms(server: ServerTime) -> float:
    return server.compute_input_ms + server.compute_infer_ms + server.compute_output_ms


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ms(value: float) -> str:
    if value < 0.001:
        return "0"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _times(ratio: float | None) -> str:
    return _NOTHING if ratio is None else f"{ratio:.2f}"
