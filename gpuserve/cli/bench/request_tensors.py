"""Tensors of requests, generated or read from a file, and the metadata of a model that decides their shapes.

An ``.npz`` file is one request, an array for each input. A ``.json`` file is a v2 request
(``{"inputs": [...]}``), or a list of requests that are sent in turn:
``{"data": [{"x": [[1, 2]]}, {"x": {"content": [3, 4], "shape": [1, 2]}}]}``.
"""

from __future__ import annotations

import enum
import json
import os
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuserve.cli.bench.load_plan import BenchOptionError, error_reason
from gpuserve_worker.protocol.tensor import BYTES, TensorSpec, element_count, encode_bytes, numpy_dtype

#: The limit of a generated tensor; a larger one is most likely a typing error.
_MAX_ELEMENTS = 1 << 32


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model under load, as the server describes it: shapes have the batch axis if the model batches.
    ``max_batch_size`` is 0 without a batch axis, or if it is unknown.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    decoupled: bool = False


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return shapes given as ``name:3,224,224``, perhaps with no axes. Raise BenchOptionError otherwise."""
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, colon, dims = text.rpartition(":")
        try:
            shape = tuple(int(dim) for dim in dims.split(",")) if dims else ()
        except ValueError:
            shape = (-1,)
        if not (colon and name) or any(dim < 0 for dim in shape):
            raise BenchOptionError("--shape", f"expected name:3,224,224, given {text!r}")
        if name in found:
            raise BenchOptionError("--shape", f"{name!r} is given twice")
        found[name] = shape
    return found


def request_shapes(
    model: TargetModel, shapes: Mapping[str, tuple[int, ...]], batch_size: int
) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every input of a request. ``shapes`` have no batch axis; an optional input
    without a shape is left out. Raise BenchOptionError if a shape is missing or does not fit.
    """
    known = {one.name for one in model.inputs}
    for name in shapes:
        if name not in known:
            inputs = ", ".join(sorted(known)) or "none"
            raise BenchOptionError("--shape", f"model {model.name!r} has no input {name!r}, only {inputs}")
    if batch_size < 1:
        raise BenchOptionError("--batch-size", f"expected at least 1, given {batch_size}")
    if not model.max_batch_size and batch_size > 1:
        raise BenchOptionError("--batch-size", f"model {model.name!r} does not batch, given {batch_size}")
    if model.max_batch_size and batch_size > model.max_batch_size:
        text = f"model {model.name!r} takes at most {model.max_batch_size}, given {batch_size}"
        raise BenchOptionError("--batch-size", text)
    return {
        one.name: _request_shape(model, one, shapes.get(one.name), batch_size)
        for one in model.inputs
        if not one.optional or one.name in shapes
    }


def _request_shape(
    model: TargetModel, tensor: TensorSpec, given: tuple[int, ...] | None, batch_size: int
) -> tuple[int, ...]:
    batch = (batch_size,) if model.max_batch_size else ()
    declared = tensor.shape[1:] if batch else tensor.shape
    shape = declared if given is None else given
    pairs = zip(declared, shape, strict=False)
    if len(shape) != len(declared) or any(dim not in {-1, got} for dim, got in pairs):
        text = f"input {tensor.name!r} has the shape {list(declared)}, given {list(shape)}"
        raise BenchOptionError("--shape", text)
    if -1 in shape:
        example = ",".join(str(dim) if dim >= 0 else "16" for dim in declared)
        raise BenchOptionError(
            "--shape",
            f"input {tensor.name!r} has the shape {list(declared)}, where -1 is any size: "
            f"give one, such as --shape {tensor.name}:{example}",
        )
    if element_count((*batch, *shape)) > _MAX_ELEMENTS:
        text = f"input {tensor.name!r} would have more than {_MAX_ELEMENTS} elements"
        raise BenchOptionError("--shape", text)
    return (*batch, *shape)


Array: TypeAlias = NDArray[Any]
_LETTERS = np.array(list(string.ascii_letters))
#: Random integers below this fit every type, and most embedding tables that they index.
_MAX_INTEGER = 100


class TensorFill(enum.Enum):
    RANDOM = "random"  #: floats from 0 to 1, integers from 0 to 99, letters
    ZERO = "zero"  #: zeros, empty strings


def generated_tensors(
    model: TargetModel, shapes: Mapping[str, tuple[int, ...]], fill: TensorFill, string_length: int, seed: int
) -> dict[str, Array]:
    """Return the tensors of a generated request. Raise BenchOptionError for an unknown datatype."""
    source = np.random.default_rng(seed)
    return {
        one.name: _generated_tensor(one, shapes[one.name], fill, string_length, source)
        for one in model.inputs
        if one.name in shapes
    }


