"""The measured model files, made with random weights if they do not exist, and their runtimes in a bare loop:
``python -m benchmarks.model_files.files NAME FILE SECONDS`` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import triton_to_np_dtype

#: Rows of a request, and of a batch of the loop.
ROWS = 32
_MLP = (784, 512, 512, 10)
#: Channels of the four stages of ResNet-18, each of two blocks.
_STAGES = (64, 128, 256, 512)
_CLASSES = 1000
_FEATURES = 20
_WORDS = ["a", "day", "good", "great", "house", "in", "lives", "long", "new", "old", "the", "town"]
_TEXT_WORDS = 24


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file with one input of this datatype and shape without the batch axis, and the output that is asked
    for. What takes BYTES takes texts. A ``suffix`` of "" is a folder.

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
    input: str = "x"
    datatype: str = "FP32"
    #: Names of types that a .skops file may have beside those that skops knows.
    trusted: tuple[str, ...] = ()

    @property
    def rows(self) -> NDArray[Any]:
        """The input of every request and of every turn of the loop."""
        random = np.random.default_rng(3)
        if self.datatype == "BYTES":
            words = random.choice(_WORDS, (ROWS, *self.shape, _TEXT_WORDS))
            return np.array([[" ".join(one[0]).encode()] for one in words], dtype=object)
        return random.standard_normal((ROWS, *self.shape)).astype(triton_to_np_dtype(self.datatype))

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


def _labelled() -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows for scikit-learn to learn from, in three classes."""
    rows = np.random.default_rng(1).standard_normal((2000, _FEATURES))
    return rows, np.digitize(rows[:, 0] + rows[:, 1] * rows[:, 2], [-0.5, 0.5])


def _sklearn_forest(file: Path) -> None:
    import skops.io
    from sklearn.ensemble import RandomForestClassifier

    skops.io.dump(RandomForestClassifier(100, max_depth=10, random_state=1).fit(*_labelled()), file)


def _sklearn_linear(file: Path) -> None:
    import skops.io
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    skops.io.dump(make_pipeline(StandardScaler(), LogisticRegression()).fit(*_labelled()), file)


def _huggingface_text(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    torch.manual_seed(1)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *_WORDS]
    words = Tokenizer(models.WordLevel({one: at for at, one in enumerate(vocabulary)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    words.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    config = BertConfig(vocab_size=len(vocabulary), num_labels=3, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)


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
    ModelFile(
        "sklearn-forest",
        "scikit-learn, forest of 100 trees",
        ".skops",
        "sklearn",
        (_FEATURES,),
        "predict_proba",
        _sklearn_forest,
        input="X",
        datatype="FP64",
        trusted=("sklearn.tree._tree.Tree",),
    ),
    ModelFile(
        "sklearn-linear",
        "scikit-learn, scaler and logistic regression",
        ".skops",
        "sklearn",
        (_FEATURES,),
        "predict_proba",
        _sklearn_linear,
        input="X",
        datatype="FP64",
    ),
    ModelFile(
        "huggingface-text",
        f"Hugging Face, BERT of 6 layers, texts of {_TEXT_WORDS} words",
        "",
        "transformers",
        (1,),
        "scores",
        _huggingface_text,
        least_s=10.0,
        input="text",
        datatype="BYTES",
    ),
)


_WARM_UP = 3


def call_of(file: ModelFile, path: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    return _RUNTIMES[file.runtime](file, path)


def _onnxruntime(_file: ModelFile, path: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda rows: np.asarray(session.run(None, {"x": rows})[0])


def _sklearn(file: ModelFile, path: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    import skops.io

    estimator = skops.io.load(path, trusted=list(file.trusted))
    return lambda rows: np.asarray(estimator.predict_proba(rows))


def _transformers(_file: ModelFile, path: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    from transformers import pipeline

    classify = pipeline("text-classification", model=path, top_k=None)
    labels = list(classify.model.config.label2id)

    def call(rows: NDArray[Any]) -> NDArray[Any]:
        texts = [one.decode() for one in rows[:, 0]]
        found = classify(texts, batch_size=len(texts))
        scores = [{one["label"]: one["score"] for one in row} for row in found]
        return np.array([[row[label] for label in labels] for row in scores])

    return call


def _torch(_file: ModelFile, path: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    import torch

    module = torch.export.load(path).module()

    def call(rows: NDArray[Any]) -> NDArray[Any]:
        with torch.inference_mode():
            return np.asarray(module(torch.from_numpy(rows)))

    return call


_RUNTIMES: dict[str, Callable[[ModelFile, str], Callable[[NDArray[Any]], NDArray[Any]]]] = {
    "onnxruntime": _onnxruntime,
    "sklearn": _sklearn,
    "torch": _torch,
    "transformers": _transformers,
}


def main(name: str, path: str, seconds: str) -> None:
    file = next(one for one in FILES if one.name == name)
    call, rows = call_of(file, path), file.rows
    for _ in range(_WARM_UP):
        call(rows)
    batches, began, began_cpu = 0, time.perf_counter(), time.process_time()
    while (took_s := time.perf_counter() - began) < float(seconds):
        call(rows)
        batches += 1
    result = {"batches": batches, "took_s": took_s, "cpu_s": time.process_time() - began_cpu}
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
