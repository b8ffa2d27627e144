"""What a server takes when it does nothing: time to ready, memory of each process, and our own imports."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import processes
from benchmarks.figures import table
from benchmarks.payloads import EchoPayload
from benchmarks.processes import Memory, Process
from benchmarks.report import Part, Plan, Section
from benchmarks.rounds import OURS
from benchmarks.servers.server import ECHO, Api, Kind, RunningServer, Server, ServerFailed, running

_SETTLE_S = 1.0
_SMALL = EchoPayload(64)

#: What our processes may load only where it is needed, and how it shows among the mapped files.
_HEAVY = {"grpc": "cygrpc", "zmq": "_zmq", "asyncio": "_asyncio", "uvloop": "loop."}

_IMPORT_PROBE = """
import json, sys, time
before = set(sys.modules)
began = time.perf_counter()
{statement}
took_s = time.perf_counter() - began
print(json.dumps([took_s, sorted(set(sys.modules) - before)]))
"""
_HEAVY_MODULES = ("grpc", "zmq", "asyncio", "numpy", "google")


@dataclass(frozen=True, slots=True)
class ProcessFootprint:
    """One process of an idle server. ``loaded`` names the heavy libraries that it has mapped."""

    role: str
    memory: Memory
    loaded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server: time to ready, and its processes when it idles."""

    ready_s: float
    processes: tuple[ProcessFootprint, ...]


@dataclass(frozen=True, slots=True)
class ImportCost:
    """One statement, each time in a fresh interpreter. ``modules`` are those that it added."""

    statement: str
    took_s: tuple[float, ...]
    modules: tuple[str, ...]

    @property
    def heavy(self) -> tuple[str, ...]:
        return tuple(name for name in _HEAVY_MODULES if name in self.modules)


def measure_starts(
    servers: Sequence[Server], rounds: int, logs: Path
) -> tuple[dict[str, list[Start]], dict[str, str]]:
    """Start each server alone with the echo model, once a round; look when it has answered once and settled.

    Returns:
        The starts by name, and the reasons why others did not come up or did not answer right.
    """
    starts: dict[str, list[Start]] = {}
    failures: dict[str, str] = {}
    for server in list(servers) * rounds:
        if server.name in failures:
            continue
        try:
            starts.setdefault(server.name, []).append(_start(server, logs))
        except ServerFailed as error:
            failures[server.name] = str(error)
    return {name: runs for name, runs in starts.items() if name not in failures}, failures


def _start(server: Server, logs: Path) -> Start:
    with running(server, logs, (ECHO,)) as one:
        _SMALL.check(one, next(api for api in Api if api in server.apis))
        return start_of(one)


def start_of(one: RunningServer) -> Start:
    """What a server that is up took to come up, and its processes when it has settled."""
    time.sleep(_SETTLE_S)
    return Start(one.ready_s, _processes(one))


def measure_import(statement: str, rounds: int) -> ImportCost:
    """Time a statement in this interpreter, started anew each time; the first time is not counted."""
    runs = [_import(statement) for _ in range(rounds + 1)][1:]
    return ImportCost(statement, tuple(took_s for took_s, _ in runs), tuple(runs[-1][1]))


def _import(statement: str) -> tuple[float, list[str]]:
    probe = _IMPORT_PROBE.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    took_s, modules = json.loads(done.stdout)
    return float(took_s), list(modules)


def _processes(one: RunningServer) -> tuple[ProcessFootprint, ...]:
    return tuple(
        ProcessFootprint(one.server.role(process.command), process.memory, _loaded(process))
        for process in processes.tree(one.pid)
    )


def _loaded(process: Process) -> tuple[str, ...]:
    files = process.mapped_files()
    return tuple(name for name, mark in _HEAVY.items() if any(file.startswith(mark) for file in files))


_MB = 1e6
_STATEMENTS = ("import gpuserve", "from gpuserve import ModelConfig, Server, Tensor")


class Imports(Section):
    """``import gpuserve`` in fresh interpreters."""

    names = ("imports",)

    def measure(self, plan: Plan) -> ImportPart | None:
        if not plan.names & set(self.names) or all(one.name != OURS for one in plan.servers):
            return None
        return ImportPart([measure_import(statement, plan.rounds) for statement in _STATEMENTS])


class Starts(Section):
    """Each server by itself, from its start until it is ready, and its memory then. Floors have no model."""

    names = ("starts",)

    def measure(self, plan: Plan) -> StartPart | None:
        servers = [one for one in plan.servers if one.kind is not Kind.FLOOR]
        if not plan.names & set(self.names) or not servers:
            return None
        plan.say("starting each server by itself")
        starts, failures = measure_starts(servers, plan.rounds, plan.logs)
        failed = {f"starts, server {name}": text for name, text in failures.items()}
        return StartPart({one.name: one.title for one in servers}, starts, failed)


@dataclass(frozen=True, slots=True)
class StartPart(Part):
    """The times and memory of starts, by server name."""

    titles: Mapping[str, str]
    starts: Mapping[str, Sequence[Start]]
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    key = "starts"

    def markdown(self) -> str:
        lines = [
            line for name, starts in self.starts.items() for line in _start_lines(self.titles[name], starts)
        ]
        return table(["Idle with one echo model", "RSS MB", "PSS MB", "has loaded"], lines)

    def document(self) -> dict[str, object]:
        return {name: list(map(dataclasses.asdict, starts)) for name, starts in self.starts.items()}


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
class ImportPart(Part):
    """The time and memory of each import statement."""

    imports: Sequence[ImportCost]
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    key = "imports"

    def markdown(self) -> str:
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
        return [
            {
                "statement": one.statement,
                "took_s": one.took_s,
                "modules": len(one.modules),
                "heavy": one.heavy,
            }
            for one in self.imports
        ]
