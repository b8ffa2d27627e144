"""Writes cities.onnx: from a place on the globe to the nearest of six cities, and how far that is.

A model that was trained elsewhere comes from torch.onnx.export, skl2onnx or tf2onnx; this one is small enough
to be written by hand.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

EARTH_RADIUS_KM = 6371.0
CITIES = {
    "Cairo": (30.04, 31.24),
    "Lima": (-12.05, -77.04),
    "Nairobi": (-1.29, 36.82),
    "Paris": (48.86, 2.35),
    "Sydney": (-33.87, 151.21),
    "Tokyo": (35.68, 139.69),
}


def directions(places: NDArray[np.float64]) -> NDArray[np.float32]:
    """Unit vectors, [n, 3], of latitudes and longitudes in degrees, [n, 2]."""
    latitude, longitude = np.radians(places).T
    level = np.cos(latitude)
    parts = [level * np.cos(longitude), level * np.sin(longitude), np.sin(latitude)]
    return np.stack(parts, axis=1).astype(np.float32)


def model() -> onnx.ModelProto:
    """Input ``place``: degrees, [rows, 2]. Outputs ``city``: text, and ``km``, each [rows, 1]."""
    node = helper.make_node
    nodes = [
        node("Mul", ["place", "radians"], ["angles"]),
        node("Split", ["angles"], ["latitude", "longitude"], axis=1, num_outputs=2),
        node("Cos", ["latitude"], ["level"]),
        node("Cos", ["longitude"], ["east"]),
        node("Sin", ["longitude"], ["north"]),
        node("Mul", ["level", "east"], ["x"]),
        node("Mul", ["level", "north"], ["y"]),
        node("Sin", ["latitude"], ["z"]),
        node("Concat", ["x", "y", "z"], ["direction"], axis=1),
        node("MatMul", ["direction", "cities"], ["cosines"]),
        node("ArgMax", ["cosines"], ["nearest"], axis=1),
        node("Gather", ["names", "nearest"], ["city"]),
        node("ReduceMax", ["cosines", "last_axis"], ["cosine"]),
        node("Clip", ["cosine", "least", "most"], ["within"]),
        node("Acos", ["within"], ["angle"]),
        node("Mul", ["angle", "radius"], ["km"]),
    ]
    constants = {
        "radians": np.float32(np.pi / 180),
        "cities": directions(np.array(list(CITIES.values()))).T.copy(),
        "names": np.array(list(CITIES), object),
        "last_axis": np.array([1]),
        "least": np.float32(-1),
        "most": np.float32(1),
        "radius": np.float32(EARTH_RADIUS_KM),
    }
    graph = helper.make_graph(
        nodes,
        "cities",
        [helper.make_tensor_value_info("place", TensorProto.FLOAT, ["rows", 2])],
        [
            helper.make_tensor_value_info("city", TensorProto.STRING, ["rows", 1]),
            helper.make_tensor_value_info("km", TensorProto.FLOAT, ["rows", 1]),
        ],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=Path(__file__).with_name("cities.onnx"))
    file = parser.parse_args().file
    made = model()
    onnx.checker.check_model(made)
    onnx.save(made, str(file))
    print(f"written: {file}")


if __name__ == "__main__":
    main()
