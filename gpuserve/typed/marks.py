"""The types of tensors: an alias for each dtype of the protocol, and marks that ``Annotated`` adds to it.
They only hold what was written; what it means, and whether it can be, is for ``signature.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray


class Shape:
    """The shape of a tensor, without the batch axis where the model batches; -1 is any size.

    ``Annotated[Float32, Shape(3, 224, 224)]``; a tensor without one has one axis of any size.
    """

    __slots__ = ("dims",)

    def __init__(self, *dims: int) -> None:
        self.dims = dims

    def __repr__(self) -> str:
        return f"Shape({', '.join(map(repr, self.dims))})"


class DType:
    """The dtype of a tensor whose type does not say it: ``Annotated[torch.Tensor, DType("float32")]``."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"DType({self.dtype!r})"


class Name:
    """The name of an output that is returned alone: ``-> Annotated[Float32, Name("scores")]``."""

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
#: numpy itself has no such type; arrays have that of ``ml_dtypes``.
BFloat16: TypeAlias = Annotated[NDArray[Any], DType("BF16")]
#: Elements are ``bytes``; what is returned may be ``str`` too.
Bytes: TypeAlias = NDArray[np.object_]
