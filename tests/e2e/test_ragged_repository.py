"""Triton's ``batch_input`` and ``batch_output``: every kind, for an ONNX file and for a model.py."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import GPUSERVE, JSON_LOG, Addresses, serving
from tritonclient.grpc import InferenceServerClient, InferInput

onnx = pytest.importorskip("onnx")

#: The name of the input that each kind makes. Its values, or for c, d and f their sum, are the output o….
KINDS = {
    "a": "BATCH_ELEMENT_COUNT",
    "b": "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "c": "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "d": "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "e": "BATCH_ITEM_SHAPE",
    "f": "BATCH_ITEM_SHAPE_FLATTEN",
}
CONFIG = """max_batch_size: 8
input [{ name: "x", data_type: TYPE_FP32, dims: [-1], allow_ragged_batch: true }]
output [{ name: "y", data_type: TYPE_FP32, dims: [-1] }]
batch_output [{ target_name: "y", source_input: "x" }]
dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: [3] }
"""
MODEL_PY = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(one) for one in requests]

    def answer(self, request):
        values = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "xabcdef"}
        values["d"] = np.array(values["d"].size)
        outputs = [pb_utils.Tensor("y", 2 * values["x"])]
        for name in "abcdef":
            total = np.full((1, 1), values[name].sum(), np.float32)
            outputs.append(pb_utils.Tensor("o" + name, total))
        return pb_utils.InferenceResponse(outputs)
"""


def write_onnx(path: Path) -> None:
    from onnx import TensorProto, helper

    ranks = {"x": 1, "a": 1, "b": 1, "c": 1, "d": 1, "e": 2, "f": 1}
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [f"{name}{axis}" for axis in range(rank)])
        for name, rank in ranks.items()
    ]
    column = [TensorProto.FLOAT, ["rows", 1]]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["x0"])]
    outputs += [helper.make_tensor_value_info(f"o{name}", *column) for name in KINDS]
    nodes = [
        helper.make_node("Add", ["x", "x"], ["y"]),
        helper.make_node("Unsqueeze", ["a", "one"], ["oa"]),
        helper.make_node("Unsqueeze", ["b", "one"], ["ob"]),
        helper.make_node("Identity", ["e"], ["oe"]),
        helper.make_node("Shape", ["oa"], ["shape"]),
        helper.make_node("Shape", ["d"], ["size"]),
        helper.make_node("Cast", ["size"], ["sizes"], to=TensorProto.FLOAT),
    ]
    for name, values in {"c": "c", "d": "sizes", "f": "f"}.items():
        nodes.append(helper.make_node("ReduceSum", [values], [f"s{name}"], keepdims=0))
        nodes.append(helper.make_node("Expand", [f"s{name}", "shape"], [f"o{name}"]))
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(nodes, "g", inputs, outputs, [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, str(path))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    repository = tmp_path_factory.mktemp("repository")
    for name, backend in (("graph", "onnxruntime"), ("python", "python")):
        (repository / name / "1").mkdir(parents=True)
        config = f'backend: "{backend}"\n{CONFIG}'
        for target, kind in KINDS.items():
            fields = f'kind: {kind}, target_name: "{target}", data_type: TYPE_FP32, source_input: "x"'
            config += f"batch_input {{ {fields} }}\n"
            config += f'output {{ name: "o{target}", data_type: TYPE_FP32, dims: [1] }}\n'
        (repository / name / "config.pbtxt").write_text(config)
    write_onnx(repository / "graph/1/model.onnx")
    (repository / "python/1/model.py").write_text(MODEL_PY)
    with serving(GPUSERVE, "serve", str(repository), *JSON_LOG) as addresses:
        yield addresses


def ask(server: Addresses, model: str, length: int) -> dict[str, Any]:
    x = np.arange(length, dtype=np.float32)[None]
    given = InferInput("x", [1, length], "FP32")
    given.set_data_from_numpy(x)
    with InferenceServerClient(server.grpc) as client:
        answer = client.infer(model, [given])
    assert np.array_equal(answer.as_numpy("y"), 2 * x)
    return {name: answer.as_numpy(f"o{name}").item() for name in KINDS}


@pytest.mark.parametrize("model", ["graph", "python"])
def test_every_kind_has_the_values_of_the_batch(server: Addresses, model: str) -> None:
    lengths = (2, 5, 3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda length: ask(server, model, length), lengths))
    assert [one["a"] for one in found] == [one["e"] for one in found] == list(lengths)
    order = sorted(found, key=lambda one: one["b"])
    ends = [sum(one["a"] for one in order[: number + 1]) for number in range(3)]
    assert [one["b"] for one in order] == ends
    if model == "graph":  # which has the values of the whole batch
        assert [(one["c"], one["d"], one["f"]) for one in found] == [(sum(ends), 5, 10)] * 3
    else:
        assert [one["c"] for one in order] == ends
        assert [one["d"] for one in order] == [5, 0, 0]
        assert [one["f"] for one in found] == list(lengths)
