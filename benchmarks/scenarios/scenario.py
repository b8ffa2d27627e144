"""A scenario, the models that it asks for, and the server of one kind that has them."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from benchmarks import processes
from benchmarks.figures import Figure
from benchmarks.payloads import INFER, framed
from benchmarks.peers import PeerCache
from benchmarks.servers import GpuServe, PlainTriton
from benchmarks.servers.server import Ports, RunningServer, ServerFailed, running

_MODELS_FOLDER = Path(__file__).parent.parent / "models"


@dataclass(frozen=True, slots=True)
class SleepingModel:
    """y = x, FP32 [-1, n], after ``batch_s`` a batch; 0 for one that only echoes."""

    name: str
    batch_s: float
    instances: int = 1
    max_batch_size: int = 32
    fairness_header: str = ""  #: of models that are fair to their clients; this server only


class DeployedGpuServe(GpuServe):
    """This server with the models of a scenario."""

    def __init__(self, cache: PeerCache, models: Sequence[SleepingModel], folder: Path) -> None:
        super().__init__(cache)
        self._deployed = tuple(models)
        self._folder = folder

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        """As ``GpuServe``; the configuration is written to the folder first."""
        config = self._folder / "config.yaml"
        config.write_text(json.dumps({"server": {"host": "127.0.0.1"}, "models": self._entries()}, indent=1))
        flags = ["--http-port", ports.http, "--grpc-port", ports.grpc, "--metrics-port", ports.metrics]
        return [str(self._program), "serve", str(config), *map(str, flags)]

    def _entries(self) -> list[dict[str, object]]:
        return [
            {
                "name": one.name,
                **_callable(one),
                "instances": [{"device": "cpu", "count": one.instances}],
                "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
                "outputs": [{"name": "y", "dtype": "float32", "shape": [-1]}],
                "max_batch_size": one.max_batch_size,
                **_queue(one),
            }
            for one in self._deployed
        ]


class DeployedTriton(PlainTriton):
    """Plain Triton with the models of a scenario."""

    def __init__(self, cache: PeerCache, models: Sequence[SleepingModel], folder: Path) -> None:
        super().__init__(cache)
        self._deployed = tuple(models)
        self._folder = folder

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        """As ``PlainTriton``; the repository of models is made in the folder first."""
        repository = self._folder / "repository"
        for one in self._deployed:
            version = repository / one.name / "1"
            version.mkdir(parents=True)
            shutil.copy(_MODELS_FOLDER / "triton_sleeping.py", version / "model.py")
            (version.parent / "config.pbtxt").write_text(_triton_config(one))
        mine = f"--model-repository={repository}"
        command = super().command(ports, models)
        return [mine if word.startswith("--model-repository=") else word for word in command]


#: Servers that scenarios can be run on, by the names that --servers takes.
DEPLOYABLE: dict[str, type[DeployedGpuServe | DeployedTriton]] = {
    one.name: one for one in (DeployedGpuServe, DeployedTriton)
}


def _callable(one: SleepingModel) -> dict[str, object]:
    if not one.batch_s:
        return {"callable": f"{_MODELS_FOLDER / 'model.py'}:echo"}
    return {"callable": f"{_MODELS_FOLDER / 'sleeping.py'}:sleeping", "kwargs": {"seconds": one.batch_s}}


def _queue(one: SleepingModel) -> dict[str, object]:
    if not one.fairness_header:
        return {}
    return {"queue": {"fairness": "client", "fairness_header": one.fairness_header}}


def _triton_config(one: SleepingModel) -> str:
    tensor = "{{ name: {}, data_type: TYPE_FP32, dims: [-1] }}"
    return "\n".join(
        (
            'backend: "python"',
            f"max_batch_size: {one.max_batch_size}",
            f"input [{tensor.format(json.dumps('x'))}]",
            f"output [{tensor.format(json.dumps('y'))}]",
            f"instance_group [{{ count: {one.instances}, kind: KIND_CPU }}]",
            "dynamic_batching {}",
            f'parameters {{ key: "seconds", value: {{ string_value: "{one.batch_s}" }} }}',
            "",
        )
    )


_ROW = np.arange(16, dtype=np.float32)
_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class RowPayload:
    """One row of 16 FP32 for a model that echoes it; a ``Payload`` for h2load as well."""

    model: str
    path = INFER
    messages = 1

    def grpc_message(self) -> bytes:
        """A serialized ModelInferRequest with raw contents."""
        request = service_pb2.ModelInferRequest(model_name=self.model)
        request.inputs.add(name="x", datatype="FP32", shape=(1, _ROW.size))
        request.raw_input_contents.append(_ROW.tobytes())
        return bytes(request.SerializeToString())

    def check(self, running: RunningServer) -> bytes:
        """Ask once; returns the body of a right answer.

        Raises:
            ServerFailed: the server answered wrong, or not.
        """
        title = running.server.title
        with grpc.insecure_channel(f"127.0.0.1:{running.ports.grpc}") as channel:
            try:
                message: bytes = channel.unary_unary(self.path)(self.grpc_message(), timeout=_TIMEOUT_S)
            except grpc.RpcError as error:
                raise ServerFailed(f"{title}, model {self.model}: {error.details()}") from None
        response = service_pb2.ModelInferResponse.FromString(message)
        if list(response.raw_output_contents) != [_ROW.tobytes()]:
            raise ServerFailed(f"{title}, model {self.model} does not echo a row: {response}")
        return framed(message)


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
