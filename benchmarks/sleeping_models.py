"""Models that take their time and no CPU, and the servers that have them: this one, and plain Triton."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import PeerCache
from benchmarks.servers import ConfiguredGpuServe, PlainTriton
from benchmarks.servers.server import MODELS_FOLDER, Ports


@dataclass(frozen=True, slots=True)
class SleepingModel:
    """y = x, FP32 [-1, n], after ``batch_s`` a batch."""

    name: str
    batch_s: float
    instances: int = 1
    max_batch_size: int = 32
    ragged: bool = False  #: whether requests of any length share a batch

    @property
    def entry(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "callable": f"{MODELS_FOLDER}/sleeping.py:sleeping",
            "kwargs": {"seconds": self.batch_s, "ragged": self.ragged},
            "instances": [{"device": "cpu", "count": self.instances}],
            "inputs": [{"name": "x", "dtype": "float32", "shape": [-1], "ragged": self.ragged}],
            "outputs": [{"name": "y", "dtype": "float32", "shape": [-1], "ragged": self.ragged}],
            "max_batch_size": self.max_batch_size,
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
    """Plain Triton with such models."""

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
