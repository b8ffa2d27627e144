"""What a server takes when it does nothing: time to ready, memory of each process, and our own imports."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import processes
from benchmarks.payloads import EchoPayload
from benchmarks.processes import Memory, Process
from benchmarks.servers import ECHO, Api, RunningServer, Server, ServerFailed, running

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
        """The packages among them that cost most."""
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
