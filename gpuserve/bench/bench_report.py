"""A report: the figures of a run, the measured model and the options; its JSON form, its comparison with a
baseline, and its table. Columns that are empty in every row are left out. Pure.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.bench.level_results import LatencySummary, LevelResult
from gpuserve.bench.load_plan import BenchOptionError, LoadKind, LoadLevel
from gpuserve.bench.server_control import ServerTime

_FORMAT: Final = "gpuserve bench 1"
#: The setting of a report about streams of tokens.
STREAM: Final = "stream"


@dataclass(frozen=True)
class BenchReport:
    """The results of a run. ``settings`` are the options by name."""

    model: str
    url: str
    began_at: str
    gpuserve: str
    cores: int
    settings: dict[str, Any]
    levels: tuple[LevelResult, ...]
    interrupted: bool = False

    @property
    def failed(self) -> int:
        return sum(one.failed for one in self.levels)

    @property
    def has_streams(self) -> bool:
        """True if any request had more than one response."""
        return any(one.gaps.count for one in self.levels)


def report_to_json(report: BenchReport) -> str:
    document = {"format": _FORMAT} | dataclasses.asdict(report)
    return json.dumps(document, indent=1, default=lambda kind: kind.value) + "\n"


def report_from_json(text: str, option: str) -> BenchReport:
    """Return the report that ``report_to_json`` wrote; raise BenchOptionError for any other text."""
    try:
        document = json.loads(text)
        if document.pop("format") != _FORMAT:
            raise ValueError
        document["levels"] = tuple(map(_level_result, document["levels"]))
        return BenchReport(**document)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BenchOptionError(option, "expected a .json report of gpuserve bench") from None


def _level_result(fields: dict[str, Any]) -> LevelResult:
    level = fields.pop("level")
    server = fields.pop("server")
    summaries: dict[str, Any] = {
        name: LatencySummary(**fields.pop(name)) for name in ("latency", "first", "gaps")
    }
    failures = {kind: (count, text) for kind, (count, text) in fields.pop("failures").items()}
    return LevelResult(
        level=LoadLevel(LoadKind(level["kind"]), level["value"]),
        server=None if server is None else ServerTime(**server),
        failures=failures,
        warnings=tuple(fields.pop("warnings")),
        **summaries,
        **fields,
    )


@dataclass(frozen=True, slots=True)
class LevelRatios:
    """Ratios of new to old figures of a level; None if a figure is 0."""

    throughput: float | None
    p50: float | None
    p99: float | None


def ratios_to_baseline(report: BenchReport, baseline: BenchReport | None) -> list[LevelRatios | None]:
    """Return for each level its ratios to the baseline, or None if the baseline lacks the level."""
    earlier = {one.level: one for one in baseline.levels} if baseline else {}
    pairs = [(new, earlier.get(new.level)) for new in report.levels]
    return [
        None
        if old is None
        else LevelRatios(
            _ratio(new.throughput, old.throughput),
            _ratio(new.latency.p50_ms, old.latency.p50_ms),
            _ratio(new.latency.p99_ms, old.latency.p99_ms),
        )
        for new, old in pairs
    ]


def _ratio(new: float, old: float) -> float | None:
    return new / old if new and old else None


_EMPTY = ""


class ReportTable(NamedTuple):
    titles: list[str]
    rows: list[list[str]]


CellText: TypeAlias = Callable[[LevelResult, LevelRatios | None], str]


def report_table(report: BenchReport, baseline: BenchReport | None) -> ReportTable:
    ratios = ratios_to_baseline(report, baseline)
    columns = _columns(report)
    rows = [
        [cell(one, ratio) for _, cell in columns] for one, ratio in zip(report.levels, ratios, strict=True)
    ]
    kept = [at for at in range(len(columns)) if any(row[at] for row in rows)]
    return ReportTable([columns[at][0] for at in kept], [[row[at] for at in kept] for row in rows])


#: Columns that a narrow terminal hides, in this order.
_OPTIONAL_COLUMNS: Final = (
    *("max ms", "mean ms", "client CPU", "p90 ms", "p99.9 ms", "between p50 ms", "rows/batch"),
    *("compute ms", "queue ms", "first p50 ms", "responses/s", "between p99 ms", "p50 ratio"),
)
#: Blanks between two columns of a terminal.
_GAP: Final = 2


def fit_table(made: ReportTable, width: int) -> tuple[ReportTable, list[str]]:
    """Return the table without the columns for which the terminal has no room, and the titles of these."""
    hidden: list[str] = []
    for title in _OPTIONAL_COLUMNS:
        if _width(made) <= width:
            break
        if title in made.titles:
            at = made.titles.index(title)
            made = ReportTable(_remove_item(made.titles, at), [_remove_item(row, at) for row in made.rows])
            hidden.append(title)
    return made, hidden


def _remove_item(texts: list[str], at: int) -> list[str]:
    return [*texts[:at], *texts[at + 1 :]]


def _width(made: ReportTable) -> int:
    columns = zip(made.titles, *made.rows, strict=True)
    return sum(max(map(len, column)) + _GAP for column in columns) - _GAP


def report_notes(report: BenchReport, baseline: BenchReport | None = None) -> list[str]:
    """Return a sentence for each warning and failure, and for a baseline without a common level."""
    found = ["the run was interrupted: levels are missing"] if report.interrupted else []
    if baseline is not None and report.levels and not any(ratios_to_baseline(report, baseline)):
        levels = ", ".join(_load_text(one) for one in baseline.levels) or "none"
        found.append(f"there are no ratios: the baseline has no level in common with this run, only {levels}")
    for one in report.levels:
        found += [f"{_load_text(one)}: {warning}" for warning in one.warnings]
        found += [
            f"{_load_text(one)}: {count} times {kind}" + (f" ({text})" if text else "")
            for kind, (count, text) in sorted(one.failures.items())
        ]
    return found


def _columns(report: BenchReport) -> list[tuple[str, CellText]]:
    return _stream_columns(report) if STREAM in report.settings else _call_columns(report)


def _stream_columns(report: BenchReport) -> list[tuple[str, CellText]]:
    return [
        ("load", lambda one, _: _load_text(one)),
        ("req/s", lambda one, _: _rate_text(one.throughput)),
        ("tokens/s", lambda one, _: _rate_text(one.responses_per_s)),
        ("tokens/s of one", lambda one, _: _rate_text(1000 / one.gaps.mean_ms) if one.gaps.count else _EMPTY),
        ("first p50 ms", lambda one, _: _ms_text(one.first.p50_ms)),
        ("first p90 ms", lambda one, _: _ms_text(one.first.p90_ms)),
        ("first p99 ms", lambda one, _: _ms_text(one.first.p99_ms)),
        ("between p50 ms", lambda one, _: _ms_text(one.gaps.p50_ms)),
        ("between p90 ms", lambda one, _: _ms_text(one.gaps.p90_ms)),
        ("between p99 ms", lambda one, _: _ms_text(one.gaps.p99_ms)),
        ("p99 ms", lambda one, _: _ms_text(one.latency.p99_ms)),
        ("client CPU", lambda one, _: f"{one.client_cpu:.0%}"),
        ("failed", lambda one, _: str(one.failed) if report.failed else _EMPTY),
    ]


def _call_columns(report: BenchReport) -> list[tuple[str, CellText]]:
    streams = report.has_streams
    return [
        ("load", lambda one, _: _load_text(one)),
        ("req/s", lambda one, _: _rate_text(one.throughput)),
        ("req/s ratio", lambda _, ratio: _EMPTY if ratio is None else _ratio_text(ratio.throughput)),
        ("responses/s", lambda one, _: _rate_text(one.responses_per_s) if streams else _EMPTY),
        ("mean ms", lambda one, _: _ms_text(one.latency.mean_ms)),
        ("p50 ms", lambda one, _: _ms_text(one.latency.p50_ms)),
        ("p50 ratio", lambda _, ratio: _EMPTY if ratio is None else _ratio_text(ratio.p50)),
        ("p90 ms", lambda one, _: _ms_text(one.latency.p90_ms)),
        ("p99 ms", lambda one, _: _ms_text(one.latency.p99_ms)),
        ("p99 ratio", lambda _, ratio: _EMPTY if ratio is None else _ratio_text(ratio.p99)),
        ("p99.9 ms", lambda one, _: _ms_text(one.latency.p999_ms)),
        ("max ms", lambda one, _: _ms_text(one.latency.max_ms)),
        ("first p50 ms", lambda one, _: _ms_text(one.first.p50_ms) if streams else _EMPTY),
        ("first p99 ms", lambda one, _: _ms_text(one.first.p99_ms) if streams else _EMPTY),
        ("between p50 ms", lambda one, _: _ms_text(one.gaps.p50_ms) if streams else _EMPTY),
        ("between p99 ms", lambda one, _: _ms_text(one.gaps.p99_ms) if streams else _EMPTY),
        ("queue ms", lambda one, _: _server_text(one, lambda server: _ms_text(server.queue_ms))),
        ("compute ms", lambda one, _: _server_text(one, lambda server: _ms_text(server.compute_ms))),
        ("rows/batch", lambda one, _: _server_text(one, lambda server: f"{server.rows_per_execution:.1f}")),
        ("client CPU", lambda one, _: f"{one.client_cpu:.0%}"),
        ("failed", lambda one, _: str(one.failed) if report.failed else _EMPTY),
    ]


def _load_text(one: LevelResult) -> str:
    return str(one.level) if one.level.kind is LoadKind.RATE else f"{one.level} in flight"


def _server_text(one: LevelResult, text: Callable[[ServerTime], str]) -> str:
    return _EMPTY if one.server is None else text(one.server)


def _rate_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ms_text(value: float) -> str:
    if value < 0.001:
        return "0"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _ratio_text(ratio: float | None) -> str:
    return _EMPTY if ratio is None else f"{ratio:.2f}"
