"""The batches that an instance runs before it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decorating import model

from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.inference.warmup import warmup_batches
from gpuserve_worker.protocol.tensor import ITEMSIZE, encode_bytes, numpy_dtype

BATCHING = model()
SINGLE = model(max_batch_size=0)


def batches(*inputs: Any, size: int = 2, count: int = 1, served: Any = BATCHING) -> list[Batch]:
    return list(warmup_batches((("w", size, count, inputs),), served))


def array(datatype: str, shape: tuple[int, ...], values: str, path: Any = "", **more: Any) -> Any:
    (batch,) = batches(("x", datatype, shape, values, str(path)), **more)
    return batch.arrays["x"]


def saved(folder: Path, values: Any) -> Path:
    path = folder / "x.npy"
    np.save(path, values)
    return path


def test_every_warmup_runs_as_often_as_it_says_and_a_batch_is_one_request() -> None:
    raw = (
        ("first", 1, 2, (("x", "FP32", (3,), "zero", ""), ("k", "INT32", (), "random", ""))),
        ("second", 4, 1, (("x", "FP32", (5,), "zero", ""),)),
    )
    one, two, three = warmup_batches(raw, BATCHING)
    assert [one.rows, two.rows, three.rows] == [(1,), (1,), (4,)]
    assert {name: value.shape for name, value in one.arrays.items()} == {"x": (1, 3), "k": (1,)}
    assert (one.output_names, one.batching) == (("y",), True)
    one.arrays["x"] += 1
    assert not two.arrays["x"].any()
    (request,) = three.as_list()
    assert (request["x"].shape, request.requested_output_names) == ((4, 5), ["y"])


@pytest.mark.parametrize("values", ["zero", "random"])
@pytest.mark.parametrize("datatype", ITEMSIZE)
def test_values_of_every_datatype(datatype: str, values: str) -> None:
    made = array(datatype, (50,), values, size=4)
    assert made.shape == (4, 50)
    assert made.dtype == numpy_dtype(datatype)
    assert made.flags.writeable
    if values == "zero":
        assert set(made.ravel().tolist()) == {b"" if datatype == "BYTES" else 0}
    else:
        assert len(set(made.ravel().tolist())) > 1
        assert array(datatype, (50,), values, size=4).tolist() == made.tolist()
    assert array(datatype, (), values, served=SINGLE).shape == ()


def test_random_values_are_of_a_sensible_range() -> None:
    assert np.ptp(array("INT8", (1000,), "random").astype(int)) > 200
    identifiers = array("INT64", (1000,), "random")
    assert 0 <= identifiers.min() <= identifiers.max() < 100
    floats = array("FP64", (1000,), "random")
    assert 0 <= floats.min() <= floats.max() < 1
    words = array("BYTES", (100,), "random").ravel().tolist()
    assert {len(one) for one in words} <= set(range(8, 33))
    assert all(one.isalnum() for one in words)


def test_a_model_that_does_not_batch_gets_no_batch_axis(tmp_path: Path) -> None:
    (batch,) = batches(("x", "FP32", (3,), "zero", ""), size=2, served=SINGLE)
    assert batch.arrays["x"].shape == (3,)
    assert batch.rows == (1,)
    assert not batch.batching
    assert array("FP32", (3,), "random", served=SINGLE).shape == (3,)
    assert array("FP32", (2,), "file", saved(tmp_path, [1, 2]), served=SINGLE).tolist() == [1, 2]


ONE, TWO, THREE, FOUR = [1, 2], [3, 4], [5, 6], [7, 8]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([ONE, TWO, THREE], [ONE, TWO, THREE]),
        (ONE, [ONE, ONE, ONE]),
        ([ONE, TWO], [ONE, TWO, ONE]),
        ([ONE, TWO, THREE, FOUR], [ONE, TWO, THREE]),
    ],
    ids=["exact", "one sample", "repeated", "cut"],
)
def test_a_file_of_each_shape_that_fits(tmp_path: Path, values: Any, expected: Any) -> None:
    made = array("FP32", (2,), "file", saved(tmp_path, values), size=3)
    assert (made.tolist(), made.dtype) == (expected, np.float32)


def test_a_file_may_tell_the_size_of_an_axis_and_have_byte_strings(tmp_path: Path) -> None:
    assert array("FP32", (-1,), "file", saved(tmp_path, [1, 2, 3])).shape == (2, 3)
    for values in (np.array([b"a"]), np.array(["a"])):
        made = array("BYTES", (1,), "file", saved(tmp_path, values))
        assert (made.tolist(), made.dtype) == ([[b"a"], [b"a"]], object)


@pytest.mark.parametrize(
    ("values", "datatype", "text"),
    [
        ([1, 2, 3], "FP32", r"must have the shape \[2\] or, with rows, \[n, 2\], but its shape is \[3\]"),
        ([[[1, 2]]], "FP32", r"but its shape is \[1, 1, 2\]"),
        (np.zeros((0, 2)), "FP32", r"but its shape is \[0, 2\]"),
        ([b"a", b"b"], "FP32", "must hold FP32 values, but holds"),
        ([1, 2], "BYTES", "must hold BYTES values, but holds int64"),
        (np.array([b"pickled"], object), "BYTES", "cannot be read: it is no"),
    ],
    ids=["width", "axes", "no rows", "bytes for floats", "integers for bytes", "pickled"],
)
def test_a_file_that_does_not_fit(tmp_path: Path, values: Any, datatype: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^Warm-up 'w': input 'x': the .*file .*{text}"):
        array(datatype, (2,), "file", saved(tmp_path, values))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("no array")
    np.savez(tmp_path / "x.npz", x=np.zeros(2))
    (tmp_path / "sample").write_bytes(b"\0\0\0\0\0")
    for name, datatype, text in (
        ("absent.npy", "FP32", "cannot be read: No such file or directory"),
        ("absent", "FP32", "cannot be read: No such file or directory"),
        ("text.npy", "FP32", r"cannot be read: it is no \.npy file of numbers or byte strings"),
        ("x.npz", "FP32", r"is an \.npz archive; expected one array"),
        ("sample", "FP32", r"has 5 bytes, which are no FP32 of shape \[2\]; expected just"),
        ("sample", "BYTES", r"has 5 bytes, which are no BYTES of shape \[2\]; expected just"),
    ):
        with pytest.raises(ValueError, match=text):
            array(datatype, (2,), "file", tmp_path / name)


def test_a_shape_has_to_be_complete() -> None:
    with pytest.raises(ValueError, match=r"'x' must have a size on every axis, but its shape is \[-1\]"):
        array("FP32", (-1,), "zero")
    with pytest.raises(ValueError, match="zero, random or file values, got 'ones'"):
        array("FP32", (1,), "ones")


def test_a_file_of_bytes_is_one_sample_as_requests_have_it(tmp_path: Path) -> None:
    path = tmp_path / "sample"
    path.write_bytes(np.array([1, 2], np.float32).tobytes())
    assert array("FP32", (2,), "file", path).tolist() == [[1, 2], [1, 2]]
    path.write_bytes(encode_bytes([b"a", b"bc"]))
    assert array("BYTES", (2,), "file", path).tolist() == [[b"a", b"bc"], [b"a", b"bc"]]
