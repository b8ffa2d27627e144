"""The section of the sweeps: one load, varied along one axis, for the plots. Measured as the rows are."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import load, plots
from benchmarks.load import GrpcLoad, HttpLoad
from benchmarks.payloads import EchoPayload
from benchmarks.plots import Curve, Plot, Style
from benchmarks.request_section import conditions, failures_of, measured, row_document
from benchmarks.rounds import Sample, Samples
from benchmarks.rows import Measure, Row
from benchmarks.sections import Plan
from benchmarks.servers import Kind
from benchmarks.tables import table

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
        """The library that draws, or the load generator."""
        if importlib.util.find_spec("matplotlib") is None:
            return "matplotlib is not installed (pip install 'gpuserve[bench]')"
        return next((load.missing(row.load) for row in _rows(name)), None)

    def measure(self, plan: Plan) -> SweepPart | None:
        """The chosen sweeps, interleaved."""
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
        """The failures by row and server."""
        return failures_of(self.samples)

    def markdown(self) -> str:
        """A table a sweep: throughput and median latency at each point."""
        blocks = [f"{sweep.title}\n\n{self._table(sweep)}" for sweep in self.sweeps]
        return "\n\n".join([*blocks, conditions(self.samples)])

    def document(self) -> dict[str, object]:
        """Every sample of every point, for JSON."""
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
        """A PNG and an SVG of each sweep."""
        return [path for sweep in self.sweeps for path in plots.write(self.plot(sweep), folder)]

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
