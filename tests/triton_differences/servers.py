"""How the two servers are started with the models of ``model_table``. The benchmarks install them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.servers import GpuServe, PlainTriton, Ports
from triton_differences import model_table


class ComparedGpuServe(GpuServe):
    """This server, with the models of the comparison."""

    config: Path

    def prepare(self) -> None:
        super().prepare()
        self.config = self.cache.folder / "comparison" / "config.yaml"
        model_table.write_gpuserve_config(self.config)

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        flags = ["--http-port", ports.http, "--grpc-port", ports.grpc, "--metrics-port", ports.metrics]
        return [str(self._program), "serve", str(self.config), *map(str, flags)]


class ComparedTriton(PlainTriton):
    """Triton, with the models of the comparison."""

    repository: Path

    def prepare(self) -> None:
        super().prepare()
        self.repository = self.cache.folder / "comparison" / "repository"
        model_table.write_triton_repository(self.repository)

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        triton = self.cache.triton
        return [
            str(triton / "bin/tritonserver"),
            f"--model-repository={self.repository}",
            "--model-control-mode=explicit",
            *(f"--load-model={name}" for name in models),
            f"--backend-directory={triton / 'backends'}",
            *("--http-address=127.0.0.1", f"--http-port={ports.http}"),
            *("--grpc-address=127.0.0.1", f"--grpc-port={ports.grpc}"),
            f"--metrics-port={ports.metrics}",
        ]
