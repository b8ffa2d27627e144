"""Small models of ONNX for tests, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

DATATYPES = {
    "BOOL": TensorProto.BOOL,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "FP16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}
#: Name, element type and shape of an input or output.
Value = tuple[str, int, Sequence[Any]]


def model(
    nodes: Sequence[Any],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    weights: Mapping[str, Any] | None = None,
) -> bytes:
    named = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    infos = [[helper.make_tensor_value_info(*one) for one in values] for values in (inputs, outputs)]
    graph = helper.make_graph(list(nodes), "graph", *infos, named)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(made.SerializeToString())


def identity(datatype: str, shape: Sequence[Any] = ("N", 3)) -> bytes:
    element = DATATYPES[datatype]
    return model(
        [helper.make_node("Identity", ["x"], ["y"])], [("x", element, shape)], [("y", element, shape)]
    )


def mlp(*widths: int) -> bytes:
    """Layers of these widths with random weights, of which all but the last are followed by a ReLU."""
    random = np.random.default_rng(1)
    nodes, weights, at = [], {}, "x"
    for layer, (before, after) in enumerate(pairwise(widths)):
        weights[f"w{layer}"] = random.standard_normal((before, after), np.float32) / np.float32(before) ** 0.5
        weights[f"b{layer}"] = random.standard_normal(after, np.float32)
        last = layer == len(widths) - 2
        nodes.append(helper.make_node("Gemm", [at, f"w{layer}", f"b{layer}"], ["y" if last else f"h{layer}"]))
        if not last:
            nodes.append(helper.make_node("Relu", [f"h{layer}"], [f"r{layer}"]))
        at = f"r{layer}"
    single = TensorProto.FLOAT
    return model(nodes, [("x", single, ["N", widths[0]])], [("y", single, ["N", widths[-1]])], weights)
