"""What requests hold: shapes, made-up tensors, files, and the bytes that are sent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from gpuserve.cli.bench.load_plan import BenchOptionError
from gpuserve.cli.bench.request_payloads import (
    Target,
    TensorPlace,
    Tensors,
    grpc_message,
    http_bytes,
    http_infer,
    http_stream,
    parse_url,
)
from gpuserve.cli.bench.request_tensors import (
    TargetModel,
    TensorFill,
    fitted_tensors,
    generated_tensors,
    parse_shapes,
    read_requests,
    request_shapes,
    tensor_bytes,
)
from gpuserve_worker.protocol.tensor import TensorSpec, decode_bytes

MODEL = TargetModel(
    "m",
    (TensorSpec("x", "FP32", (-1, -1, 3)), TensorSpec("o", "BYTES", (-1, 1), optional=True)),
    (TensorSpec("y", "FP32", (-1, 1)),),
    max_batch_size=8,
)
FLAT = TargetModel("flat", (TensorSpec("n", "INT8", (2,)),), ())


def test_shapes_of_a_request() -> None:
    assert request_shapes(MODEL, {"x": (4, 3)}, 2) == {"x": (2, 4, 3)}
    assert request_shapes(MODEL, {"x": (4, 3), "o": (1,)}, 1) == {"x": (1, 4, 3), "o": (1, 1)}
    assert request_shapes(FLAT, {}, 1) == {"n": (2,)}
    assert parse_shapes(["a:b:3,4", "s:"]) == {"a:b": (3, 4), "s": ()}


@pytest.mark.parametrize(
    ("model", "shapes", "batch_size", "said"),
    [
        (MODEL, {}, 1, r"--shape: input 'x' has the shape \[-1, 3\].*such as --shape x:16,3"),
        (MODEL, {"x": (4, 4)}, 1, r"has the shape \[-1, 3\], given \[4, 4\]"),
        (MODEL, {"x": (4,)}, 1, r"given \[4\]"),
        (MODEL, {"z": (4,)}, 1, "has no input 'z', only o, x"),
        (MODEL, {"x": (4, 3)}, 9, "--batch-size: model 'm' takes at most 8, given 9"),
        (MODEL, {"x": (4, 3)}, 0, "--batch-size: expected at least 1"),
        (FLAT, {}, 2, "--batch-size: model 'flat' does not batch"),
        (MODEL, {"x": (1 << 40, 3)}, 1, "more than"),
    ],
)
def test_wrong_shapes(model: TargetModel, shapes: Any, batch_size: int, said: str) -> None:
    with pytest.raises(BenchOptionError) as raised:
        request_shapes(model, shapes, batch_size)
    assert re.search(said, str(raised.value))


@pytest.mark.parametrize("text", ["x", "x:a", ":3", "x:-1", "x:3,"])
def test_shapes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(BenchOptionError, match="expected name:3,224,224"):
        parse_shapes([text])


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT64", "FP16", "BF16", "FP32", "FP64", "BYTES"])
def test_made_up_tensors_of_every_kind(datatype: str) -> None:
    model = TargetModel("m", (TensorSpec("x", datatype, (2, 3)),), ())
    for fill in TensorFill:
        one = generated_tensors(model, {"x": (2, 3)}, fill, 5, 1)["x"]
        again = generated_tensors(model, {"x": (2, 3)}, fill, 5, 1)["x"]
        data = tensor_bytes(one, datatype)
        assert one.shape == (2, 3)
        assert data == tensor_bytes(again, datatype)
        if datatype == "BYTES":
            length = 5 if fill is TensorFill.RANDOM else 0
            assert [len(text) for text in decode_bytes(data, 6)] == [length] * 6
        elif fill is TensorFill.ZERO:
            assert not any(data)


def test_files(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    np.savez(tmp_path / "x.npz", x=x)
    listed = {"data": [{"x": x.tolist()}, {"x": {"content": list(range(6)), "shape": [1, 2, 3]}}]}
    v2 = {"inputs": [{"name": "x", "shape": [1, 2, 3], "datatype": "FP32", "data": list(range(6))}]}
    (tmp_path / "list.json").write_text(json.dumps(listed))
    (tmp_path / "v2.json").write_text(json.dumps(v2))
    for name, count in (("x.npz", 1), ("list.json", 2), ("v2.json", 1)):
        requests = [fitted_tensors(MODEL, one, 1) for one in read_requests(str(tmp_path / name))]
        assert len(requests) == count
        assert all(np.array_equal(one["x"], x) and one["x"].dtype == np.float32 for one in requests)


def test_a_row_without_the_batch_axis_is_repeated() -> None:
    found = fitted_tensors(MODEL, {"x": [[1, 2, 3]], "o": ["text"]}, 4)
    assert found["x"].shape == (4, 1, 3)
    assert found["o"].shape == (4, 1)
    assert decode_bytes(tensor_bytes(found["o"], "BYTES"), 4) == [b"text"] * 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("{}", 'expected {"inputs"'),
        ('{"data": []}', 'expected {"inputs"'),
        ('{"inputs": [{}]}', "every input needs name"),
        ('{"data": [{"x": {"content": [1], "shape": [2]}}]}', "the content of 'x' does not have the shape"),
        ('{"data": [{"x": {}}]}', "'x' needs content"),
    ],
)
def test_files_that_cannot_be_read(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(BenchOptionError, match=said):
        read_requests(str(path))
    with pytest.raises(BenchOptionError, match="cannot be read: no such file"):
        read_requests(str(tmp_path / "absent.json"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "the input 'x' is missing"),
        ({"x": [[[1, 2, 3]]], "z": 1}, "has no input 'z'"),
        ({"x": [[1, 2]]}, r"given \[1, 1, 2\]"),
        ({"x": "text"}, "is no array of FP32"),
        ({"x": [[1], [1, 2]]}, "is no array of FP32"),
        ({"x": [[[1, 2, 3]]], "o": [["a"], ["b"]]}, "different numbers of rows"),
    ],
)
def test_values_that_do_not_fit(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BenchOptionError, match=said):
        fitted_tensors(MODEL, given, 1)


def test_the_bytes_of_requests() -> None:
    target = Target(parse_url("http://host:9", None), "m m", "2", (("authorization", "x"),))
    model = TargetModel("m m", (TensorSpec("x", "INT32", (2,)), TensorSpec("z", "INT32", (1,))), ())
    arrays = {"x": np.array([1, 2], np.int32), "z": np.array([3], np.int32)}
    tensors = Tensors(arrays, {"z": TensorPlace("in", 64, 4)}, {"y": TensorPlace("out", 0, 8)})
    request = service_pb2.ModelInferRequest.FromString(grpc_message(target, model, tensors))
    assert (request.model_name, request.model_version) == ("m m", "2")
    assert list(request.raw_input_contents) == [arrays["x"].tobytes()]
    assert request.inputs[1].parameters["shared_memory_offset"].int64_param == 64
    assert request.outputs[0].parameters["shared_memory_byte_size"].int64_param == 8
    head, body = http_bytes(target, http_infer(target, model, tensors)).split(b"\r\n\r\n", 1)
    assert head.startswith(b"POST /v2/models/m%20m/versions/2/infer HTTP/1.1\r\nhost: host:9\r\n")
    assert b"authorization: x" in head
    assert body.endswith(arrays["x"].tobytes())
    document = json.loads(body[: -arrays["x"].nbytes])
    assert [one["parameters"] for one in document["inputs"]] == [
        {"binary_data_size": 8},
        {"shared_memory_region": "in", "shared_memory_byte_size": 4, "shared_memory_offset": 64},
    ]
    stream = http_stream(target, Tensors(arrays))
    assert stream.path == "/v2/models/m%20m/versions/2/generate_stream"
    assert json.loads(stream.body) == {"x": [1, 2], "z": 3}
