"""What a scenario is, and where it runs: a server of one kind with the models that the scenario asks for."""

from __future__ import annotations

import http.client
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from benchmarks import processes
from benchmarks.peers import PeerCache
from benchmarks.scenarios.deployment import DeployedGpuServe, DeployedTriton, SleepingModel
from benchmarks.scenarios.figures import Figure
from benchmarks.servers import RunningServer, ServerFailed, running

#: The seed of the first round; the next one counts on from it.
FIRST_SEED = 20
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """The duration and the number of rounds of a scenario."""

    rounds: int
    seconds: float
    requests: int  #: of the scenario that counts them


@dataclass(frozen=True, slots=True)
class Site:
    """Where a scenario runs: one kind of server, installed."""

    kind: type[DeployedGpuServe | DeployedTriton]
    cache: PeerCache
    effort: Effort
    say: Say

    @contextmanager
    def serving(self, models: Sequence[SleepingModel], label: str = "scenario") -> Iterator[RunningServer]:
        """A server with these models, while the context lasts. ``label`` names its log.

        Raises:
            ServerFailed: it did not come up.
        """
        logs = self.cache.folder / "logs" / label
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            server = self.kind(self.cache, models, Path(folder))
            server.prepare()
            with running(server, logs, [one.name for one in models]) as one:
                yield one


class Scenario(Protocol):
    """One scenario. ``goal`` is its goal in words; ``servers`` are those that it is run on."""

    name: ClassVar[str]
    title: ClassVar[str]
    goal: ClassVar[str]
    program: ClassVar[str | None]  #: needed on PATH
    servers: ClassVar[dict[str, str | None]]  #: by name; the reason where it is not run on that one

    def run(self, site: Site) -> list[Figure]:
        """All of its cases.

        Raises:
            ServerFailed: the server did not come up or did not answer right.
            LoadFailed: requests failed under load.
        """


class Executions(NamedTuple):
    """What a server has counted of one model so far."""

    batches: int
    rows: int
    compute_s: float

    @classmethod
    def read(cls, one: RunningServer, model: str) -> Executions:
        """Ask the server.

        Raises:
            ServerFailed: it has no statistics of the model.
        """
        connection = http.client.HTTPConnection("127.0.0.1", one.ports.http, timeout=30)
        try:
            connection.request("GET", f"/v2/models/{model}/stats")
            body = connection.getresponse().read()
        finally:
            connection.close()
        try:
            stats = json.loads(body)["model_stats"][0]
            batches = stats["batch_stats"]
            compute_ns = sum(int(batch["compute_infer"]["ns"]) for batch in batches)
            return cls(int(stats["execution_count"]), int(stats["inference_count"]), compute_ns / 1e9)
        except (KeyError, IndexError, ValueError):
            text = body.decode(errors="replace")
            raise ServerFailed(f"{one.server.title} has no statistics of {model}: {text}") from None

    def since(self, before: Executions) -> Executions:
        """The difference to an earlier reading."""
        return Executions(
            self.batches - before.batches, self.rows - before.rows, self.compute_s - before.compute_s
        )


class Usage(NamedTuple):
    """CPU seconds: of the server's processes, and of the whole machine."""

    server_s: float
    machine_s: float

    @classmethod
    def read(cls, one: RunningServer) -> Usage:
        """Read the counters now."""
        return cls(sum(processes.cpu_by_pid(one.pid).values()), processes.machine_busy_s())

    def share_of_others(self, before: Usage, known_s: float, took_s: float) -> float:
        """The part of the machine that neither the server nor the load (``known_s``) used since."""
        others_s = self.machine_s - before.machine_s - (self.server_s - before.server_s) - known_s
        return max(0.0, others_s / took_s / (os.cpu_count() or 1))


def rss_nbytes(one: RunningServer) -> int:
    """Resident memory of all processes of a server together."""
    return sum(process.memory.rss_nbytes for process in processes.tree(one.pid))


def pss_nbytes(one: RunningServer) -> int:
    """The same, a shared page counted once."""
    return sum(process.memory.pss_nbytes for process in processes.tree(one.pid))
