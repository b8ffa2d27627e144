"""The section of model files, served without code: requests of 32 rows, four in flight, against the runtime
that reads the file in a bare loop. ``python -m benchmarks.model_files NAME FILE SECONDS`` is that loop, and
prints one JSON object. Files are made with random weights if they do not exist.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from benchmarks import load, payloads
from benchmarks.figures import Goal
from benchmarks.load import GrpcLoad, LoadFailed, LoadResult
from benchmarks.peers import PeerCache, ServerMissing
from benchmarks.report import Plan, Section
from benchmarks.request_section import RequestPart
from benchmarks.rounds import Clocks, Comparison, LoadedServer, Sample, Samples, Subject, measure, sample_of
from benchmarks.rows import Goals, Measure, Row
from benchmarks.servers import GpuServe, MLServer
from benchmarks.servers.server import MODELS_FOLDER, Api, Kind, Ports, RunningServer, ServerFailed, running

#: Rows of a request, and of a batch of the loop.
ROWS = 32
_MLP = (784, 512, 512, 10)
#: Channels of the four stages of ResNet-18, each of two blocks.
_STAGES = (64, 128, 256, 512)
_CLASSES = 1000
_WARM_UP = 3
_BARE = "bare"
_GRACE_S = 60.0
_TOLERANCE = 1e-3
_Call = Callable[[NDArray[np.float32]], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file with one input ``x``, FP32 of this shape without the batch axis, and the output that is asked
    for. ``runtime`` names its loop. No run is shorter than ``least_s``.
    """

    name: str
    title: str
    suffix: str
    runtime: str
    shape: tuple[int, ...]
    output: str
    write: Callable[[Path], None]
    least_s: float = 0.0

    @property
    def rows(self) -> NDArray[np.float32]:
        """The input of every request and of every turn of the loop."""
        return np.random.default_rng(3).standard_normal((ROWS, *self.shape)).astype(np.float32)

    def made(self, folder: Path) -> Path:
        """Return the path of the file, which is written if it does not exist."""
        file = folder / f"{self.name}{self.suffix}"
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self.write(file)
        return file


