"""The inputs of a call: what was given by position or by name, to checked arrays by name. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuserve.client.config import TensorSpec
from gpuserve.client.exceptions import ClientEncodingError, ClientValueError
from gpuserve_worker.tensor import datatype_of

Arrays = dict[str, NDArray[Any]]


def arrays_by_name(
    model_name: str, declared: Sequence[TensorSpec] | None, given: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """The inputs by name. By position they stand for the declared ones in order; the last may be left out.

    Raises:
        ClientValueError: both ways at once, no input for a model that has some, or more than it has.
    """
    if given and named:
        raise ClientValueError("Inputs are given either by position or by name, not both ways in one call")
    if named:
        return dict(named)
    count = len(declared or ())
    if not given and count:
        raise ClientValueError(f"Provide input data: model {model_name} has {count} inputs, none was given")
    if len(given) > count:
        raise ClientValueError(f"Model {model_name} has {count} inputs, {len(given)} were given")
    return {spec.name: array for spec, array in zip(declared or (), given, strict=False)}


def datatype_of_input(name: str, array: Any) -> str:
    """The v2 datatype of an input.

    Raises:
        ClientValueError: it is no array, or of a type that the protocol does not know.
        ClientEncodingError: it is an array of text, or of other objects than ``bytes``.
    """
    if not isinstance(array, np.ndarray):
        raise ClientValueError(f"Input {name} is not a numpy array. Got {type(array)} instead.")
    kind = array.dtype.kind
    if kind == "U":
        raise ClientEncodingError(
            f"Unicode inputs are not supported. Encode the array of input {name!r}, for example with "
            "np.char.encode(array, 'utf-8')"
        )
    if kind == "O":
        _check_bytes(name, array)
    try:
        return datatype_of(array.dtype)
    except ValueError:
        raise ClientValueError(
            f"Input {name!r} has dtype {array.dtype}, which the protocol has no datatype for"
        ) from None


def with_batch_axis(arrays: Arrays) -> Arrays:
    """Each array as a batch of one."""
    return {name: array[np.newaxis] for name, array in arrays.items()}


def without_batch_axis(arrays: Arrays) -> Arrays:
    """The one row of each array."""
    return {name: array[0] for name, array in arrays.items()}


def _check_bytes(name: str, array: NDArray[Any]) -> None:
    for one in array.flat:
        if not isinstance(one, bytes):
            raise ClientEncodingError(
                f"Input {name!r} has dtype=object, whose elements must be encoded strings, which is bytes, "
                f"and one of them is of type {type(one).__name__}"
            )
