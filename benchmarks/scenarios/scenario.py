"""A scenario, the models that it asks for, the server of one kind that has them, and what is read of it."""

from __future__ import annotations

import http.client
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from benchmarks import processes
from benchmarks.figures import Figure, Goal
from benchmarks.load import GrpcLoad
from benchmarks.payloads import RawPayload, Tensor
from benchmarks.peers import PeerCache
from benchmarks.rounds import Clocks
from benchmarks.servers import ConfiguredGpuServe, PlainTriton
from benchmarks.servers.server import MODELS_FOLDER, Ports, RunningServer, ServerFailed, running

#: The seed of the first round; the next one counts on from it.
FIRST_SEED = 20
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SleepingModel:
    """y = x, FP32 [-1, n], after ``batch_s`` a batch; 0 for one that only echoes."""

    name: str
    batch_s: float
    instances: int = 1
    max_batch_size: int = 32
    fairness_header: str = ""  #: of models that are fair to their clients; this server only
    ragged: bool = False  #: whether requests of any length share a batch

    @property
    def entry(self) -> dict[str, Any]:
        kwargs = {"seconds": self.batch_s, "ragged": self.ragged}
        sleeping = {"callable": f"{MODELS_FOLDER}/sleeping.py:sleeping", "kwargs": kwargs}
        queue = {"queue": {"fairness": "client", "fairness_header": self.fairness_header}}
        return {
            "name": self.name,
            **(sleeping if self.batch_s else {"callable": f"{MODELS_FOLDER}/model.py:echo"}),
            "instances": [{"device": "cpu", "count": self.instances}],
            "inputs": [{"name": "x", "dtype": "float32", "shape": [-1], "ragged": self.ragged}],
            "outputs": [{"name": "y", "dtype": "float32", "shape": [-1], "ragged": self.ragged}],
            "max_batch_size": self.max_batch_size,
            **(queue if self.fairness_header else {}),
        }

    @property
    def triton_config(self) -> str:
        return f"""backend: "python"
max_batch_size: {self.max_batch_size}
input [{{ name: "x", data_type: TYPE_FP32, dims: [-1], allow_ragged_batch: {str(self.ragged).lower()} }}]
output [{{ name: "y", data_type: TYPE_FP32, dims: [-1] }}]
instance_group [{{ count: {self.instances}, kind: KIND_CPU }}]
dynamic_batching {{}}
parameters {{ key: "seconds", value: {{ string_value: "{self.batch_s}" }} }}
"""


class DeployedGpuServe(ConfiguredGpuServe):
    def __init__(self, cache: PeerCache, models: Sequence[SleepingModel], folder: Path) -> None:
        super().__init__(cache, folder, [one.entry for one in models])


class DeployedTriton(PlainTriton):
    """Plain Triton with the models of a scenario."""

    def __init__(self, cache: PeerCache, models: Sequence[SleepingModel], folder: Path) -> None:
        super().__init__(cache)
        self._deployed = tuple(models)
        self._repository = folder / "repository"

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        """As ``PlainTriton``; the repository of models is made in the folder first."""
        write_repository(self._repository, self._deployed)
        mine = f"--model-repository={self._repository}"
        command = super().command(ports, models)
        return [mine if word.startswith("--model-repository=") else word for word in command]


def write_repository(folder: Path, models: Sequence[SleepingModel]) -> None:
    """Write a repository of Triton with these models."""
    for one in models:
        version = folder / one.name / "1"
        version.mkdir(parents=True, exist_ok=True)
        shutil.copy(MODELS_FOLDER / "triton_sleeping.py", version / "model.py")
        (version.parent / "config.pbtxt").write_text(one.triton_config)


#: Servers that scenarios can be run on, by the names that --servers takes.
DEPLOYABLE: dict[str, type[DeployedGpuServe | DeployedTriton]] = {
    one.name: one for one in (DeployedGpuServe, DeployedTriton)
}


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
        """Run a server with these models; ``label`` names its log. Raises ServerFailed."""
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            server = self.kind(self.cache, models, Path(folder))
            server.prepare()
            names = [one.name for one in models]
            with running(server, self.cache.folder / "logs" / label, names) as one:
                yield one


class Scenario:
    """One scenario. ``goal`` is its goal in words; ``program`` is needed on PATH. ``servers`` are those that
    the scenario is run on, with the reason where it is not run on that one.
    """

    name: str
    title: str
    goal: str
    program: str | None = None
    servers: ClassVar[Mapping[str, str | None]] = {"gpuserve": None, "triton": None}

    def run(self, site: Site) -> list[Figure]:
        """Measure all cases. Raises ServerFailed or LoadFailed if a server or a request does."""
        raise NotImplementedError


def row(model: str) -> RawPayload:
    """Return a payload of one row of 16 FP32 for a model that echoes it."""
    return RawPayload(model, (Tensor.fp32("x", 1, 16),))


#: What was seen in one run, by the column that shows it.
Seen = dict[str, float]


def figure(case: str, unit: str, rounds: Sequence[Seen], goal: Goal | None = None) -> Figure:
    """Return a figure of all rounds: the first column has the samples, the others are details."""
    (_, samples), *details = [(name, tuple(seen[name] for seen in rounds)) for name in rounds[0]]
    return Figure(case, unit, samples, goal, dict(details))


def timed(load: GrpcLoad, one: RunningServer, answer: bytes, seconds: float) -> tuple[float, float]:
    """Return requests a second, and CPU microseconds of the server for each; raise LoadFailed as the load."""
    before = Clocks.read(one.pid)
    result = load.run(one, seconds, answer)
    used_s = Clocks.read(one.pid).server_cpu_s - before.server_cpu_s
    return result.answers_per_s, used_s / result.answers * 1e6


class Executions(NamedTuple):
    """What a server has counted of one model so far."""

    batches: int
    rows: int
    compute_s: float

    @classmethod
    def read(cls, one: RunningServer, model: str) -> Executions:
        """Ask the server. Raises ServerFailed if the server has no statistics of the model."""
        connection = http.client.HTTPConnection("127.0.0.1", one.ports.http, timeout=30)
        try:
            connection.request("GET", f"/v2/models/{model}/stats")
            body = connection.getresponse().read()
        finally:
            connection.close()
        try:
            stats = json.loads(body)["model_stats"][0]
            compute_ns = sum(int(batch["compute_infer"]["ns"]) for batch in stats["batch_stats"])
            return cls(int(stats["execution_count"]), int(stats["inference_count"]), compute_ns / 1e9)
        except (KeyError, IndexError, ValueError):
            text = body.decode(errors="replace")
            raise ServerFailed(f"{one.server.title} has no statistics of {model}: {text}") from None

    def since(self, before: Executions) -> Executions:
        batches, rows = self.batches - before.batches, self.rows - before.rows
        return Executions(batches, rows, self.compute_s - before.compute_s)


def rss_nbytes(one: RunningServer) -> int:
    """Return the resident memory of all processes of a server together."""
    return sum(process.memory.rss_nbytes for process in processes.tree(one.pid))


def pss_nbytes(one: RunningServer) -> int:
    """Return the same with a shared page counted once."""
    return sum(process.memory.pss_nbytes for process in processes.tree(one.pid))
