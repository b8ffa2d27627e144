"""Other servers with a network of ``models/networks.py`` on the device, as they are installed here: PyTriton
in this interpreter, Triton's Python backend from its container or out of PyTriton. Nothing is installed. No
two requests share a batch in either.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from benchmarks.gpu.places import MODELS, ROOT
from benchmarks.gpu.running.section import Site
from benchmarks.gpu.served.bare_loop import size_of
from benchmarks.peers import PeerCache, ServerMissing
from benchmarks.servers import PlainTriton, Ports, PyTriton

_CONTAINER: Final = Path("/opt/tritonserver")
_CONFIG: Final = """backend: "python"
max_batch_size: 256
input [{{ name: "x", data_type: TYPE_INT32, dims: [{tokens}] }}]
output [{{ name: "y", data_type: TYPE_FP32, dims: [{features}] }}]
instance_group [{{ count: 1, kind: KIND_CPU }}]
parameters [
  {{ key: "kind", value: {{ string_value: "{kind}" }} }},
  {{ key: "size", value: {{ string_value: "{size}" }} }},
  {{ key: "device", value: {{ string_value: "{device}" }} }}
]
"""


class GpuPyTriton(PyTriton):
    """PyTriton of this interpreter."""

    def __init__(self, site: Site) -> None:
        super().__init__(PeerCache(site.folder))
        self._site = site

    def prepare(self) -> None:
        """See ``Server``; it is there, or it is not."""
        if _package("pytriton") is None:
            raise ServerMissing("it is not installed for this interpreter")
        self.title = f"PyTriton {version('nvidia-pytriton')}"
        if not version("numpy").startswith("1."):
            raise ServerMissing(f"it needs NumPy below 2, here is {version('numpy')}")

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        """The program that serves the network."""
        numbers = map(str, (ports.http, ports.grpc, ports.metrics))
        program = str(MODELS / "pytriton_network.py")
        return [sys.executable, program, *numbers, *models, size_of(self._site), self._site.device]

    def environment(self) -> dict[str, str]:
        """Where its wheel is not among this interpreter's own packages it finds no libraries."""
        return {**super().environment(), **_libraries(_package("pytriton") or Path())}


class GpuTriton(PlainTriton):
    """Triton's Python backend with this interpreter's packages. ``shape`` is tokens and features."""

    title = "Triton's Python backend"

    def __init__(self, site: Site, kind: str, shape: tuple[int, int]) -> None:
        super().__init__(PeerCache(site.folder))
        self._folder = site.folder / "triton"
        self._site = site
        self._kind = kind
        self._shape = shape
        self._installed = Path()

    def prepare(self) -> None:
        """See ``Server``: a backend with the stub for this Python, and a repository of the network."""
        self._installed = _installed()
        backend = self._folder / "backends/python"
        backend.mkdir(parents=True)
        for file in (self._installed / "backends/python").iterdir():
            (backend / file.name).symlink_to(file)
        if not (backend / _STUB).exists():
            python = f"{sys.version_info.major}.{sys.version_info.minor}"
            stub = self._installed / "python_backend_stubs" / python / _STUB
            if not stub.exists():
                raise ServerMissing(
                    f"{self._installed} has no stub of its Python backend for Python {python}"
                )
            (backend / _STUB).symlink_to(stub)
        self._make_repository()

    def _make_repository(self) -> None:
        folder = self._folder / "models" / self._kind
        (folder / "1").mkdir(parents=True)
        (folder / "1/model.py").symlink_to(MODELS / "triton_network.py")
        tokens, features = self._shape
        size, device = size_of(self._site), self._site.device
        config = _CONFIG.format(kind=self._kind, size=size, device=device, tokens=tokens, features=features)
        (folder / "config.pbtxt").write_text(config)

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        """As it is started with a repository."""
        return [
            str(self._installed / "bin/tritonserver"),
            f"--model-repository={self._folder / 'models'}",
            f"--backend-directory={self._folder / 'backends'}",
            "--backend-config=python,shm-default-byte-size=67108864",
            *("--http-address=127.0.0.1", f"--http-port={ports.http}"),
            *("--grpc-address=127.0.0.1", f"--grpc-port={ports.grpc}"),
            f"--metrics-port={ports.metrics}",
        ]

    def environment(self) -> dict[str, str]:
        """The stub has no packages but those that it is told of."""
        return {
            **_libraries(self._installed.parent),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }


_STUB: Final = "triton_python_backend_stub"


def _installed() -> Path:
    """The folder with ``bin/tritonserver`` and ``backends/python``.

    Raises:
        ServerMissing: there is none.
    """
    program = shutil.which("tritonserver")
    pytriton = _package("pytriton")
    places = [_CONTAINER, *([Path(program).resolve().parents[1]] if program else [])]
    places += [pytriton / "tritonserver"] if pytriton else []
    for place in places:
        if (place / "bin/tritonserver").exists() and (place / "backends/python").exists():
            return place
    raise ServerMissing(f"there is no tritonserver in {_CONTAINER}, on PATH or in PyTriton")


def _package(name: str) -> Path | None:
    """The folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(name)
    return Path(found.origin).parent if found is not None and found.origin else None


def _libraries(package: Path) -> dict[str, str]:
    """Those that came beside PyTriton's package, and this Python's own."""
    places = [str(package.parent / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, (*places, os.environ.get("LD_LIBRARY_PATH"))))}
