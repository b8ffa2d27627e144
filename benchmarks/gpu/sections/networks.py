"""Networks in torch, through the server and in a bare loop in this process that copies the same batch to the
device, calls the network and copies back; the same network in other servers, and with more instances.

No two requests share a batch unless a model merges, so all run the same batches. Each has the GPU to itself
in turns.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc

from benchmarks.command_line import say
from benchmarks.figures import Figure, Goal
from benchmarks.gpu import MODELS, ROOT
from benchmarks.gpu.running.section import Findings, SectionFailed, SectionSkipped, Site, ratio_figure
from benchmarks.gpu.served.client import answer_array, calling, with_bytes
from benchmarks.gpu.served.load import LoadClients, load_clients
from benchmarks.gpu.served.serving import Model, serving, tensor
from benchmarks.peers import PeerCache, ServerMissing
from benchmarks.servers import PlainTriton, PyTriton
from benchmarks.servers.server import Ports, RunningServer, Server, ServerFailed, running

_GOAL: Final = Goal(0.97, at_least=True)
#: Requests under way: one computes, one waits in the worker, the others are on their way.
_IN_FLIGHT: Final = 8
_WARM_UPS: Final = 5
#: Between different kernels for the same network; a wrong answer is far off.
_TOLERANCE: Final = 1e-2
_SMALL_BATCHES: Final = (1, 4)  # of the stand-in


def networks_module() -> Any:
    """Return the module of the networks. Raises SectionSkipped: torch is not installed."""
    try:
        from benchmarks.gpu.models import networks
    except ImportError as error:
        raise SectionSkipped(f"torch cannot be imported ({error})") from None
    return networks


def _size_of(site: Site) -> str:
    return "small" if site.stand_in else "full"


def _model(site: Site, name: str, kind: str, count: int = 1, *, merge: bool = False) -> Model:
    """Return a network as a model of a server, with so many instances on the one device."""
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
        kwargs={"kind": kind, "size": _size_of(site)},
    )


class BareLoop:
    """The network in this process, without a server."""

    def __init__(self, site: Site, kind: str) -> None:
        import torch

        networks = networks_module()
        self.kind = kind
        self._torch = torch
        self._network = networks.Network(kind, _size_of(site), site.device)
        self._device = site.device
        self._example = networks.example

    def example(self, rows: int) -> Any:
        return self._example(self.kind, rows)

    def answer(self, x: Any) -> Any:
        """Run one batch: to the device, through the network, and back."""
        return self._network.forward(self._torch.from_numpy(x).to(self._device)).cpu().numpy()

    def rate(self, x: Any, seconds: float) -> float:
        for _ in range(_WARM_UPS):
            self.answer(x)
        count, began_at = 0, time.perf_counter()
        while (took_s := time.perf_counter() - began_at) < seconds or not count:
            self.answer(x)
            count += 1
        return count / took_s if took_s else 0.0


def _compare(
    site: Site, one: RunningServer, clients: LoadClients, loop: BareLoop, rows: int, message: bytes = b""
) -> Figure:
    """Compare rows a second of the server and of the loop, in turns: with the same batches, or, without a
    goal, with single rows (``message``) for the server.
    """
    x, case = loop.example(rows), f"{loop.kind}, batch {rows}"
    goal: Goal | None = _GOAL
    asked, factor = [with_bytes(loop.kind, {"x": x})] * _IN_FLIGHT, rows
    if message:
        asked, factor, goal = [message] * 2 * rows, 1, None
        case = f"{loop.kind}, single sentences, {2 * rows} under way"
    else:
        _check_answer(one, loop, x)
    server, bare, latencies_ms = [], [], []
    for _ in range(site.effort.rounds):
        seen = clients.load(one, asked, site.effort.seconds, case)
        server.append(seen.answers_per_s * factor)
        latencies_ms.append(seen.median_latency_s * 1e3)
        bare.append(loop.rate(x, site.effort.seconds) * rows)
    say(f"{case}: {median(server):.0f} and {median(bare):.0f} rows/s")
    details = {"server, rows/s": server, "bare loop, rows/s": bare, "latency, ms": latencies_ms}
    return ratio_figure(case, "server / bare loop", server, bare, goal, **details)


def _check_answer(one: RunningServer, loop: BareLoop, x: Any) -> None:
    """Compare the server's answer with the loop's. Raises SectionFailed: they differ."""
    what, wanted = f"{loop.kind}, batch {len(x)}", loop.answer(x)
    with calling(one) as caller:
        answer = caller.infer(with_bytes(loop.kind, {"x": x}))
    try:
        given = answer_array(answer, "y", "float32")
    except (KeyError, ValueError) as error:
        raise SectionFailed(f"{what}: the answer cannot be read: {error}") from None
    apart = abs(given - wanted).max() if given.shape == wanted.shape else float("inf")
    if not apart <= _TOLERANCE:
        raise SectionFailed(f"{what}: the server's answer is {apart:.3g} away from the loop's")


# ---- networks, sentences, instances -------------------------------------------------------------


def networks(site: Site, findings: Findings) -> None:
    """An MLP and a transformer encoder, with whole batches as requests."""
    networks_module()
    findings.note(
        "FP32, random weights, torch's defaults. mlp: 8 linear layers, 8192 wide. encoder: 6 layers of 512 "
        "features on 128 tokens. The bare loop copies the batch to the device, calls the network, copies back"
    )
    kinds = ("mlp", "encoder")
    models = [_model(site, kind, kind) for kind in kinds]
    with load_clients(findings) as clients, serving(site, "networks", models) as one:
        for kind in kinds:
            loop = BareLoop(site, kind)
            for rows in _SMALL_BATCHES if site.stand_in else (1, 8, 32, 128, 256):
                findings.add(_compare(site, one, clients, loop, rows))


def sentences(site: Site, findings: Findings) -> None:
    """Sentence embeddings by a network with the architecture of all-MiniLM-L6-v2 (6 layers, 384 features, 12
    heads, 1536 inside) with random weights, for machines that can fetch none; its speed depends on neither.
    """
    networks_module()
    findings.note(
        "The architecture of all-MiniLM-L6-v2 in plain torch with random weights, 64 tokens a "
        "sentence, FP32; sentences come as tokens"
    )
    kind, single = "minilm", "minilm-single"
    models = [_model(site, kind, kind), _model(site, single, kind, merge=True)]
    with load_clients(findings) as clients, serving(site, "sentences", models) as one:
        loop = BareLoop(site, kind)
        rows = 4 if site.stand_in else 64
        findings.add(_compare(site, one, clients, loop, rows))
        message = with_bytes(single, {"x": loop.example(1)})
        findings.add(_compare(site, one, clients, loop, rows, message))


def instances(site: Site, findings: Findings) -> None:
    """1, 2 and 4 instances of the encoder. There is no goal: where one instance keeps the GPU busy, others
    cannot add anything; where it waits for its Python, they do.
    """
    example = networks_module().example
    counts = (1, 2) if site.stand_in else (1, 2, 4)
    models = [_model(site, f"encoder-{count}", "encoder", count) for count in counts]
    with load_clients(findings) as clients, serving(site, "instances", models) as one:
        for rows in (1,) if site.stand_in else (1, 8, 64):
            rates: dict[int, list[float]] = {count: [] for count in counts}
            cases = {n: f"encoder, batch {rows}, {n} instance{'s' * (n > 1)}" for n in counts}
            for _ in range(site.effort.rounds):
                for count in counts:
                    asked = [with_bytes(f"encoder-{count}", {"x": example("encoder", rows)})] * 4 * count
                    seen = clients.load(one, asked, site.effort.seconds, cases[count])
                    rates[count].append(seen.answers_per_s * rows)
            for count in counts:
                details = {"rows/s": rates[count]}
                unit = "times one instance"
                findings.add(ratio_figure(cases[count], unit, rates[count], rates[1], None, **details))


# ---- peers --------------------------------------------------------------------------------------

_KIND: Final = "encoder"
#: One that cannot be had must not take the time of the others.
_READY_TIMEOUT_S: Final = 40.0
_STUB: Final = "triton_python_backend_stub"
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


def peers(site: Site, findings: Findings) -> None:
    """The encoder in a bare loop, in PyTriton and in Triton's Python backend, where they are installed, side
    by side with ours.
    """
    module = networks_module()
    loop = BareLoop(site, _KIND)
    shape = module.TOKENS, module.ENCODER_FEATURES
    with ExitStack() as stack:
        servers = {"gpuserve": stack.enter_context(serving(site, "peers", [_model(site, _KIND, _KIND)]))}
        for peer in (GpuPyTriton(site), GpuTriton(site, shape)):
            if one := _started(site, findings, stack, peer, loop):
                servers[peer.title] = one
        clients = stack.enter_context(load_clients(findings))
        for rows in _SMALL_BATCHES if site.stand_in else (1, 8, 32):
            _check_answer(servers["gpuserve"], loop, loop.example(rows))
            _compare_peers(site, findings, servers, clients, loop, rows)


def _started(
    site: Site, findings: Findings, stack: ExitStack, peer: Server, loop: BareLoop
) -> RunningServer | None:
    try:
        peer.prepare()
        one = stack.enter_context(running(peer, site.folder / peer.name, [_KIND], _READY_TIMEOUT_S))
        _check_answer(one, loop, loop.example(1))
        return one
    except (ServerMissing, ServerFailed, SectionFailed, grpc.RpcError) as error:
        lines = str(error).splitlines()
        findings.skip(peer.title, " ".join(lines if len(lines) < 3 else (lines[0], lines[-1])))
        return None


def _compare_peers(
    site: Site,
    findings: Findings,
    servers: Mapping[str, RunningServer],
    clients: LoadClients,
    loop: BareLoop,
    rows: int,
) -> None:
    x, seconds, case = loop.example(rows), site.effort.seconds, f"{_KIND}, batch {rows}"
    message = with_bytes(_KIND, {"x": x})

    def loaded(name: str) -> float:
        return clients.load(servers[name], [message] * _IN_FLIGHT, seconds, f"{case}, {name}").answers_per_s

    turns: dict[str, Callable[[str], float]] = dict.fromkeys(servers, loaded)
    turns["bare loop"] = lambda _name: loop.rate(x, seconds)
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(site.effort.rounds):
        for name, rate in turns.items():
            rates[name].append(rate(name) * rows)
    ours = rates.pop("gpuserve")
    for name, theirs in rates.items():
        details = {"gpuserve, rows/s": ours, "the other, rows/s": theirs}
        findings.add(
            ratio_figure(f"{case}, gpuserve / {name}", "times the rows", ours, theirs, None, **details)
        )


class GpuPyTriton(PyTriton):
    def __init__(self, site: Site) -> None:
        super().__init__(PeerCache(site.folder))
        self._site = site

    def prepare(self) -> None:
        if _pytriton() is None:
            raise ServerMissing("it is not installed for this interpreter")
        self.title = f"PyTriton {version('nvidia-pytriton')}"
        if not version("numpy").startswith("1."):
            raise ServerMissing(f"it needs NumPy below 2, here is {version('numpy')}")

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        numbers = map(str, (ports.http, ports.grpc, ports.metrics))
        program = str(MODELS / "pytriton_network.py")
        return [sys.executable, program, *numbers, *models, _size_of(self._site), self._site.device]

    def environment(self) -> dict[str, str]:
        """Where its wheel is not among this interpreter's own packages it finds no libraries."""
        return {**super().environment(), **_libraries(_pytriton() or Path())}


