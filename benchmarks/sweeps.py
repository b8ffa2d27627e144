"""The section of the sweeps: one load, varied along one axis, measured as the rows are, and drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import load
from benchmarks.figures import table
from benchmarks.load import GrpcLoad, HttpLoad
from benchmarks.payloads import EchoPayload
from benchmarks.report import Part, Plan, Section
from benchmarks.request_section import conditions, failures_of, measured, row_document
from benchmarks.rounds import Samples
from benchmarks.rows import Measure, Row
from benchmarks.servers.server import Kind

#: Below one another: side by side they are too small to be read on a page.
_PANEL_INCHES = (7.0, 2.9)
#: Line width, dashes and marker of a curve.
_STYLES = {Kind.OURS: (2.6, "-", "o"), Kind.PEER: (1.3, "-", "s"), Kind.FLOOR: (1.1, ":", None)}
_IN_FLIGHT = tuple(1 << power for power in range(9))  # 1 to 256
_SIZES = (64, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_CONNECTIONS = 8  # at most; more in flight are more on each


@dataclass(frozen=True, slots=True)
class Sweep:
    """One picture: throughput, median and p99 of the latency. ``rows`` by the value on the axis."""

    name: str
    title: str
    axis: str
    rows: Mapping[int, Row]

    @property
    def measure(self) -> Measure:
        return next(iter(self.rows.values())).measure

    def tick(self, at: int) -> str:
        """Return a value on the axis, as people write it."""
        if self.measure is not Measure.BANDWIDTH:
            return str(at)
        power = min((at.bit_length() - 1) // 10, 2)
        return f"{at >> 10 * power} {('B', 'KiB', 'MiB')[power]}"


class Curve(NamedTuple):
    """One server, of the same colour in every picture. Every tuple has a value for each of ``at``."""

    title: str
    kind: Kind
    colour: int
    at: tuple[int, ...]
    throughput: tuple[float, ...]
    median_ms: tuple[float, ...]
    p99_ms: tuple[float, ...]


def _sweep(name: str, title: str, loads: Mapping[int, GrpcLoad | HttpLoad]) -> Sweep:
    is_size = name.startswith("size")
    measure, unit = (Measure.BANDWIDTH, "B") if is_size else (Measure.THROUGHPUT, "in flight")
    rows = {at: Row(f"{name}-{at}", f"{title}, {at} {unit}", one, measure) for at, one in loads.items()}
    return Sweep(name, title, "size of the tensor" if is_size else "requests in flight", rows)


def _grpc(in_flight: int) -> GrpcLoad:
    connections = min(in_flight, _CONNECTIONS)
    return GrpcLoad(EchoPayload(64), connections, in_flight // connections, latency=True)


SWEEPS = (
    _sweep("in-flight-grpc", "gRPC, 64 B", {at: _grpc(at) for at in _IN_FLIGHT}),
    _sweep("in-flight-http", "HTTP, 64 B", {at: HttpLoad(EchoPayload(64), at) for at in _IN_FLIGHT}),
    _sweep(
        "size-grpc", "gRPC, one in flight", {n: GrpcLoad(EchoPayload(n), 1, 1, latency=True) for n in _SIZES}
    ),
    _sweep("size-http", "HTTP, one in flight", {n: HttpLoad(EchoPayload(n), 1) for n in _SIZES}),
)


class Sweeps(Section):
    names = tuple(sweep.name for sweep in SWEEPS)
    is_default = False

    def missing(self, name: str) -> str | None:
        if importlib.util.find_spec("matplotlib") is None:
            return "matplotlib is not installed (pip install 'gpuserve[bench]')"
        rows = (row for sweep in SWEEPS if sweep.name == name for row in sweep.rows.values())
        return next((load.missing(row.load) for row in rows), None)

    def measure(self, plan: Plan) -> SweepPart | None:
        chosen = [sweep for sweep in SWEEPS if sweep.name in plan.names]
        if not chosen or not plan.servers:
            return None
        titles, samples = measured([row for sweep in chosen for row in sweep.rows.values()], plan)
        return SweepPart(chosen, titles, {one.name: one.kind for one in plan.servers}, samples)


@dataclass(frozen=True, slots=True)
class SweepPart(Part):
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
        """Return a table for each sweep: throughput and median latency at each point."""
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
        return [path for sweep in self.sweeps for path in draw(sweep, self.curves(sweep), folder)]

    def curves(self, sweep: Sweep) -> list[Curve]:
        return [one for name in self.titles if (one := self._curve(sweep, name)).at]

    def _curve(self, sweep: Sweep, server: str) -> Curve:
        found = {at: self.samples.by_pair.get((row.name, server), ()) for at, row in sweep.rows.items()}
        points = {at: samples for at, samples in found.items() if samples}
        return Curve(
            self.titles[server],
            self.kinds.get(server, Kind.FLOOR),
            list(self.titles).index(server),
            tuple(points),
            tuple(median(one.value for one in samples) for samples in points.values()),
            tuple(_median_ms(one.median_latency_s for one in samples) for samples in points.values()),
            tuple(_median_ms(one.p99_latency_s for one in samples) for samples in points.values()),
        )

    def _table(self, sweep: Sweep) -> str:
        curves = self.curves(sweep)
        return table(
            [f"{sweep.axis}: {sweep.measure.value} (median ms)", *(curve.title for curve in curves)],
            ([sweep.tick(at), *(_point(curve, at) for curve in curves)] for at in sweep.rows),
        )


def _median_ms(seconds: Iterable[float | None]) -> float:
    return median(one for one in seconds if one is not None) * 1e3


def _point(curve: Curve, at: int) -> str:
    if at not in curve.at:
        return "-"
    index = curve.at.index(at)
    return f"{curve.throughput[index]:,.4g} ({curve.median_ms[index]:.3g})"


def draw(sweep: Sweep, curves: Sequence[Curve], folder: Path) -> list[Path]:
    """Draw a sweep as PNG and SVG; return the files. A sweep without curves has none."""
    if not curves:
        return []
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = sweep.name
    panels = {
        f"throughput, {sweep.measure.value}": [curve.throughput for curve in curves],
        "median latency, ms": [curve.median_ms for curve in curves],
        "99th percentile of the latency, ms": [curve.p99_ms for curve in curves],
    }
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width, height * len(panels) + 0.5), layout="constrained")
    figure.suptitle(sweep.title)
    all_axes = figure.subplots(len(panels), 1)
    for axes, (label, values) in zip(all_axes, panels.items(), strict=True):
        _draw_panel(axes, sweep, curves, values)
        axes.set_ylabel(label)
    figure.legend(
        *all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{sweep.name}{suffix}" for suffix in (".png", ".svg")]
    for path in paths:
        # Without a date the same figures make the same file.
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _draw_panel(
    axes: Any, sweep: Sweep, curves: Sequence[Curve], values: Sequence[tuple[float, ...]]
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    for curve, ys in zip(curves, values, strict=True):
        width, dashes, marker = _STYLES[curve.kind]
        style = {"linewidth": width, "linestyle": dashes, "marker": marker, "markersize": 3.5}
        axes.plot(curve.at, ys, label=curve.title, color=f"C{curve.colour}", **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sweep.rows), list(map(sweep.tick, sweep.rows)))
    axes.set_yscale("log")
    every = [one for ys in values for one in ys if one > 0]
    # More lines of each power of ten where there are few powers.
    tenths = (1.0, 2.0, 5.0) if max(every) < 300 * min(every) else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=tenths))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.minorticks_off()
    axes.set_xlabel(sweep.axis)
    axes.grid(visible=True, which="major", alpha=0.3)
