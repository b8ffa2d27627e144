"""Servers of the models of a section on free ports (this one, PyTriton and Triton as installed here), and a
network in a bare loop in this process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.figures import Figure, Goal
from benchmarks.gpu.places import MODELS, ROOT
from benchmarks.gpu.running.section import SectionFailed, SectionSkipped, Site, ratio_figure
from benchmarks.gpu.served.client import answer_array, calling, with_bytes
from benchmarks.gpu.served.load import LoadClients
from benchmarks.peers import PeerCache, ServerMissing
from benchmarks.servers import ConfiguredGpuServe, PlainTriton, PyTriton
from benchmarks.servers.server import Ports, RunningServer, running

#: On a fresh machine each worker opens a context of CUDA and reads gigabytes of libraries.
_READY_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the config file has it. ``callable`` is ``file.py:name`` in ``models/``.

    No two requests share a batch unless ``merge``: what is compared are the same batches.
    """

    name: str
    callable: str
    inputs: Sequence[Mapping[str, Any]]
    outputs: Sequence[Mapping[str, Any]]
    device: str = "cuda:0"
    count: int = 1
    max_batch_size: int = 0
    merge: bool = False
    array: str | None = None
    kwargs: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None

    def entry(self) -> dict[str, Any]:
        given = {"array": self.array, "kwargs": self.kwargs}
        return {
            "name": self.name,
            "callable": f"{MODELS}/{self.callable}",
            "instances": [{"device": self.device, "count": self.count}],
            "inputs": self.inputs,
            "outputs": self.outputs,
            "max_batch_size": self.max_batch_size,
            "batching": {"merge": self.merge},
            **{key: value for key, value in given.items() if value is not None},
            **(self.settings or {}),
        }


def tensor(name: str, dtype: str, *shape: int) -> dict[str, Any]:
    """An input or an output, as the config file has it."""
    return {"name": name, "dtype": dtype, "shape": list(shape)}


class _Server(ConfiguredGpuServe):
    """This server with the models and the environment of a section."""

    def __init__(self, models: Sequence[Model], folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(PeerCache(folder), folder, [one.entry() for one in models])
        self._environment = environment

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **self._environment}


@contextmanager
def serving(
    site: Site, label: str, models: Sequence[Model], environment: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """A server with these models, while the context lasts. ``label`` names its log. Raises ServerFailed: it
    did not come up.
    """
    folder = site.folder / label
    folder.mkdir(parents=True, exist_ok=True)
    server = _Server(models, folder, environment or {})
    server.prepare()
    with running(server, folder, [one.name for one in models], _READY_TIMEOUT_S) as one:
        site.say(f"{label}: ready after {one.ready_s:.1f} s")
        yield one


#: Requests under way: one computes, one waits in the worker, the others are on their way.
IN_FLIGHT: Final = 8
_WARM_UPS: Final = 5
#: Between different kernels for the same network; a wrong answer is far off.
_TOLERANCE: Final = 1e-2


def networks_module() -> Any:
    """The models, which import torch. Raises SectionSkipped: it is not installed."""
    try:
        from benchmarks.gpu.models import networks
    except ImportError as error:
        raise SectionSkipped(f"torch cannot be imported ({error})") from None
    return networks


def network_model(site: Site, name: str, kind: str, count: int = 1, *, merge: bool = False) -> Model:
    """A network as a model of a server, with so many instances on the one device."""
    networks = networks_module()
    x = networks.example(kind, 1)
    features = {"mlp": networks.MLP_FEATURES, "minilm": networks.SENTENCE_FEATURES}
    return Model(
        name,
        "networks.py:Network",
        inputs=[tensor("x", x.dtype.name, *x.shape[1:])],
        outputs=[tensor("y", "float32", features.get(kind, networks.ENCODER_FEATURES))],
        device=site.device,
        count=count,
        max_batch_size=256,
        merge=merge,
        array="torch",
        kwargs={"kind": kind, "size": size_of(site)},
    )


def size_of(site: Site) -> str:
    return "small" if site.stand_in else "full"


class BareLoop:
    """The network in this process, without a server."""

    def __init__(self, site: Site, kind: str) -> None:
        import torch

        networks = networks_module()
        self.kind = kind
        self._torch = torch
        self._network = networks.Network(kind, size_of(site), site.device)
        self._device = site.device
        self._example = networks.example

    def example(self, rows: int) -> Any:
        return self._example(self.kind, rows)

    def answer(self, x: Any) -> Any:
        """One batch: to the device, through the network, and back."""
        return self._network.forward(self._torch.from_numpy(x).to(self._device)).cpu().numpy()

    def rate(self, x: Any, seconds: float) -> float:
        for _ in range(_WARM_UPS):
            self.answer(x)
        count, began_at = 0, time.perf_counter()
        while (took_s := time.perf_counter() - began_at) < seconds or not count:
            self.answer(x)
            count += 1
        return count / took_s if took_s else 0.0


def compare(
    site: Site, one: RunningServer, clients: LoadClients, loop: BareLoop, rows: int, goal: Goal | None
) -> Figure:
    """Rows a second of the server against the loop, with the same batch, in turns. Raises SectionFailed: the
    server's answer is another one than the loop's.
    """
    x, case = loop.example(rows), f"{loop.kind}, batch {rows}"
    message = with_bytes(loop.kind, {"x": x})
    check_answer(one, loop, x)
    server, bare, latencies_ms = [], [], []
    for _ in range(site.effort.rounds):
        seen = clients.load(one, [message] * IN_FLIGHT, site.effort.seconds, case)
        server.append(seen.answers_per_s * rows)
        latencies_ms.append(seen.median_latency_s * 1e3)
        bare.append(loop.rate(x, site.effort.seconds) * rows)
    site.say(f"{case}: {median(server):.0f} and {median(bare):.0f} rows/s")
    details = {"server, rows/s": server, "bare loop, rows/s": bare, "latency, ms": latencies_ms}
    return ratio_figure(case, "server / bare loop", server, bare, goal, **details)


def check_answer(one: RunningServer, loop: BareLoop, x: Any) -> None:
    """The server's answer is the loop's. Raises SectionFailed: it is another one."""
    wanted = loop.answer(x)
    with calling(one) as caller:
        answer = caller.infer(with_bytes(loop.kind, {"x": x}))
    try:
        given = answer_array(answer, "y", "float32")
    except (KeyError, ValueError) as error:
        raise SectionFailed(f"{loop.kind}, batch {len(x)}: the answer cannot be read: {error}") from None
    apart = abs(given - wanted).max() if given.shape == wanted.shape else float("inf")
    if not apart <= _TOLERANCE:
        text = f"{loop.kind}, batch {len(x)}: the server's answer is {apart:.3g} away from the loop's"
        raise SectionFailed(text)


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
    """The folder with ``bin/tritonserver`` and ``backends/python``. Raises ServerMissing: there is none."""
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
