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
from gpuserve.decorators.tensor_marks import DType, Name, Shape

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
