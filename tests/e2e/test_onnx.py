"""ONNX files as they are, by tritonclient, against onnxruntime itself."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx_models import DATATYPES, identity, mlp, model
from serving import GPUSERVE, JSON_LOG, Addresses, serving
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

SINGLE = TensorProto.FLOAT


def two_axes() -> bytes:
    """Two inputs that are free in axes of their own, so none of them is a batch."""
    values = [("a", SINGLE, ["N", "K"]), ("b", SINGLE, ["K", "M"])]
    return model([helper.make_node("MatMul", ["a", "b"], ["y"])], values, [("y", SINGLE, ["N", "M"])])


def pair() -> bytes:
    """One input and two outputs."""
    nodes = [helper.make_node("Neg", ["x"], ["minus"]), helper.make_node("Add", ["x", "x"], ["twice"])]
    outputs = [(name, SINGLE, ["N", 3]) for name in ("minus", "twice")]
    return model(nodes, [("x", SINGLE, ["N", 3])], outputs)


def rows_of_a_table() -> bytes:
    """Rows by their index, of a table that has four."""
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    node = helper.make_node("Gather", ["table", "x"], ["y"])
    outputs = [("y", SINGLE, ["N", 1, 2])]
    return model([node], [("x", TensorProto.INT64, ["N", 1])], outputs, {"table": table})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Addresses, Path]]:
    folder = tmp_path_factory.mktemp("onnx")
    files = {f"same_{one}": identity(one) for one in ("FP32", "FP16", "BF16", "BOOL", "INT64", "BYTES")}
    (folder / "rows.onnx").write_bytes(rows_of_a_table())
    files |= {"mlp": mlp(8, 16, 4), "axes": two_axes(), "fixed": identity("FP32", (2, 3))}
    (folder / "pair.onnx").write_bytes(pair())
    entries = []
    for name, data in files.items():
        (folder / f"{name}.onnx").write_bytes(data)
        entries.append(f"{{name: {name}, callable: {name}.onnx}}")
    entries += [
        "{name: part, callable: pair.onnx, outputs: [{name: twice, dtype: FP32, shape: [3]}]}",
        # Four requests make a batch, whenever they come.
        *(
            f"{{name: {name}, callable: {file}.onnx, max_batch_size: 4, "
            "batching: {max_queue_delay_us: 20000000}}"
            for name, file in (("rows", "rows"), ("texts", "same_BYTES"))
        ),
        "{name: row, callable: mlp.onnx, max_batch_size: 0}",
        "{name: two, callable: mlp.onnx, instances: [{count: 2}], kwargs: {graph_optimization_level: basic}}",
    ]
    (folder / "config.yaml").write_text("models:\n" + "".join(f"  - {one}\n" for one in entries))
    with serving(GPUSERVE, "serve", str(folder / "config.yaml"), *JSON_LOG) as addresses:
        yield addresses, folder


def asked(server: tuple[Addresses, Path], name: str, **arrays: NDArray[Any]) -> NDArray[Any]:
    tensors = []
    for key, array in arrays.items():
        datatype = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16", "object": "BYTES"}.get(
            array.dtype.name, array.dtype.name.upper()
        )
        tensor = InferInput(key, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    with InferenceServerClient(server[0].grpc) as client:
        found: NDArray[Any] = client.infer(name, tensors).as_numpy("y")
    return found


def computed(server: tuple[Addresses, Path], name: str, **arrays: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = onnxruntime.InferenceSession(server[1] / f"{name}.onnx").run(["y"], arrays)[0]
    return found


def test_answers_are_those_of_onnxruntime(server: tuple[Addresses, Path]) -> None:
    rows = np.random.default_rng(2).standard_normal((5, 8), np.float32)
    expected = computed(server, "mlp", x=rows)
    for name in ("mlp", "two"):
        np.testing.assert_allclose(asked(server, name, x=rows), expected, rtol=1e-5)
    np.testing.assert_allclose(asked(server, "row", x=rows[0]), expected[0], rtol=1e-5)


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BF16", "BOOL", "INT64", "BYTES"])
def test_a_datatype_comes_back_as_it_went(server: tuple[Addresses, Path], datatype: str) -> None:
    values: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "FP32": np.float32, "FP16": np.float16}
    array: NDArray[Any] = np.array([[0, 1, 2], [3, 4, 5]], values.get(datatype, np.int64))
    if datatype == "BOOL":
        array = array > 2
    if datatype == "BYTES":
        array = np.array([["", "é", "日本"], ["a", "b", "c"]], object)
    found = asked(server, f"same_{datatype}", x=array)
    if datatype == "BYTES":
        found = np.vectorize(bytes.decode, otypes=[object])(found)
    assert found.tolist() == array.tolist()


def test_outputs_that_the_config_does_not_list_are_not_there(server: tuple[Addresses, Path]) -> None:
    tensor = InferInput("x", [2, 3], "FP32")
    tensor.set_data_from_numpy(np.ones((2, 3), np.float32))
    with InferenceServerClient(server[0].grpc) as client:
        answer = client.infer("part", [tensor])
    assert [one.name for one in answer.get_response().outputs] == ["twice"]
    np.testing.assert_array_equal(answer.as_numpy("twice"), np.full((2, 3), 2, np.float32))


def test_shapes_that_are_no_batch_are_served_as_they_are(server: tuple[Addresses, Path]) -> None:
    a, b = np.ones((2, 3), np.float32), np.full((3, 4), 2, np.float32)
    np.testing.assert_array_equal(asked(server, "axes", a=a, b=b), a @ b)
    np.testing.assert_array_equal(asked(server, "fixed", x=a), a)
    with InferenceServerClient(server[0].grpc) as client:
        sizes = {one: client.get_model_config(one).config.max_batch_size for one in ("mlp", "axes", "fixed")}
        (tensor,) = client.get_model_metadata("axes").outputs
    assert sizes == {"mlp": 32, "axes": 0, "fixed": 0}
    assert list(tensor.shape) == [-1, -1]


def test_what_onnxruntime_refuses_is_said_and_the_next_request_is_served(
    server: tuple[Addresses, Path],
) -> None:
    wrong = np.array([[b"\xff", b"", b""]], object)
    with pytest.raises(InferenceServerException, match="input 'x' must hold UTF-8"):
        asked(server, "same_BYTES", x=wrong)
    short = np.ones((3, 4), np.float32)
    with pytest.raises(InferenceServerException, match="MatMul"):
        asked(server, "axes", a=short, b=short)
    assert asked(server, "axes", a=short, b=short.T).shape == (3, 3)


@pytest.mark.parametrize(
    ("name", "good", "bad", "said"),
    [
        ("rows", np.array([[1]]), np.array([[9]]), "out of data bounds"),
        ("texts", np.array([["a", "b", "c"]], object), np.array([["a", b"\xff", "c"]], object), "UTF-8"),
    ],
)
def test_a_bad_request_fails_no_other_one_of_its_batch(
    server: tuple[Addresses, Path], name: str, good: NDArray[Any], bad: NDArray[Any], said: str
) -> None:
    with ThreadPoolExecutor(4) as clients:
        sent = [clients.submit(asked, server, name, x=one) for one in (good, good, bad, good)]
        with pytest.raises(InferenceServerException, match=said):
            sent[2].result()
        assert all(len(sent[position].result()) == 1 for position in (0, 1, 3))


def test_every_datatype_is_read_from_a_file(tmp_path: Path) -> None:
    from gpuserve.backends.onnx import OnnxModel

    for datatype in DATATYPES:
        (tmp_path / "m.onnx").write_bytes(identity(datatype))
        said = OnnxModel.declare(str(tmp_path / "m.onnx"))
        tensors = [{"name": name, "dtype": datatype, "shape": [3]} for name in "xy"]
        assert said == {"inputs": tensors[:1], "outputs": tensors[1:], "max_batch_size": 32}
