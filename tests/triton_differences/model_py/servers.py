"""How the two servers are started with the repository of ``model.py`` files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.servers import GpuServe, PlainTriton, Ports
from triton_differences.model_py import configs

_SOURCE: Final = Path(__file__).parent / "repository"
MODELS: Final = (
    *("probe", "wrong", "inner", "streams", "completed", "awaits", "slow"),
    *("iterates", "iterates_decoupled"),
)


class ModelPyGpuServe(GpuServe):
    """This server, which is given Triton's command line."""

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        return [
            str(self._program),
            "tritonserver",
            *_flags(_copied(self.cache.folder, "ours"), ports, models),
        ]


class ModelPyTriton(PlainTriton):
    """Triton, with the same repository."""

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        triton = self.cache.triton
        flags = _flags(_copied(self.cache.folder, "theirs"), ports, models)
        return [str(triton / "bin/tritonserver"), *flags, f"--backend-directory={triton / 'backends'}"]


def _flags(repository: Path, ports: Ports, models: Sequence[str]) -> list[str]:
    return [
        f"--model-repository={repository}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in models),
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
    ]


def _copied(cache: Path, whose: str) -> Path:
    """A copy of the repository, in which a server may write byte code."""
    folder = cache / "comparison" / f"model_py_{whose}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(_SOURCE, folder)
    decoupled = shutil.copytree(folder / "iterates", folder / "iterates_decoupled") / "config.pbtxt"
    decoupled.write_text(decoupled.read_text() + "model_transaction_policy { decoupled: true }\n")
    configs.write(folder)
    return folder