def _generated_tensor(
    tensor: TensorSpec,
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


def dtype_of(tensor: TensorSpec) -> np.dtype[Any]:
    """Return the numpy type of an input; raise BenchOptionError if its datatype is not one of v2."""
    try:
        return numpy_dtype(tensor.datatype)
    except ValueError:
        text = f"input {tensor.name!r} has the datatype {tensor.datatype}, which is not one of the protocol"
        raise BenchOptionError("MODEL", text) from None


_DATA = "--data"


def fitted_tensors(model: TargetModel, given: Mapping[str, Any], batch_size: int) -> dict[str, Array]:
    """Return the tensors of a request from a file, with rows repeated to the batch size. Raise
    BenchOptionError if they do not fit the model.
    """
    known = {one.name: one for one in model.inputs}
    for name in given:
        if name not in known:
            raise BenchOptionError(_DATA, f"model {model.name!r} has no input {name!r}")
    for one in model.inputs:
        if one.name not in given and not one.optional:
            raise BenchOptionError(_DATA, f"the input {one.name!r} is missing")
    found = {name: _fitted_tensor(model, known[name], value, batch_size) for name, value in given.items()}
    rows = {len(array) for array in found.values()} if model.max_batch_size else set()
    if len(rows) > 1:
        text = f"the inputs of a request have different numbers of rows: {sorted(rows)}"
        raise BenchOptionError(_DATA, text)
    return found


def _fitted_tensor(model: TargetModel, tensor: TensorSpec, value: Any, batch_size: int) -> Array:
    array = _typed_array(tensor, value)
    wanted = tensor.shape
    if model.max_batch_size and array.ndim == len(wanted) - 1:
        array = np.repeat(array[None], batch_size, axis=0)
    dims = zip(wanted, array.shape, strict=False)
    if array.ndim != len(wanted) or any(dim not in {-1, got} for dim, got in dims):
        text = f"input {tensor.name!r} has the shape {list(wanted)}, given {list(array.shape)}"
        raise BenchOptionError(_DATA, text)
    return array


def _typed_array(tensor: TensorSpec, value: Any) -> Array:
    dtype = dtype_of(tensor)
    try:
        array = np.array(value)
        if tensor.datatype == BYTES:
            return array.astype(object)
        if array.dtype.kind not in "biufcV" or array.dtype.hasobject:
            raise ValueError
        return np.ascontiguousarray(array, dtype)
    except (TypeError, ValueError):
        text = f"input {tensor.name!r} is no array of {tensor.datatype}"
        raise BenchOptionError(_DATA, text) from None


def tensor_bytes(array: Array, datatype: str) -> bytes:
    """Return the bytes of a tensor in the encoding of the protocol."""
    if datatype == BYTES:
        return encode_bytes(array.ravel().tolist())
    return array.tobytes()


def read_requests(path: str) -> list[dict[str, Any]]:
    """Return the requests of a file. Raise BenchOptionError if it is unreadable or has another form."""
    try:
        if path.endswith(".npz"):
            with np.load(path, allow_pickle=False) as arrays:
                return [dict(arrays)]
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except OSError as error:
        text = f"{os.path.basename(path)} cannot be read: {error_reason(error)}"
        raise BenchOptionError(_DATA, text) from None
    except ValueError:
        form = "an .npz file of plain arrays" if path.endswith(".npz") else "JSON"
        raise BenchOptionError(_DATA, f"{os.path.basename(path)} is not {form}") from None
    match document:
        case {"inputs": [*tensors]}:
            return [dict(map(_v2_tensor, tensors))]
        case {"data": [_, *_] as requests} if all(isinstance(one, dict) for one in requests):
            return [{name: _tensor_value(name, value) for name, value in one.items()} for one in requests]
    raise BenchOptionError(_DATA, 'expected {"inputs": [...]} or {"data": [{...}, ...]}')


def _v2_tensor(tensor: Any) -> tuple[str, Any]:
    match tensor:
        case {"name": str(name), "shape": shape, "data": data}:
            return name, _tensor_value(name, {"content": data, "shape": shape})
    raise BenchOptionError(_DATA, "every input needs name, shape and data")


def _tensor_value(name: str, value: Any) -> Any:
    """Return a nested list unchanged, and elements in row-major order with a shape as an array."""
    match value:
        case {"content": elements, "shape": shape}:
            try:
                return np.array(elements).reshape(shape)
            except (TypeError, ValueError):
                text = f"the content of {name!r} does not have the shape {shape}"
                raise BenchOptionError(_DATA, text) from None
        case {"content": elements}:
            return elements
        case dict():
            raise BenchOptionError(_DATA, f"{name!r} needs content, and may have a shape")
    return value
