"""The section of the sweeps: one load, varied along one axis, measured as the rows are, and drawn."""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import load
from benchmarks.figures import table
from benchmarks.load import GrpcLoad, HttpLoad
from benchmarks.payloads import EchoPayload
from benchmarks.report import Plan
from benchmarks.request_section import conditions, failures_of, measured, row_document
from benchmarks.rounds import Sample, Samples
from benchmarks.rows import Measure, Row
from benchmarks.servers.server import Kind

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


_IN_FLIGHT = tuple(1 << power for power in range(9))  # 1 to 256
_SIZES = (64, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_CONNECTIONS = 8  # at most; more in flight are more on each
_STYLES = {Kind.OURS: Style.OURS, Kind.PEER: Style.PEER, Kind.FLOOR: Style.FLOOR}


@dataclass(frozen=True, slots=True)
class Sweep:
    """One picture. ``rows`` by the value on the axis."""

    name: str
    title: str
    axis: str
    rows: Mapping[int, Row]

    @property
    def measure(self) -> Measure:
        """The figure of a row that is plotted."""
        return next(iter(self.rows.values())).measure

    def tick(self, at: int) -> str:
        """A value on the axis, as people write it."""
        return _size(at) if self.measure is Measure.BANDWIDTH else str(at)


def _in_flight_sweep(name: str, title: str, loads: Mapping[int, GrpcLoad | HttpLoad]) -> Sweep:
    rows = {
        at: Row(f"{name}-{at}", f"{title}, {at} in flight", one, Measure.THROUGHPUT)
        for at, one in loads.items()
    }
    return Sweep(name, title, "requests in flight", rows)


def _size_sweep(name: str, title: str, loads: Mapping[int, GrpcLoad | HttpLoad]) -> Sweep:
    rows = {
        nbytes: Row(f"{name}-{nbytes}", f"{title}, {nbytes} B", one, Measure.BANDWIDTH)
        for nbytes, one in loads.items()
    }
    return Sweep(name, title, "size of the tensor", rows)


def _grpc(in_flight: int) -> GrpcLoad:
    connections = min(in_flight, _CONNECTIONS)
    return GrpcLoad(EchoPayload(64), connections, in_flight // connections, latency=True)


SWEEPS = (
    _in_flight_sweep("in-flight-grpc", "gRPC, 64 B", {at: _grpc(at) for at in _IN_FLIGHT}),
    _in_flight_sweep(
        "in-flight-http", "HTTP, 64 B", {at: HttpLoad(EchoPayload(64), connections=at) for at in _IN_FLIGHT}
    ),
    _size_sweep(
        "size-grpc",
        "gRPC, one in flight",
        {nbytes: GrpcLoad(EchoPayload(nbytes), 1, 1, latency=True) for nbytes in _SIZES},
    ),
    _size_sweep(
        "size-http",
        "HTTP, one in flight",
        {nbytes: HttpLoad(EchoPayload(nbytes), connections=1) for nbytes in _SIZES},
    ),
)


class Sweeps:
    """All sweeps; ``--plots`` chooses them."""

    names = tuple(sweep.name for sweep in SWEEPS)
    is_default = False

    def missing(self, name: str) -> str | None:
        if importlib.util.find_spec("matplotlib") is None:
            return "matplotlib is not installed (pip install 'gpuserve[bench]')"
        return next((load.missing(row.load) for row in _rows(name)), None)

    def measure(self, plan: Plan) -> SweepPart | None:
        chosen = [sweep for sweep in SWEEPS if sweep.name in plan.names]
        if not chosen or not plan.servers:
            return None
        titles, samples = measured([row for sweep in chosen for row in sweep.rows.values()], plan)
        kinds = {one.name: one.kind for one in plan.servers}
        return SweepPart(chosen, titles, kinds, samples)


def _rows(name: str) -> Iterator[Row]:
    return (row for sweep in SWEEPS if sweep.name == name for row in sweep.rows.values())


@dataclass(frozen=True, slots=True)
class SweepPart:
    """The sweeps as they were measured. A subject that is no server has no kind; it is a floor."""

    sweeps: Sequence[Sweep]
    titles: Mapping[str, str]
    kinds: Mapping[str, Kind]
    samples: Samples
    key = "sweeps"

    @property
    def failures(self) -> dict[str, str]:
        return failures_of(self.samples)

    def markdown(self) -> str:
        """A table a sweep: throughput and median latency at each point."""
        blocks = [f"{sweep.title}\n\n{self._table(sweep)}" for sweep in self.sweeps]
        return "\n\n".join([*blocks, conditions(self.samples)])

    def document(self) -> dict[str, object]:
        return {
            sweep.name: {
                "title": sweep.title,
                "axis": sweep.axis,
                "points": {
                    str(at): row_document(row, self.titles, self.samples) for at, row in sweep.rows.items()
                },
            }
            for sweep in self.sweeps
        }

    def write_plots(self, folder: Path) -> list[Path]:
        return [path for sweep in self.sweeps for path in write(self.plot(sweep), folder)]

    def plot(self, sweep: Sweep) -> Plot:
        """What is drawn of a sweep: servers without a point are left out."""
        curves = [self._curve(sweep, name) for name in self.titles]
        shown = [one for one in curves if one.at]
        ticks = {at: sweep.tick(at) for at in sweep.rows}
        return Plot(sweep.name, sweep.title, sweep.axis, ticks, sweep.measure.value, shown)

    def _curve(self, sweep: Sweep, server: str) -> Curve:
        points = [(at, samples) for at, row in sweep.rows.items() if (samples := self._samples(row, server))]
        return Curve(
            self.titles[server],
            _STYLES[self.kinds.get(server, Kind.FLOOR)],
            list(self.titles).index(server),
            tuple(at for at, _ in points),
            tuple(median(one.value for one in samples) for _, samples in points),
            tuple(_median_ms([one.median_latency_s for one in samples]) for _, samples in points),
            tuple(_median_ms([one.p99_latency_s for one in samples]) for _, samples in points),
        )

    def _samples(self, row: Row, server: str) -> Sequence[Sample]:
        return self.samples.by_pair.get((row.name, server), ())

    def _table(self, sweep: Sweep) -> str:
        curves = self.plot(sweep).curves
        return table(
            [f"{sweep.axis}: {sweep.measure.value} (median ms)", *(curve.title for curve in curves)],
            ([sweep.tick(at), *(_point(curve, at) for curve in curves)] for at in sweep.rows),
        )


def _size(nbytes: int) -> str:
    power = min((nbytes.bit_length() - 1) // 10, 2)
    return f"{nbytes >> 10 * power} {('B', 'KiB', 'MiB')[power]}"


def _median_ms(seconds: Sequence[float | None]) -> float:
    return median(one for one in seconds if one is not None) * 1e3


def _point(curve: Curve, at: int) -> str:
    if at not in curve.at:
        return "-"
    index = curve.at.index(at)
    return f"{curve.throughput[index]:,.4g} ({curve.median_ms[index]:.3g})"
