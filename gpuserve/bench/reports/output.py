"""A report as text: Markdown, CSV, JSON, or a page of HTML that fetches nothing; by a file's ending."""

from __future__ import annotations

import csv
import dataclasses
import html
import io
import os
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from gpuserve.bench.plan.errors import BenchOptionError, reason
from gpuserve.bench.reports.latencies import histogram_type
from gpuserve.bench.reports.plots import plots, require_matplotlib
from gpuserve.bench.reports.report import BenchReport, to_json
from gpuserve.bench.reports.results import LevelResult
from gpuserve.bench.reports.table import Table, notes, table

OPTION: Final = "--output"
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
Renderer: TypeAlias = Callable[[BenchReport, BenchReport | None], str]


def check_output(path: str) -> None:
    """Refuse a report's path early; BenchOptionError: ending or folder; MissingPackage: for the format."""
    ending = os.path.splitext(path)[1]
    if ending not in _RENDERERS:
        raise BenchOptionError(
            OPTION, f"expected a file that ends in {', '.join(_RENDERERS)}, given {path!r}"
        )
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise BenchOptionError(OPTION, f"there is no folder {os.path.dirname(path)!r}")
    histogram_type()
    if ending == ".html":
        require_matplotlib()


def write(path: str, report: BenchReport, baseline: BenchReport | None) -> None:
    """Write a report in the format that the file's ending names; BenchOptionError: it cannot be written."""
    text = _RENDERERS[os.path.splitext(path)[1]](report, baseline)
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise BenchOptionError(OPTION, f"{path} cannot be written: {reason(error)}") from None


def markdown(report: BenchReport, baseline: BenchReport | None) -> str:
    lines = [f"# {report.model}", "", _subtitle(report), "", *_markdown_table(table(report, baseline))]
    said = notes(report, baseline)
    if said:
        lines += ["", *(f"- {one}" for one in said)]
    return "\n".join(lines) + "\n"


def _markdown_table(made: Table) -> list[str]:
    rule = ["---", *["---:"] * (len(made.titles) - 1)]
    return [f"| {' | '.join(row)} |" for row in (made.titles, rule, *made.rows)]


def csv_text(report: BenchReport, _baseline: BenchReport | None) -> str:
    """A row for each level, with every figure by its full name."""
    rows = [_flat(one) for one in report.levels]
    titles = list(dict.fromkeys(title for row in rows for title in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, titles, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _flat(one: LevelResult) -> dict[str, Any]:
    found: dict[str, Any] = {one.level.kind.value: one.level.value}
    for name, value in dataclasses.asdict(one).items():
        if name in {"level", "histogram", "warnings", "failures"}:
            continue
        if isinstance(value, dict):
            found |= {f"{name}_{key}": figure for key, figure in value.items()}
        elif value is not None:
            found[name] = value
    return found | {"failed": one.failed}


def page(report: BenchReport, baseline: BenchReport | None) -> str:
    made = table(report, baseline)
    said = "".join(f"<li>{html.escape(one)}</li>" for one in notes(report, baseline))
    figures = "".join(
        f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>" for title, svg in plots(report)
    )
    title = html.escape(report.model)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>{html.escape(_subtitle(report))}</p>"
        f"<table>{_html_row('th', made.titles)}{''.join(_html_row('td', row) for row in made.rows)}</table>"
        f"<ul>{said}</ul>{figures}</html>\n"
    )


def _html_row(cell: str, texts: list[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{html.escape(text)}</{cell}>' for text in texts)}</tr>"


def _subtitle(report: BenchReport) -> str:
    options = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    return f"{report.url}, {report.began_at}, gpuserve {report.gpuserve}, {report.cores} cores; {options}"


_RENDERERS: Final[dict[str, Renderer]] = {
    ".md": markdown,
    ".csv": csv_text,
    ".json": lambda report, _baseline: to_json(report),
    ".html": page,
}
