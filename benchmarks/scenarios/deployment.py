"""The models of a scenario, and the servers that can serve them: a configuration in a folder for each.

Everything but the models is as in ``servers.py``. A scenario names a server by its class; this file knows
how that one is told what to serve.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import PeerCache
from benchmarks.servers import GpuServe, PlainTriton, Ports

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
