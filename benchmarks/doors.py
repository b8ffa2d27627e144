"""``scripts/bench --doors 1,2,4``: this server with so many doors, side by side. Each row is loaded by
several generators at once, since one of them fills no more than a core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias

from benchmarks import load
from benchmarks.figures import table
from benchmarks.load import GrpcLoad, JsonLoad, Load, LoadResult
from benchmarks.payloads import EchoFractionsPayload, EchoPayload
from benchmarks.peers import PeerCache
from benchmarks.report import Plan
from benchmarks.request_section import conditions, cpu_cell, failures_of, measured, row_document
from benchmarks.rounds import Ratio, Sample, Samples
from benchmarks.rows import Measure, Row
from benchmarks.servers import GpuServe
from benchmarks.servers.server import RunningServer, Server

_SMALL, _LARGE = EchoPayload(64), EchoPayload(1 << 20)


class GpuServeDoors(GpuServe):
    """This server with a number of doors."""

    roles = (
        *(("gpuserve_worker", "worker"), ("gpuserve.front.ingress", "door")),
        *(("gpuserve.front", "scheduler"), ("gpuserve serve", "supervisor")),
    )

    def __init__(self, cache: PeerCache, doors: int) -> None:
        super().__init__(cache)
        self._doors = doors
        self.name = f"doors-{doors}"

    def prepare(self) -> None:
        super().prepare()
        self.title = f"doors: {self._doors}"

    def _option_flags(self) -> list[str]:
        return [*super()._option_flags(), "--doors", str(self._doors)]


@dataclass(frozen=True, slots=True)
class Together:
    """A load by several generators at once: their answers together, and the median of their latencies."""

    each: Load
    generators: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.each, name)  # its program, API, payload and option are those of each

    def run(self, one: RunningServer, seconds: float, answer: bytes) -> LoadResult:
        with ThreadPoolExecutor(self.generators) as threads:
            under_way = [threads.submit(self.each.run, one, seconds, answer) for _ in range(self.generators)]
            results = [future.result() for future in under_way]
        latencies_s = [one.median_latency_s for one in results if one.median_latency_s is not None]
        tails_s = [one.p99_latency_s for one in results if one.p99_latency_s is not None]
        return LoadResult(
            sum(one.answers for one in results),
            sum(one.answers_per_s for one in results),
            median(latencies_s) if latencies_s else None,
            max(tails_s, default=None),
        )


def rows(generators: int) -> tuple[Row, ...]:
    """The rows, by so many generators but where one request is in flight."""

    def row(name: str, title: str, each: Load) -> Row:
        by = f", {generators} generators" if generators > 1 else ""
        return Row(name, f"{title}{by}", Together(each, generators), Measure.THROUGHPUT)

    alone = GrpcLoad(_SMALL, connections=1, streams=1, latency=True)
    return (
        Row("doors-64-1", "gRPC 64 B, one in flight, median", alone, Measure.LATENCY),
        row("doors-64", "gRPC 64 B, 128 in flight on 8 connections", GrpcLoad(_SMALL, 8, 16)),
        row("doors-1m", "gRPC 1 MiB, 8 in flight on 8 connections", GrpcLoad(_LARGE, 8, 1)),
        row(
            "doors-json", "HTTP JSON, 1,000 floats, 16 connections", JsonLoad(EchoFractionsPayload(4000), 16)
        ),
    )


NAMES: Final = tuple(one.name for one in rows(1))


def servers(cache: PeerCache, counts: Sequence[int]) -> list[Server]:
    return [GpuServeDoors(cache, n) for n in counts]


def measure(plan: Plan, generators: int) -> DoorsPart:
    """Measure the chosen rows, interleaved."""
    chosen = [one for one in rows(generators) if one.name in plan.names and not load.missing(one.load)]
    titles, samples = measured(chosen, plan)
    return DoorsPart(chosen, titles, samples)


_Cell: TypeAlias = Callable[[Row, Sequence[Sample]], str]


def _value(row: Row, samples: Sequence[Sample]) -> str:
    value = median(one.value for one in samples)
    return f"{value:.3f}" if row.measure is Measure.LATENCY else f"{value:,.0f}"


@dataclass(frozen=True, slots=True)
class DoorsPart:
    """What was measured; the first server is what the others are held against."""

    rows: Sequence[Row]
    titles: Mapping[str, str]
    samples: Samples
    key = "doors"

    @property
    def failures(self) -> dict[str, str]:
        return failures_of(self.samples)

    def markdown(self) -> str:
        """What each comes to, how that grows with the doors, and the CPU time of each process."""
        header = ["", *self.titles.values()]
        blocks = [
            table(
                header,
                ([f"{row.title} ({row.measure.value})", *self._cells(row, _value)] for row in self.rows),
            ),
            table(
                [f"ratio to {next(iter(self.titles.values()))}, median (range)", *self.titles.values()],
                ([row.title, *self._ratios(row)] for row in self.rows),
            ),
            table(
                ["CPU µs an answer, all processes (each)", *self.titles.values()],
                ([row.title, *self._cells(row, lambda _, found: cpu_cell(found))] for row in self.rows),
            ),
            conditions(self.samples),
        ]
        return "\n\n".join(blocks)

    def document(self) -> dict[str, object]:
        return {row.name: row_document(row, self.titles, self.samples) for row in self.rows}

    def write_plots(self, folder: Path) -> list[Path]:
        del folder
        return []

    def _of(self, row: Row, server: str) -> Sequence[Sample]:
        return self.samples.by_pair.get((row.name, server), ())

    def _cells(self, row: Row, cell: _Cell) -> list[str]:
        return [cell(row, found) if (found := self._of(row, name)) else "-" for name in self.titles]

    def _ratios(self, row: Row) -> list[str]:
        first = [one.value for one in self._of(row, next(iter(self.titles)))]
        found = [[one.value for one in self._of(row, name)] for name in self.titles]
        return [str(Ratio.of(one, first)) if first and len(one) == len(first) else "-" for one in found]
