"""The tensors of requests: made up, or out of a file.

An ``.npz`` file is one request, an array for each input. A ``.json`` file is a v2 request
(``{"inputs": [...]}``), or a list of requests that are sent in turn:
``{"data": [{"x": [[1, 2]]}, {"x": {"content": [3, 4], "shape": [1, 2]}}]}``.
"""

from __future__ import annotations

import enum
import json
import os
import string
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuserve.bench.plan.errors import BenchOptionError, reason
from gpuserve.bench.server.model_metadata import TargetModel, TensorMetadata
from gpuserve_worker.protocol.tensor import BYTES, encode_bytes, numpy_dtype

Array: TypeAlias = NDArray[Any]
_LETTERS = np.array(list(string.ascii_letters))
#: Random integers are small enough for any type, and for most tables that they index.
_MAX_INTEGER = 100


class TensorFill(enum.Enum):
    RANDOM = "random"  #: floats from 0 to 1, integers from 0 to 99, letters
    ZERO = "zero"  #: zeros, empty strings


def made_up(
    model: TargetModel, shapes: Mapping[str, tuple[int, ...]], fill: TensorFill, string_length: int, seed: int
) -> dict[str, Array]:
    """The tensors of one made-up request; BenchOptionError: an input has a datatype that is not known."""
    source = np.random.default_rng(seed)
    return {
        one.name: _tensor(one, shapes[one.name], fill, string_length, source)
        for one in model.inputs
        if one.name in shapes
    }


def _tensor(
    tensor: TensorMetadata,
    shape: tuple[int, ...],
    fill: TensorFill,
    string_length: int,
    source: np.random.Generator,
) -> Array:
    dtype = dtype_of(tensor)
    if tensor.datatype == BYTES:
        length = string_length if fill is TensorFill.RANDOM else 0
        count = int(np.prod(shape, dtype=np.int64))
        letters = source.choice(_LETTERS, (count, length))
        made = np.empty(count, object)
        made[:] = ["".join(row).encode() for row in letters]
        return made.reshape(shape)
    if fill is TensorFill.ZERO:
        return np.zeros(shape, dtype)
    if dtype.kind == "b":
        return source.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return source.integers(0, _MAX_INTEGER, shape).astype(dtype)
    return source.random(shape, np.float32).astype(dtype)


def dtype_of(tensor: TensorMetadata) -> np.dtype[Any]:
    """The numpy type of an input; BenchOptionError: the server's datatype is not one of v2."""
    try:
        return numpy_dtype(tensor.datatype)
    except ValueError:
        raise BenchOptionError(
            "MODEL",
            f"input {tensor.name!r} has the datatype {tensor.datatype}, which is not one of the protocol",
        ) from None


def fitted(model: TargetModel, given: Mapping[str, Any], batch_size: int, option: str) -> dict[str, Array]:
    """The tensors of a request, out of a file; rows are repeated to the batch size; or BenchOptionError."""
    known = {one.name: one for one in model.inputs}
    for name in given:
        if name not in known:
            raise BenchOptionError(option, f"model {model.name!r} has no input {name!r}")
    for one in model.inputs:
        if one.name not in given and not one.optional:
            raise BenchOptionError(option, f"the input {one.name!r} is missing")
    found = {name: _fitted(model, known[name], value, batch_size, option) for name, value in given.items()}
    rows = {len(array) for array in found.values()} if model.max_batch_size else set()
    if len(rows) > 1:
        raise BenchOptionError(
            option, f"the inputs of a request have different numbers of rows: {sorted(rows)}"
        )
    return found


def _fitted(model: TargetModel, tensor: TensorMetadata, value: Any, batch_size: int, option: str) -> Array:
    array = _array(tensor, value, option)
    wanted = tensor.shape
    if model.max_batch_size and array.ndim == len(wanted) - 1:
        array = np.repeat(array[None], batch_size, axis=0)
    fits = array.ndim == len(wanted) and all(
        dim in {-1, got} for dim, got in zip(wanted, array.shape, strict=True)
    )
    if not fits:
        raise BenchOptionError(
            option, f"input {tensor.name!r} has the shape {list(wanted)}, given {list(array.shape)}"
        )
    return array


def _array(tensor: TensorMetadata, value: Any, option: str) -> Array:
    dtype = dtype_of(tensor)
    try:
        array = np.array(value)
        if tensor.datatype == BYTES:
            return array.astype(object)
        if array.dtype.kind not in "biufcV" or array.dtype.hasobject:
            raise ValueError
        return np.ascontiguousarray(array, dtype)
    except (TypeError, ValueError):
        raise BenchOptionError(option, f"input {tensor.name!r} is no array of {tensor.datatype}") from None


def content(array: Array, datatype: str) -> bytes:
    """The bytes of a tensor as the protocol sends them."""
    if datatype == BYTES:
        return encode_bytes(array.ravel().tolist())
    return array.tobytes()


OPTION = "--data"


def read_requests(path: str) -> list[dict[str, Any]]:
    """The requests of a file; BenchOptionError: it cannot be read, or holds something else."""
    try:
        if path.endswith(".npz"):
            with np.load(path, allow_pickle=False) as arrays:
                return [dict(arrays)]
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except OSError as error:
        raise BenchOptionError(OPTION, f"{os.path.basename(path)} cannot be read: {reason(error)}") from None
    except ValueError:
        form = "an .npz file of plain arrays" if path.endswith(".npz") else "JSON"
        raise BenchOptionError(OPTION, f"{os.path.basename(path)} is not {form}") from None
    return _requests(document)


def _requests(document: Any) -> list[dict[str, Any]]:
    match document:
        case {"inputs": [*tensors]}:
            return [dict(map(_v2_tensor, tensors))]
        case {"data": [_, *_] as requests} if all(isinstance(one, dict) for one in requests):
            return [{name: _value(name, value) for name, value in one.items()} for one in requests]
    raise BenchOptionError(OPTION, 'expected {"inputs": [...]} or {"data": [{...}, ...]}')


def _v2_tensor(tensor: Any) -> tuple[str, Any]:
    match tensor:
        case {"name": str(name), "shape": shape, "data": data}:
            return name, _value(name, {"content": data, "shape": shape})
    raise BenchOptionError(OPTION, "every input needs name, shape and data")


def _value(name: str, value: Any) -> Any:
    """A nested list as it is; elements in row-major order with a shape as an array of that shape."""
    match value:
        case {"content": elements, "shape": shape}:
            try:
                return np.array(elements).reshape(shape)
            except (TypeError, ValueError):
                raise BenchOptionError(
                    OPTION, f"the content of {name!r} does not have the shape {shape}"
                ) from None
        case {"content": elements}:
            return elements
        case dict():
            raise BenchOptionError(OPTION, f"{name!r} needs content, and may have a shape")
    return value
