"""What a function with types needs to be served: aliases for arrays of each dtype, and marks for what a type
of arrays cannot say. ::

    from gpuserve.typed import Float32, batch

    @batch(max_batch_size=64)
    def double(x: Float32) -> Float32:
        return 2 * x

All of it is standard typing: an alias is numpy's ``NDArray``, and marks stand in ``Annotated``. Workers
import this with the user's module, so nothing of the server is imported here; ``signature.py`` reads the
types.
"""

from __future__ import annotations

from gpuserve.decorators.batching import batch, sample
from gpuserve.decorators.parameters import Parameter
from gpuserve.typed.marks import (
    BFloat16,
    Bool,
    Bytes,
    DType,
    Float16,
    Float32,
    Float64,
    Int8,
    Int16,
    Int32,
    Int64,
    Name,
    Shape,
    UInt8,
    UInt16,
    UInt32,
    UInt64,
)

__all__ = [
    "BFloat16",
    "Bool",
    "Bytes",
    "DType",
    "Float16",
    "Float32",
    "Float64",
    "Int8",
    "Int16",
    "Int32",
    "Int64",
    "Name",
    "Parameter",
    "Shape",
    "UInt8",
    "UInt16",
    "UInt32",
    "UInt64",
    "batch",
    "sample",
]
