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


def test_every_warmup_runs_as_often_as_it_says() -> None:
    raw = (
        ("first", 1, 2, (("x", "FP32", (3,), "zero", ""), ("k", "INT32", (), "random", ""))),
        ("second", 4, 1, (("x", "FP32", (5,), "zero", ""),)),
    )
    one, two, three = warmup_batches(raw, BATCHING)
    assert [one.rows, two.rows, three.rows] == [(1,), (1,), (4,)]
    assert {name: value.shape for name, value in one.arrays.items()} == {"x": (1, 3), "k": (1,)}
    assert three.arrays["x"].shape == (4, 5)
    assert one.output_names == ("y",)
    assert one.batching
    one.arrays["x"] += 1
    assert not two.arrays["x"].any()


def test_a_batch_is_one_request() -> None:
    (batch,) = batches(("x", "FP32", (1,), "zero", ""), size=3)
    (request,) = batch.as_list()
    assert request["x"].shape == (3, 1)
    assert request.requested_output_names == ["y"]


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


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 4], [5, 6]]),
        ([1, 2], [[1, 2], [1, 2], [1, 2]]),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4], [1, 2]]),
        ([[1, 2], [3, 4], [5, 6], [7, 8]], [[1, 2], [3, 4], [5, 6]]),
    ],
    ids=["exact", "one sample", "repeated", "cut"],
)
def test_a_file_of_each_shape_that_fits(tmp_path: Path, values: Any, expected: Any) -> None:
    made = array("FP32", (2,), "file", saved(tmp_path, values), size=3)
    assert made.tolist() == expected
    assert made.dtype == np.float32


def test_a_file_may_tell_the_size_of_an_axis(tmp_path: Path) -> None:
    assert array("FP32", (-1,), "file", saved(tmp_path, [1, 2, 3])).shape == (2, 3)


@pytest.mark.parametrize("values", [np.array([b"a"]), np.array(["a"])], ids=["bytes", "text"])
def test_a_file_of_byte_strings(tmp_path: Path, values: Any) -> None:
    made = array("BYTES", (1,), "file", saved(tmp_path, values))
    assert made.tolist() == [[b"a"], [b"a"]]
    assert made.dtype == object


@pytest.mark.parametrize(
    ("values", "datatype", "text"),
    [
        ([1, 2, 3], "FP32", r"must have the shape \[2\] or, with rows, \[n, 2\], but its shape is \[3\]"),
        ([[[1, 2]]], "FP32", r"but its shape is \[1, 1, 2\]"),
        (np.zeros((0, 2)), "FP32", r"but its shape is \[0, 2\]"),
        ([b"a", b"b"], "FP32", "must hold FP32 values, but holds"),
        ([1, 2], "BYTES", "must hold BYTES values, but holds int64"),
    ],
    ids=["width", "axes", "no rows", "bytes for floats", "integers for bytes"],
)
def test_a_file_that_does_not_fit(tmp_path: Path, values: Any, datatype: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^Warm-up 'w': input 'x': the .*file .*{text}"):
        array(datatype, (2,), "file", saved(tmp_path, values))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file or directory"):
        array("FP32", (2,), "file", tmp_path / "absent.npy")
    text = tmp_path / "text.npy"
    text.write_text("no array")
    with pytest.raises(ValueError, match=r"cannot be read: it is no \.npy file of numbers or byte strings"):
        array("FP32", (2,), "file", text)
    with pytest.raises(ValueError, match="cannot be read: it is no"):
        array("BYTES", (1,), "file", saved(tmp_path, np.array([b"pickled"], object)))
    archive = tmp_path / "x.npz"
    np.savez(archive, x=np.zeros(2))
    with pytest.raises(ValueError, match=r"is an \.npz archive; expected one array"):
        array("FP32", (2,), "file", archive)


def test_a_file_of_bytes_is_one_sample_as_requests_have_it(tmp_path: Path) -> None:
    path = tmp_path / "sample"
    path.write_bytes(np.array([1, 2], np.float32).tobytes())
    assert array("FP32", (2,), "file", path).tolist() == [[1, 2], [1, 2]]
    path.write_bytes(encode_bytes([b"a", b"bc"]))
    assert array("BYTES", (2,), "file", path).tolist() == [[b"a", b"bc"], [b"a", b"bc"]]


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_a_file_of_bytes_that_does_not_fit(tmp_path: Path, datatype: str) -> None:
    path = tmp_path / "sample"
    path.write_bytes(b"\0\0\0\0\0")
    with pytest.raises(
        ValueError, match=rf"has 5 bytes, which are no {datatype} of shape \[2\]; expected just"
    ):
        array(datatype, (2,), "file", path)
    with pytest.raises(ValueError, match="cannot be read: No such file or directory"):
        array(datatype, (2,), "file", tmp_path / "absent")


def test_a_shape_has_to_be_complete() -> None:
    with pytest.raises(ValueError, match=r"'x' must have a size on every axis, but its shape is \[-1\]"):
        array("FP32", (-1,), "zero")
    with pytest.raises(ValueError, match="zero, random or file values, got 'ones'"):
        array("FP32", (1,), "ones")
