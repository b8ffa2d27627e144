"""The model files that are measured, with random weights. A file is made where it is not there yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Rows of a request, and of a batch of the loop.
ROWS = 32
_MLP = (784, 512, 512, 10)
#: Channels of the four stages of ResNet-18, each of two blocks.
_STAGES = (64, 128, 256, 512)
_CLASSES = 1000


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file with one input ``x`` of FP32, of this shape without the batch axis, and one output.

    ``runtime`` names its loop. No run is shorter than ``least_s``.
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
        random = np.random.default_rng(3)
        return random.standard_normal((ROWS, *self.shape), np.float32)

    def made(self, folder: Path) -> Path:
        """The path of the file, which is written where it is not there."""
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
        """Random numbers that keep the scale of what they are multiplied with."""
        from onnx import numpy_helper

        name = f"w{len(self._weights)}"
        values = self._random.standard_normal(shape, np.float32) * np.float32((2 / inputs) ** 0.5)
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def add(self, operator: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """One node; returns the name of its output."""
        from onnx import helper

        name = output or f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def conv(self, x: str, before: int, after: int, size: int, stride: int = 1) -> str:
        """A convolution that keeps the size where the stride is 1, with the bias of a folded batch norm."""
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
        weights = graph.weight(before, after, inputs=before), graph.weight(after, inputs=before)
        x = graph.add("Relu", graph.add("Gemm", x, *weights))
    before, after = _MLP[-2:]
    weights = graph.weight(before, after, inputs=before), graph.weight(after, inputs=before)
    graph.add("Gemm", x, *weights, output="y")
    graph.save(after)


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
    weights = graph.weight(before, _CLASSES, inputs=before), graph.weight(_CLASSES, inputs=before)
    graph.add("Gemm", x, *weights, output="y")
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
FILES = (
    ModelFile("onnx-mlp", f"ONNX, {_MLP_TITLE}", ".onnx", "onnxruntime", _MLP[:1], "y", _onnx_mlp),
    ModelFile(
        "onnx-resnet",
        "ONNX, ResNet-18 at 224 x 224",
        ".onnx",
        "onnxruntime",
        (3, 224, 224),
        "y",
        _onnx_resnet,
        least_s=10.0,
    ),
    ModelFile("pytorch-mlp", f"PyTorch, {_MLP_TITLE}", ".pt2", "torch", _MLP[:1], "OUTPUT__0", _pytorch_mlp),
)
