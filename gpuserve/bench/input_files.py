"""The files that requests may come from: what they hold, as plain values by the names of inputs.

An ``.npz`` file is one request, an array for each input. A ``.json`` file is a v2 request
(``{"inputs": [...]}``), or a list of requests that are sent in turn:
``{"data": [{"x": [[1, 2]]}, {"x": {"content": [3, 4], "shape": [1, 2]}}]}``.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from gpuserve.bench.errors import BenchOptionError

OPTION = "--data"


def read_requests(path: str) -> list[dict[str, Any]]:
    """The requests of a file.

    Raises:
        BenchOptionError: it cannot be read, or holds something else.
    """
    try:
        if path.endswith(".npz"):
            with np.load(path, allow_pickle=False) as arrays:
                return [dict(arrays)]
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise BenchOptionError(OPTION, f"{os.path.basename(path)} cannot be read: {reason}") from None
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