class _Graph:
    """A graph of ONNX that grows layer by layer."""

    def __init__(self, file: Path, shape: tuple[int, ...]) -> None:
        self._file = file
        self._shape = shape
        self._random = np.random.default_rng(1)
        self._nodes: list[Any] = []
        self._weights: list[Any] = []

    def weight(self, *shape: int, inputs: int) -> str:
        """Add random numbers that keep the scale of what they are multiplied with."""
        from onnx import numpy_helper

        name = f"w{len(self._weights)}"
        values = self._random.standard_normal(shape, np.float32) * np.float32((2 / inputs) ** 0.5)
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def add(self, operator: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        from onnx import helper

        name = output or f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def gemm(self, x: str, before: int, after: int, output: str | None = None) -> str:
        weights = self.weight(before, after, inputs=before), self.weight(after, inputs=before)
        return self.add("Gemm", x, *weights, output=output)

    def conv(self, x: str, before: int, after: int, size: int, stride: int = 1) -> str:
        """Add a convolution that keeps the size if the stride is 1, with the bias of a folded batch norm."""
        fan = before * size * size
        weights = self.weight(after, before, size, size, inputs=fan), self.weight(after, inputs=fan)
        pads = [size // 2] * 4
        return self.add("Conv", x, *weights, kernel_shape=[size] * 2, strides=[stride] * 2, pads=pads)

    def save(self, outputs: int) -> None:
        """Write the file; the last output is called ``y``."""
        import onnx
        from onnx import TensorProto, helper

        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", *self._shape])
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", outputs])
        graph = helper.make_graph(self._nodes, "model", [x], [y], self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        onnx.save(model, str(self._file))


def _onnx_mlp(file: Path) -> None:
    graph, x = _Graph(file, _MLP[:1]), "x"
    for before, after in pairwise(_MLP[:-1]):
        x = graph.add("Relu", graph.gemm(x, before, after))
    graph.gemm(x, *_MLP[-2:], output="y")
    graph.save(_MLP[-1])


def _onnx_resnet(file: Path) -> None:
    graph = _Graph(file, (3, 224, 224))
    x = graph.add("Relu", graph.conv("x", 3, 64, size=7, stride=2))
    x = graph.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    before = 64
    for stage, after in enumerate(_STAGES):
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = graph.add("Relu", graph.conv(x, before, after, size=3, stride=stride))
            y = graph.conv(y, after, after, size=3)
            shortcut = x if before == after else graph.conv(x, before, after, size=1, stride=stride)
            x, before = graph.add("Relu", graph.add("Add", y, shortcut)), after
    x = graph.add("Flatten", graph.add("GlobalAveragePool", x))
    graph.gemm(x, before, _CLASSES, output="y")
    graph.save(_CLASSES)


def _pytorch_mlp(file: Path) -> None:
    import torch

    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for before, after in pairwise(_MLP):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*layers[:-1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            answer: torch.Tensor = self.layers(x)
            return answer

    shapes = {"x": {0: torch.export.Dim("rows", max=ROWS)}}
    program = torch.export.export(Model().eval(), (torch.zeros(2, _MLP[0]),), dynamic_shapes=shapes)
    torch.export.save(program, file)


_MLP_TITLE = f"MLP of {'-'.join(map(str, _MLP))}"
_RESNET_TITLE = "ONNX, ResNet-18 at 224 x 224"
FILES = (
    ModelFile("onnx-mlp", f"ONNX, {_MLP_TITLE}", ".onnx", "onnxruntime", _MLP[:1], "y", _onnx_mlp),
    ModelFile(
        "onnx-resnet", _RESNET_TITLE, ".onnx", "onnxruntime", (3, 224, 224), "y", _onnx_resnet, least_s=10.0
    ),
    ModelFile("pytorch-mlp", f"PyTorch, {_MLP_TITLE}", ".pt2", "torch", _MLP[:1], "OUTPUT__0", _pytorch_mlp),
)


def _onnxruntime(path: str) -> _Call:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda rows: np.asarray(session.run(None, {"x": rows})[0])


def _torch(path: str) -> _Call:
    import torch

    module = torch.export.load(path).module()

    def call(rows: NDArray[np.float32]) -> NDArray[Any]:
        with torch.inference_mode():
            return np.asarray(module(torch.from_numpy(rows)))

    return call


_RUNTIMES: dict[str, Callable[[str], _Call]] = {"onnxruntime": _onnxruntime, "torch": _torch}


class FileServer(GpuServe):
    def __init__(self, cache: PeerCache, file: ModelFile, path: Path) -> None:
        super().__init__(cache)
        self._path = path
        self.models = frozenset({file.name})  # type: ignore[misc]  # of one server, not of the class
        self._variable = f"GPUSERVE_MODELS__{file.name.upper()}__KWARGS".replace("-", "_")

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        return self._serve(self._path, ports)

    def environment(self) -> dict[str, str]:
        trusted = {self._variable: json.dumps({"trust": True})} if self._path.suffix == ".pt2" else {}
        return super().environment() | trusted


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
        implementation = {"implementation": "mlserver_files.OnnxFile", "parameters": {"uri": str(self._path)}}
        (folder / "model-settings.json").write_text(json.dumps({"name": self._name, **implementation}))
        return [*super().command(ports, models)[:-1], str(folder)]

    def environment(self) -> dict[str, str]:
        return super().environment() | {"PYTHONPATH": str(MODELS_FOLDER), "ORT_DISABLE_TELEMETRY": "1"}


@dataclass(frozen=True, slots=True)
class FilePayload(payloads.Payload):
    """The rows of a file as one request. ``at`` is where the file is."""

    file: ModelFile
    at: Path

    @property
    def model(self) -> str:
        return self.file.name

    @property
    def nbytes(self) -> int:
        return self.file.rows.nbytes

    def grpc_message(self) -> bytes:
        rows = self.file.rows
        tensor = payloads.Tensor("x", "FP32", rows.shape, rows.tobytes())
        return payloads.grpc_request(self.model, tensor, output=self.file.output)

    def check(self, running: RunningServer, api: Api = Api.GRPC) -> bytes:
        """Compare the answer of the server with that of the runtime; see ``Payload``."""
        rows = self.file.rows
        tensor = InferInput("x", list(rows.shape), "FP32")
        tensor.set_data_from_numpy(rows)
        try:
            with InferenceServerClient(f"127.0.0.1:{running.ports.grpc}") as client:
                answer = client.infer(self.model, [tensor]).as_numpy(self.file.output)
        except InferenceServerException as error:
            raise ServerFailed(f"{running.server.title}: {error}") from None
        expected = _RUNTIMES[self.file.runtime](str(self.at))(rows)
        if answer is None or not np.allclose(answer, expected, _TOLERANCE, _TOLERANCE * abs(expected).max()):
            raise ServerFailed(f"{running.server.title} answers otherwise than {self.file.runtime}")
        return b"".join(map(payloads.framed, payloads.messages_of(running, self)))


class BareLoop(Subject):
    """The runtime alone, in a process of its own, as the subject of rows."""

    name = _BARE
    title = "the runtime in a loop"

    def can_run(self, row: Row) -> bool:
        return isinstance(row.load.payload, FilePayload)

    def run(self, row: Row, seconds: float) -> Sample:
        payload = row.load.payload
        assert isinstance(payload, FilePayload)
        command = [sys.executable, "-m", __spec__.name, payload.model, str(payload.at), str(seconds)]
        before = Clocks.read(None)
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds + _GRACE_S
        )
        if done.returncode:
            raise LoadFailed(f"the loop ended with {done.returncode}:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout)
        result = LoadResult(found["batches"], found["batches"] / found["took_s"])
        sample = sample_of(row, result, {}, before, Clocks.read(None))
        cpu_s = found["cpu_s"] / found["batches"]
        return dataclasses.replace(sample, cpu_s_per_answer=cpu_s, cpu_s_by_role={"loop": cpu_s})


class ModelFiles(Section):
    names = tuple(file.name for file in FILES)
    is_default = False

    def missing(self, name: str) -> str | None:
        """Return the load generator, the runtime, or what writes the file, if it is missing."""
        file = next(one for one in FILES if one.name == name)
        needed = [file.runtime, *(["onnx"] if file.suffix == ".onnx" else [])]
        absent = [one for one in needed if importlib.util.find_spec(one) is None]
        if absent:
            return f"the package {absent[0]} is not installed"
        return load.missing(_row(file, Path()).load)

    def measure(self, plan: Plan) -> RequestPart | None:
        """Measure each file by itself, with a server of its own beside the loop."""
        files = [one for one in FILES if one.name in plan.names]
        if not files or not plan.servers:
            return None
        kinds = {_BARE: Kind.PEER}
        titles, whole, rows = {_BARE: BareLoop.title}, Samples(), []
        for file in files:
            row, samples = _measured(file, plan, titles, kinds)
            rows.append(row)
            whole.by_pair |= samples.by_pair
            whole.failures |= samples.failures
            whole.not_up |= samples.not_up
        return RequestPart(rows, titles, Comparison(kinds, whole), "model_files")


def _row(file: ModelFile, at: Path) -> Row:
    one = GrpcLoad(FilePayload(file, at), connections=2, streams=2)
    title = f"{file.title}, requests of {ROWS} rows, 4 in flight"
    goals = Goals(None, ((_BARE, Goal(0.95, at_least=True)),))
    return Row(file.name, title, one, Measure.THROUGHPUT, goals, file.least_s)


def _measured(
    file: ModelFile, plan: Plan, titles: dict[str, str], kinds: dict[str, Kind]
) -> tuple[Row, Samples]:
    """Return the samples of one file; what was measured is added to ``titles`` and ``kinds``."""
    path = file.made(plan.logs.parent / "model_files")
    row, subjects, not_up = _row(file, path), list[Subject]([BareLoop()]), {}
    with ExitStack() as stack:
        for server in _servers(file, path, plan):
            try:
                server.prepare()
                one = stack.enter_context(running(server, plan.logs, [file.name]))
            except (ServerMissing, ServerFailed) as error:
                not_up[server.name] = str(error)
                plan.say(f"not measured: {server.name} did not come up")
                continue
            subjects.insert(0, LoadedServer(server, {None: one}))
            titles[server.name], kinds[server.name] = server.title, server.kind
        samples = measure([row], subjects, plan.rounds, plan.seconds, plan.say)
    samples.not_up.update(not_up)
    return row, samples


def _servers(file: ModelFile, path: Path, plan: Plan) -> Iterator[FileServer | MLServerFile]:
    chosen, cache = {one.name for one in plan.servers}, PeerCache(plan.logs.parent)
    if MLServerFile.name in chosen and file.runtime == "onnxruntime":
        yield MLServerFile(cache, file, path)
    if FileServer.name in chosen:
        yield FileServer(cache, file, path)


def main(name: str, path: str, seconds: str) -> None:
    file = next(one for one in FILES if one.name == name)
    call, rows = _RUNTIMES[file.runtime](path), file.rows
    for _ in range(_WARM_UP):
        call(rows)
    batches, began, began_cpu = 0, time.perf_counter(), time.process_time()
    while (took_s := time.perf_counter() - began) < float(seconds):
        call(rows)
        batches += 1
    print(json.dumps({"batches": batches, "took_s": took_s, "cpu_s": time.process_time() - began_cpu}))


if __name__ == "__main__":
    main(*sys.argv[1:])
