"""Types for functions that are served: aliases for arrays of each dtype, and marks for ``Annotated``. ::

    from gpuserve.typed import Float32, batch

    @batch(max_batch_size=64)
    def double(x: Float32) -> Float32:
        return 2 * x

All of them are standard typing: an alias is numpy's ``NDArray``, and marks stand in ``Annotated``. Workers
import this module with the user's module, so it imports nothing of the server. ``model/signature.py`` reads
the types.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuserve.decorators.batching import Parameter, batch, sample
from gpuserve.decorators.coded import IMAGE, Audio


class Shape:
    """The shape of a tensor, without the batch axis if the model batches; -1 is any size.

    ``Annotated[Float32, Shape(3, 224, 224)]``; a tensor without a ``Shape`` has one axis of any size. The
    requests of a batch may differ in the sizes of -1 of a ``ragged`` tensor: ``Shape(-1, ragged=True)``.
    """

    __slots__ = ("dims", "ragged")

    def __init__(self, *dims: int, ragged: bool = False) -> None:
        self.dims = dims
        self.ragged = ragged

    def __repr__(self) -> str:
        parts = [*map(repr, self.dims), *(["ragged=True"] if self.ragged else [])]
        return f"Shape({', '.join(parts)})"


class DType:
    """The dtype of a tensor whose type has none: ``Annotated[torch.Tensor, DType("float32")]``."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"DType({self.dtype!r})"


class Name:
    """The name of a single output: ``-> Annotated[Float32, Name("scores")]``."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Name({self.name!r})"


Bool: TypeAlias = NDArray[np.bool_]
Int8: TypeAlias = NDArray[np.int8]
Int16: TypeAlias = NDArray[np.int16]
Int32: TypeAlias = NDArray[np.int32]
Int64: TypeAlias = NDArray[np.int64]
UInt8: TypeAlias = NDArray[np.uint8]
UInt16: TypeAlias = NDArray[np.uint16]
UInt32: TypeAlias = NDArray[np.uint32]
UInt64: TypeAlias = NDArray[np.uint64]
Float16: TypeAlias = NDArray[np.float16]
Float32: TypeAlias = NDArray[np.float32]
Float64: TypeAlias = NDArray[np.float64]
#: numpy has no such type; the arrays have the type of ``ml_dtypes``.
BFloat16: TypeAlias = Annotated[NDArray[Any], DType("BF16")]
#: Elements are ``bytes``; returned elements may be ``str`` too.
Bytes: TypeAlias = NDArray[np.object_]
#: An image, decoded by Pillow; a returned image is encoded as PNG. On the wire BYTES of shape ``[1]``.
Image: TypeAlias = Annotated[Any, IMAGE]


__all__ = [
    "Audio", "BFloat16", "Bool", "Bytes", "DType", "Float16", "Float32", "Float64", "Image", "Int8",
    "Int16", "Int32", "Int64", "Name", "Parameter", "Shape", "UInt8", "UInt16", "UInt32", "UInt64", "batch",
    "sample",
]  # fmt: skip
