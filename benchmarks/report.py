"""Samples to medians and ratios, and those to Markdown and JSON. Values in, text out.

A ratio is taken inside each round, where both servers met the same machine; shown are its median and range.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.footprint import ImportCost, Start
from benchmarks.rounds import Sample, Samples
from benchmarks.rows import Measure, Row

OURS = "gpuserve"
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured, and on what. ``titles`` by server name, in the order of the columns."""

    machine: dict[str, str]
    rounds: int
    seconds: float
    titles: dict[str, str]
    skipped: dict[str, str]
    rows: Sequence[Row] = ()
    samples: Samples = field(default_factory=Samples)
    starts: Mapping[str, Sequence[Start]] = field(default_factory=dict)
    imports: Sequence[ImportCost] = ()


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over theirs, over the rounds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        """Both in the order of the rounds."""
        by_round = [a / b for a, b in zip(ours, theirs, strict=True)]
        return cls(median(by_round), min(by_round), max(by_round))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lowest:.2f} to {self.highest:.2f})"


def markdown(report: Report) -> str:
    """The report as Markdown."""
    parts = [_conditions(report)]
    if report.samples.by_pair or report.samples.failures:
        parts += [_speed(report), _cpu(report)]
    if report.starts:
        parts.append(_footprint(report))
    if report.imports:
        parts.append(_imports(report))
    parts += [f"Skipped: {name}: {reason}." for name, reason in report.skipped.items()]
    return "\n\n".join(parts) + "\n"


def write_json(report: Report, path: Path) -> None:
    """Every sample, rounded to four digits, as JSON."""
    document = {
        "machine": report.machine,
        "rounds": report.rounds,
        "seconds": report.seconds,
        "servers": report.titles,
        "skipped": report.skipped,
        "rows": {row.name: _row_document(report, row) for row in report.rows},
        "starts": {name: list(map(dataclasses.asdict, starts)) for name, starts in report.starts.items()},
        "imports": list(map(_import_document, report.imports)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(document), indent=1, ensure_ascii=False) + "\n")


def _conditions(report: Report) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    others = [sample.others_share for samples in report.samples.by_pair.values() for sample in samples]
    busy = (
        f" Other processes used {median(others):.0%} of the machine (at most {max(others):.0%} in a run)."
        if others
        else ""
    )
    return f"Medians of {report.rounds} rounds of {report.seconds:g} s. {machine}.{busy}"


def _speed(report: Report) -> str:
    peers = [name for name in report.titles if name != OURS] if OURS in report.titles else []
    header = ["", *report.titles.values(), *(f"ratio to {report.titles[peer]}" for peer in peers)]
    return _table(
        header,
        (
            [
                f"{row.title} ({row.measure.value})",
                *(_value(report, row, name) for name in report.titles),
                *(_ratio(report, row, peer) for peer in peers),
            ]
            for row in report.rows
        ),
    )


def _cpu(report: Report) -> str:
    return _table(
        ["CPU µs a request or token, all processes of the server", *report.titles.values()],
        ([row.title, *(_cpu_value(report, row, name) for name in report.titles)] for row in report.rows),
    )


def _value(report: Report, row: Row, server: str) -> str:
    if (row.name, server) in report.samples.failures:
        return "FAILED"
    samples = report.samples.by_pair.get((row.name, server), [])
    if not samples:
        return "-"
    value = median(one.value for one in samples)
    return f"{value:.3f}" if row.measure is Measure.LATENCY else f"{value:,.0f}"


def _cpu_value(report: Report, row: Row, server: str) -> str:
    samples = report.samples.by_pair.get((row.name, server), [])
    return f"{median(one.cpu_s_per_answer for one in samples) * 1e6:,.0f}" if samples else "-"


def _ratio(report: Report, row: Row, peer: str) -> str:
    ours, theirs = ([one.value for one in _complete(report, row, name)] for name in (OURS, peer))
    if not ours or not theirs:
        return "-"
    ratio, target = Ratio.of(ours, theirs), row.targets.get(peer)
    if target is None:
        return str(ratio)
    return f"{ratio}, to reach {target}: {'yes' if target.met_by(ratio.median) else '**no**'}"


def _complete(report: Report, row: Row, server: str) -> Sequence[Sample]:
    """The samples of a pair that failed in no round; a ratio needs the same rounds on both sides."""
    pair = row.name, server
    return () if pair in report.samples.failures else report.samples.by_pair.get(pair, ())


def _footprint(report: Report) -> str:
    lines: list[list[str]] = []
    for name, starts in report.starts.items():
        ready_s = median(one.ready_s for one in starts)
        rss = median(sum(process.memory.rss_nbytes for process in one.processes) for one in starts)
        pss = median(sum(process.memory.pss_nbytes for process in one.processes) for one in starts)
        title = f"**{report.titles[name]}**, ready after {ready_s:.2f} s"
        lines.append([title, f"**{rss / _MB:.0f}**", f"**{pss / _MB:.0f}**", ""])
        lines += [
            [
                one.role,
                f"{one.memory.rss_nbytes / _MB:.0f}",
                f"{one.memory.pss_nbytes / _MB:.0f}",
                ", ".join(one.loaded),
            ]
            for one in starts[-1].processes
        ]
    return _table(["Idle with one echo model", "RSS MB", "PSS MB", "has loaded"], lines)


def _imports(report: Report) -> str:
    return _table(
        ["Import", "ms", "modules added", "of these"],
        (
            [
                f"`{one.statement}`",
                f"{median(one.took_s) * 1e3:.0f}",
                str(len(one.modules)),
                ", ".join(one.heavy) or "none of the heavy ones",
            ]
            for one in report.imports
        ),
    )


def _row_document(report: Report, row: Row) -> dict[str, object]:
    servers = {
        name: {
            column.name: [
                getattr(one, column.name) for one in report.samples.by_pair.get((row.name, name), ())
            ]
            for column in dataclasses.fields(Sample)
        }
        for name in report.titles
    }
    failed = [name for name in report.titles if (row.name, name) in report.samples.failures]
    return {"title": row.title, "unit": row.measure.value, "servers": servers, "failed": failed}


def _import_document(cost: ImportCost) -> dict[str, object]:
    return {
        "statement": cost.statement,
        "took_s": cost.took_s,
        "modules": len(cost.modules),
        "heavy": cost.heavy,
    }


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *lines])


def _rounded(value: object) -> object:
    """The same document with every float cut to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value
