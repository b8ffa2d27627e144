"""A report: the figures of a run, the measured model and the options; its JSON form, its comparison with a
baseline, and its table. Columns that are empty in every row are left out. Pure.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gpuserve.cli.bench.level_results import LatencySummary, LevelResult
from gpuserve.cli.bench.load_plan import BenchOptionError, LoadKind, LoadLevel
from gpuserve.cli.bench.server_control import ServerTime

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


def report_to_json(report: BenchReport) -> str:
    document = {"format": _FORMAT} | dataclasses.asdict(report)
    return json.dumps(document, indent=1, default=lambda kind: kind.value) + "\n"


def report_from_json(text: str) -> BenchReport:
    """Return the report that ``report_to_json`` wrote; raise BenchOptionError for any other text."""
    try:
        document = json.loads(text)
        if document.pop("format") != _FORMAT:
            raise ValueError
        document["levels"] = tuple(map(_level_result, document["levels"]))
        return BenchReport(**document)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BenchOptionError("--baseline", "expected a .json report of gpuserve bench") from None


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


class ReportTable(NamedTuple):
    titles: list[str]
    rows: list[list[str]]


_CALL_COLUMNS: Final = (
    *("load", "req/s", "req/s ratio", "responses/s", "mean ms", "p50 ms", "p50 ratio", "p90 ms", "p99 ms"),
    *("p99 ratio", "p99.9 ms", "max ms", "first p50 ms", "first p99 ms", "between p50 ms", "between p99 ms"),
    *("queue ms", "compute ms", "rows/batch", "client CPU", "failed"),
)
_STREAM_COLUMNS: Final = (
    *("load", "req/s", "tokens/s", "tokens/s of one", "first p50 ms", "first p90 ms", "first p99 ms"),
    *("between p50 ms", "between p90 ms", "between p99 ms", "p99 ms", "client CPU", "failed"),
)


def report_table(report: BenchReport, baseline: BenchReport | None) -> ReportTable:
    earlier = _levels(baseline)
    of_tokens = STREAM in report.settings
    has_responses = of_tokens or any(one.gaps.count for one in report.levels)
    rows = []
    for one in report.levels:
        row = _figures(one) | _ratios(one, earlier.get(one.level))
        rows.append(row | _response_figures(one) if has_responses else row)
    titles = [
        title
        for title in (_STREAM_COLUMNS if of_tokens else _CALL_COLUMNS)
        if any(row.get(title) for row in rows) and (title != "failed" or report.failed)
    ]
    return ReportTable(titles, [[row.get(title, "") for title in titles] for row in rows])


def _levels(report: BenchReport | None) -> dict[LoadLevel, LevelResult]:
    return {} if report is None else {one.level: one for one in report.levels}


def _figures(one: LevelResult) -> dict[str, str]:
    """Return the texts of a level's figures, by the titles of their columns."""
    figures = {
        "load": _load_text(one),
        "req/s": _rate_text(one.throughput),
        **_latency_figures("", one.latency),
        "client CPU": f"{one.client_cpu:.0%}",
        "failed": str(one.failed),
    }
    if (server := one.server) is not None:
        figures["queue ms"] = _ms_text(server.queue_ms)
        figures["compute ms"] = _ms_text(server.compute_ms)
        figures["rows/batch"] = f"{server.rows_per_execution:.1f}"
    return figures


def _response_figures(one: LevelResult) -> dict[str, str]:
    """Return the texts of the figures about several responses to a request."""
    rate = _rate_text(one.responses_per_s)
    figures = {"responses/s": rate, "tokens/s": rate}
    if one.gaps.count:
        figures["tokens/s of one"] = _rate_text(1000 / one.gaps.mean_ms)
    return figures | _latency_figures("first ", one.first) | _latency_figures("between ", one.gaps)


def _latency_figures(prefix: str, summary: LatencySummary) -> dict[str, str]:
    names = {"mean": "mean", "p50": "p50", "p90": "p90", "p99": "p99", "p99.9": "p999", "max": "max"}
    return {f"{prefix}{title} ms": _ms_text(getattr(summary, f"{name}_ms")) for title, name in names.items()}


def _ratios(new: LevelResult, old: LevelResult | None) -> dict[str, str]:
    """Return the texts of the ratios of a level to the same level of the baseline, unless a figure is 0."""
    if old is None:
        return {}
    pairs = {
        "req/s ratio": (new.throughput, old.throughput),
        "p50 ratio": (new.latency.p50_ms, old.latency.p50_ms),
        "p99 ratio": (new.latency.p99_ms, old.latency.p99_ms),
    }
    return {title: f"{now / before:.2f}" for title, (now, before) in pairs.items() if now and before}


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
    if baseline is not None and report.levels and not _levels(report).keys() & _levels(baseline).keys():
        levels = ", ".join(_load_text(one) for one in baseline.levels) or "none"
        found.append(f"there are no ratios: the baseline has no level in common with this run, only {levels}")
    for one in report.levels:
        found += [f"{_load_text(one)}: {warning}" for warning in one.warnings]
        found += [
            f"{_load_text(one)}: {count} times {kind}" + (f" ({text})" if text else "")
            for kind, (count, text) in sorted(one.failures.items())
        ]
    return found


def _load_text(one: LevelResult) -> str:
    return str(one.level) if one.level.kind is LoadKind.RATE else f"{one.level} in flight"


def _rate_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ms_text(value: float) -> str:
    if value < 0.001:
        return "0"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
