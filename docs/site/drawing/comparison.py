"""The chart of the README: throughput and latency beside other servers, from recorded results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from drawing.svg import Box, Point, picture, rectangle, words

_RESULTS: Final = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
_NAMES: Final = {
    "gpuserve": "gpuserve", "triton": "Triton, Python backend", "pytriton": "PyTriton", "mosec": "mosec",
    "mlserver": "MLServer", "litserve": "LitServe",
}  # fmt: skip
_WIDTH: Final = 720
_LABELS: Final = 190
_BAR: Final = 380
_STEP: Final = 24


class _Panel(NamedTuple):
    """One row of a recorded run. ``factor`` converts the recorded value to the shown unit."""

    title: str
    results: str
    row: str
    unit: str
    factor: float = 1.0


_PANELS: Final = (
    _Panel("gRPC, 64 B, 128 requests in flight", "2-cores-two-free.json", "grpc-64-8x16", "requests/s"),
    _Panel("gRPC, 64 B, one in flight: median latency", "2-cores-two-free.json", "grpc-64-1", "ms"),
    _Panel("HTTP, 64 B, 64 connections", "2-cores-two-free.json", "http-64-64", "requests/s"),
)


def drawn_comparison() -> str:
    """Return the chart of all panels."""
    parts, height = [], 18
    for panel in _PANELS:
        values = _values(panel)
        parts += _drawn(panel, values, height)
        height += _STEP * (len(values) + 1) + 16
    return picture(_WIDTH, height, "Throughput and latency of gpuserve beside other servers", parts)


def _values(panel: _Panel) -> dict[str, float]:
    """Return the median of each server that ran the row."""
    recorded = json.loads((_RESULTS / panel.results).read_text())["rows"][panel.row]["servers"]
    runs = {name: recorded[name]["value"] for name in _NAMES if name in recorded}
    return {name: statistics.median(values) * panel.factor for name, values in runs.items() if values}


def _drawn(panel: _Panel, values: dict[str, float], top: float) -> Iterator[str]:
    yield words(Point(16, top + 6), panel.title, "title", "start")
    most = max(values.values())
    for row, (name, value) in enumerate(values.items(), 1):
        y = top + 6 + _STEP * row
        width = max(2.0, _BAR * value / most)
        yield words(Point(_LABELS - 10, y), _NAMES[name], "", "end")
        bar = Box(Point(_LABELS + width / 2, y), width, 15)
        yield rectangle(bar, "strong" if name == "gpuserve" else "box", 3)
        shown = f"{value:,.0f}" if value >= 10 else f"{value:.3g}"
        yield words(Point(_LABELS + width + 8, y), f"{shown} {panel.unit}", "small", "start")
