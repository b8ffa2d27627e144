"""This server and MLServer, each with one model file and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.model_files.files import ModelFile
from benchmarks.peers import PeerCache
from benchmarks.servers import GpuServe, MLServer, Ports
from benchmarks.servers.server import MODELS_FOLDER


class FileServer(GpuServe):
    """``gpuserve serve FILE``."""

    def __init__(self, cache: PeerCache, file: ModelFile, path: Path) -> None:
        super().__init__(cache)
        self._path = path
        self._file = file
        self.models = frozenset({file.name})  # type: ignore[misc]  # of one server, not of the class

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        del models
        flags = ["--http-port", ports.http, "--grpc-port", ports.grpc, "--metrics-port", ports.metrics]
        return [str(self._program), "serve", str(self._path), *map(str, flags)]

    def environment(self) -> dict[str, str]:
        variable = f"GPUSERVE_MODELS__{self._file.name.upper()}__KWARGS".replace("-", "_")
        said = {"trust": True} if self._path.suffix == ".pt2" else {"trusted": self._file.trusted}
        return super().environment() | ({variable: json.dumps(said)} if any(said.values()) else {})


class MLServerFile(MLServer):
    """MLServer has no runtime of its own for these files, so it is given the few lines that call one."""

    def __init__(self, cache: PeerCache, file: ModelFile, path: Path) -> None:
        super().__init__(cache)
        self._path = path
        self._name = file.name
        self.models = frozenset({file.name})  # type: ignore[misc]  # as above
        self.largest_nbytes = 1 << 31  # type: ignore[misc]  # the file is run with what it takes

    def prepare(self) -> None:
        super().prepare()
        self.cache.add_to_mlserver("onnxruntime")

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        folder = self._path.parent / f"mlserver-{self._name}"
        folder.mkdir(exist_ok=True)
        settings = {
            "name": self._name,
            "implementation": "mlserver_files.OnnxFile",
            "parameters": {"uri": str(self._path)},
        }
        (folder / "model-settings.json").write_text(json.dumps(settings))
        return [*super().command(ports, models)[:-1], str(folder)]

    def environment(self) -> dict[str, str]:
        return super().environment() | {"PYTHONPATH": str(MODELS_FOLDER), "ORT_DISABLE_TELEMETRY": "1"}
