"""Curves to pictures, as PNG and as SVG. Nothing is measured here; matplotlib is loaded when one is drawn."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SUFFIXES = (".png", ".svg")
#: Below one another: side by side they are too small to be read on a page.
_PANEL_INCHES = (7.0, 2.9)


class Style(enum.Enum):
    """How a curve is told from the others: line width, dashes, marker."""

    OURS = (2.6, "-", "o")
    PEER = (1.3, "-", "s")
    FLOOR = (1.1, ":", None)


@dataclass(frozen=True, slots=True)
class Curve:
    """One server, of the same colour in every picture. Every tuple has a value for each of ``at``."""

    title: str
    style: Style
    colour: int
    at: tuple[int, ...]
    throughput: tuple[float, ...]
    median_ms: tuple[float, ...]
    p99_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture: throughput, median and 99th percentile of the latency, against the same axis."""

    name: str
    title: str
    axis: str
    ticks: Mapping[int, str]  #: values on the axis, as they are written there
    unit: str  #: of the throughput
    curves: Sequence[Curve]


def write(plot: Plot, folder: Path) -> list[Path]:
    """Draw it; returns the files. A plot without curves has none."""
    if not plot.curves:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    figure = _figure(plot)
    paths = [folder / f"{plot.name}{suffix}" for suffix in _SUFFIXES]
    for path in paths:
        # Without a date the same figures make the same file.
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _figure(plot: Plot) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = plot.name
    panels = {
        f"throughput, {plot.unit}": [curve.throughput for curve in plot.curves],
        "median latency, ms": [curve.median_ms for curve in plot.curves],
        "99th percentile of the latency, ms": [curve.p99_ms for curve in plot.curves],
    }
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width, height * len(panels) + 0.5), layout="constrained")
    figure.suptitle(plot.title)
    all_axes = figure.subplots(len(panels), 1)
    for axes, (label, values) in zip(all_axes, panels.items(), strict=True):
        _draw(axes, plot, label, values)
    handles, titles = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _tenths(values: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Give what of each power of ten has a line of its own: more of them where there are few powers."""
    every = [one for ys in values for one in ys if one > 0]
    return (1.0, 2.0, 5.0) if max(every) < 300 * min(every) else (1.0,)


def _draw(axes: Any, plot: Plot, label: str, values: Sequence[tuple[float, ...]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    for curve, ys in zip(plot.curves, values, strict=True):
        width, dashes, marker = curve.style.value
        axes.plot(
            curve.at,
            ys,
            label=curve.title,
            color=f"C{curve.colour}",
            linewidth=width,
            linestyle=dashes,
            marker=marker,
            markersize=3.5,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(plot.ticks), list(plot.ticks.values()))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=_tenths(values)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.minorticks_off()
    axes.set_xlabel(plot.axis)
    axes.set_ylabel(label)
    axes.grid(visible=True, which="major", alpha=0.3)
