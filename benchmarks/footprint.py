"""What a server takes when it does nothing: time to ready, memory of each process, and our own imports."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
_STATEMENTS = ("import gpuserve", "from gpuserve import ModelConfig, Server, Tensor")
_MB = 1e6
_HEAVY_MODULES = ("grpc", "zmq", "asyncio", "numpy", "google")


@dataclass(frozen=True, slots=True)
class ProcessFootprint:
    """One process of an idle server. ``loaded`` names the heavy libraries that it has mapped."""

    role: str
    memory: Memory
    loaded: tuple[str, ...]

    @classmethod
    def read(cls, process: Process, server: Server) -> ProcessFootprint:
        files = process.mapped_files()
        loaded = (name for name, mark in _HEAVY.items() if any(file.startswith(mark) for file in files))
        return cls(server.role(process.command), process.memory, tuple(loaded))


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server: time to ready, and its processes when it idles."""

    ready_s: float
    processes: tuple[ProcessFootprint, ...]


def start_of(one: RunningServer) -> Start:
    """Return what a server that is up took to come up, and its processes when it has settled."""
    time.sleep(_SETTLE_S)
    return Start(
        one.ready_s, tuple(ProcessFootprint.read(each, one.server) for each in processes.tree(one.pid))
    )


class Starts(Section):
    """Each server by itself, with the echo model, from its start until it is ready; and its memory when it
    has answered once and settled. Floors have no model.
    """

    names = ("starts",)

    def measure(self, plan: Plan) -> StartPart | None:
        servers = [one for one in plan.servers if one.kind is not Kind.FLOOR]
        if not plan.names & set(self.names) or not servers:
            return None
        plan.say("starting each server by itself")
        starts: dict[str, list[Start]] = {}
        failures: dict[str, str] = {}
        for server in servers * plan.rounds:
            if server.name in failures:
                continue
            try:
                with running(server, plan.logs, (ECHO,)) as one:
                    _SMALL.check(one, next(api for api in Api if api in server.apis))
                    starts.setdefault(server.name, []).append(start_of(one))
            except ServerFailed as error:
                failures[server.name] = str(error)
        whole = {name: runs for name, runs in starts.items() if name not in failures}
        failed = {f"starts, server {name}": text for name, text in failures.items()}
        return StartPart({one.name: one.title for one in servers}, whole, failed)


@dataclass(frozen=True, slots=True)
class StartPart(Part):
    titles: Mapping[str, str]
    starts: Mapping[str, Sequence[Start]]
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    key = "starts"

    def markdown(self) -> str:
        lines = [line for name, starts in self.starts.items() for line in _lines(self.titles[name], starts)]
        return table(["Idle with one echo model", "RSS MB", "PSS MB", "has loaded"], lines)

    def document(self) -> dict[str, object]:
        return {name: list(map(dataclasses.asdict, starts)) for name, starts in self.starts.items()}


def _lines(title: str, starts: Sequence[Start]) -> list[list[str]]:
    ready_s = median(one.ready_s for one in starts)
    rss = median(sum(process.memory.rss_nbytes for process in one.processes) for one in starts)
    pss = median(sum(process.memory.pss_nbytes for process in one.processes) for one in starts)
    head = [f"**{title}**, ready after {ready_s:.2f} s", f"**{rss / _MB:.0f}**", f"**{pss / _MB:.0f}**", ""]
    lines = [head]
    for one in starts[-1].processes:
        memory = one.memory.rss_nbytes, one.memory.pss_nbytes
        lines.append([one.role, *(f"{nbytes / _MB:.0f}" for nbytes in memory), ", ".join(one.loaded)])
    return lines


@dataclass(frozen=True, slots=True)
class ImportCost:
    """One statement, each time in a fresh interpreter. ``modules`` are those that it added."""

    statement: str
    took_s: tuple[float, ...]
    modules: tuple[str, ...]

    @classmethod
    def measured(cls, statement: str, rounds: int) -> ImportCost:
        """Time a statement in this interpreter, started anew each time; the first time is not counted."""
        command = [sys.executable, "-c", _IMPORT_PROBE.format(statement=statement)]
        runs = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(rounds + 1)
        ][1:]
        return cls(statement, tuple(took_s for took_s, _ in runs), tuple(runs[-1][1]))

    @property
    def heavy(self) -> tuple[str, ...]:
        return tuple(name for name in _HEAVY_MODULES if name in self.modules)


class Imports(Section):
    """``import gpuserve`` in fresh interpreters."""

    names = ("imports",)

    def measure(self, plan: Plan) -> ImportPart | None:
        if not plan.names & set(self.names) or all(one.name != OURS for one in plan.servers):
            return None
        return ImportPart([ImportCost.measured(statement, plan.rounds) for statement in _STATEMENTS])


@dataclass(frozen=True, slots=True)
class ImportPart(Part):
    imports: Sequence[ImportCost]
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    key = "imports"

    def markdown(self) -> str:
        lines = []
        for one in self.imports:
            heavy = ", ".join(one.heavy) or "none of the heavy ones"
            lines.append(
                [f"`{one.statement}`", f"{median(one.took_s) * 1e3:.0f}", str(len(one.modules)), heavy]
            )
        return table(["Import", "ms", "modules added", "of these"], lines)

    def document(self) -> list[dict[str, object]]:
        return [
            {**dataclasses.asdict(one), "modules": len(one.modules), "heavy": one.heavy}
            for one in self.imports
        ]
