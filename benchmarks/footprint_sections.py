"""The sections of what a server takes when it does nothing: starts and memory, and imports."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.comparison import OURS
from benchmarks.footprint import ImportCost, Start, measure_import, measure_starts
from benchmarks.sections import Plan
from benchmarks.servers import Kind
from benchmarks.tables import table

_MB = 1e6
_STATEMENTS = ("import gpuserve", "from gpuserve import ModelConfig, Server, Tensor")


class Imports:
    """``import gpuserve`` in fresh interpreters."""

    names = ("imports",)
    is_default = True

    def missing(self, name: str) -> str | None:
        del name
        return None

    def measure(self, plan: Plan) -> ImportPart | None:
        """Only where this server is among those of the plan."""
        if not plan.names & set(self.names) or all(one.name != OURS for one in plan.servers):
            return None
        return ImportPart([measure_import(statement, plan.rounds) for statement in _STATEMENTS])


class Starts:
    """Each server by itself, from its start until it is ready, and its memory then. Floors have no model."""

    names = ("starts",)
    is_default = True

    def missing(self, name: str) -> str | None:
        del name
        return None

    def measure(self, plan: Plan) -> StartPart | None:
        """Start one server after the other."""
        servers = [one for one in plan.servers if one.kind is not Kind.FLOOR]
        if not plan.names & set(self.names) or not servers:
            return None
        plan.say("starting each server by itself")
        starts, failures = measure_starts(servers, plan.rounds, plan.logs)
        failed = {f"starts, server {name}": text for name, text in failures.items()}
        return StartPart({one.name: one.title for one in servers}, starts, failed)


@dataclass(frozen=True, slots=True)
class StartPart:
    """The times and memory of starts, by server name."""

    titles: Mapping[str, str]
    starts: Mapping[str, Sequence[Start]]
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    key = "starts"

    def markdown(self) -> str:
        """Each server, and under it its processes."""
        lines = [
            line for name, starts in self.starts.items() for line in _start_lines(self.titles[name], starts)
        ]
        return table(["Idle with one echo model", "RSS MB", "PSS MB", "has loaded"], lines)

    def document(self) -> dict[str, object]:
        """Every start, for JSON."""
        return {name: list(map(dataclasses.asdict, starts)) for name, starts in self.starts.items()}

    def write_plots(self, folder: Path) -> list[Path]:
        del folder
        return []


def _start_lines(title: str, starts: Sequence[Start]) -> list[list[str]]:
    ready_s = median(one.ready_s for one in starts)
    rss = median(sum(process.memory.rss_nbytes for process in one.processes) for one in starts)
    pss = median(sum(process.memory.pss_nbytes for process in one.processes) for one in starts)
    head = [f"**{title}**, ready after {ready_s:.2f} s", f"**{rss / _MB:.0f}**", f"**{pss / _MB:.0f}**", ""]
    return [
        head,
        *(
            [
                one.role,
                f"{one.memory.rss_nbytes / _MB:.0f}",
                f"{one.memory.pss_nbytes / _MB:.0f}",
                ", ".join(one.loaded),
            ]
            for one in starts[-1].processes
        ),
    ]


@dataclass(frozen=True, slots=True)
class ImportPart:
    """The time and memory of each import statement."""

    imports: Sequence[ImportCost]
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    key = "imports"

    def markdown(self) -> str:
        """A line for each statement, as Markdown."""
        lines = (
            [
                f"`{one.statement}`",
                f"{median(one.took_s) * 1e3:.0f}",
                str(len(one.modules)),
                ", ".join(one.heavy) or "none of the heavy ones",
            ]
            for one in self.imports
        )
        return table(["Import", "ms", "modules added", "of these"], lines)

    def document(self) -> list[dict[str, object]]:
        """Every time, for JSON."""
        return [
            {
                "statement": one.statement,
                "took_s": one.took_s,
                "modules": len(one.modules),
                "heavy": one.heavy,
            }
            for one in self.imports
        ]

    def write_plots(self, folder: Path) -> list[Path]:
        del folder
        return []