class GpuTriton(PlainTriton):
    """Triton's Python backend with this interpreter's packages. ``shape`` is tokens and features."""

    title = "Triton's Python backend"

    def __init__(self, site: Site, shape: tuple[int, int]) -> None:
        super().__init__(PeerCache(site.folder))
        self._folder = site.folder / "triton"
        self._site = site
        self._shape = shape
        self._installed = Path()

    def prepare(self) -> None:
        """Make a backend with the stub for this Python, and a repository of the network; see ``Server``."""
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
        folder = self._folder / "models" / _KIND
        (folder / "1").mkdir(parents=True)
        (folder / "1/model.py").symlink_to(MODELS / "triton_network.py")
        tokens, features = self._shape
        size, device = _size_of(self._site), self._site.device
        config = _CONFIG.format(kind=_KIND, size=size, device=device, tokens=tokens, features=features)
        (folder / "config.pbtxt").write_text(config)

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        program, folder = self._installed / "bin/tritonserver", self._folder
        return self._serve(program, folder / "models", folder / "backends", ports)

    def environment(self) -> dict[str, str]:
        """The stub has no packages but those that it is told of."""
        return {
            **_libraries(self._installed.parent),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }


def _installed() -> Path:
    """Return the folder with ``bin/tritonserver`` and ``backends/python``. Raises ServerMissing."""
    program, pytriton = shutil.which("tritonserver"), _pytriton()
    places = [_CONTAINER, *([Path(program).resolve().parents[1]] if program else [])]
    places += [pytriton / "tritonserver"] if pytriton else []
    for place in places:
        if (place / "bin/tritonserver").exists() and (place / "backends/python").exists():
            return place
    raise ServerMissing(f"there is no tritonserver in {_CONTAINER}, on PATH or in PyTriton")


def _pytriton() -> Path | None:
    """Return the folder of PyTriton's package if it is installed; it is not imported."""
    found = importlib.util.find_spec("pytriton")
    return Path(found.origin).parent if found is not None and found.origin else None


def _libraries(package: Path) -> dict[str, str]:
    """Those that came beside PyTriton's package, and this Python's own."""
    places = [str(package.parent / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, (*places, os.environ.get("LD_LIBRARY_PATH"))))}
