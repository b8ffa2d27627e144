"""Requests as bytes: tensors in the message, or named by the region that they lie in. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

_DATATYPES = {"float32": "FP32", "int32": "INT32", "uint8": "UINT8"}


@dataclass(frozen=True, slots=True)
class InRegion:
    """A tensor of ``shape`` at the start of a client's region."""

    region: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def with_bytes(model: str, tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """A ModelInferRequest that carries its tensors."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in tensors.items():
        request.inputs.add(name=name, datatype=_DATATYPES[array.dtype.name], shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return bytes(request.SerializeToString())


def in_regions(model: str, inputs: Mapping[str, InRegion], outputs: Mapping[str, InRegion]) -> bytes:
    """A ModelInferRequest whose tensors lie in regions, as those of its answer will."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, one in inputs.items():
        added = request.inputs.add(name=name, datatype=_DATATYPES[one.dtype], shape=one.shape)
        _place(added.parameters, one)
    for name, one in outputs.items():
        _place(request.outputs.add(name=name).parameters, one)
    return bytes(request.SerializeToString())


def answer_array(answer: bytes, output: str, dtype: str) -> NDArray[Any]:
    """An output that an answer carries.

    Raises:
        KeyError: it carries none of that name.
    """
    response = service_pb2.ModelInferResponse.FromString(answer)
    for one, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if one.name == output:
            return np.frombuffer(raw, dtype).reshape(tuple(one.shape))
    raise KeyError(f"the answer carries no {output!r}")


def _place(parameters: Any, one: InRegion) -> None:
    parameters["shared_memory_region"].string_param = one.region
    parameters["shared_memory_byte_size"].int64_param = one.nbytes
