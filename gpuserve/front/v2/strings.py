"""What is wrong with the elements of a BYTES tensor. Pure. A large one is looked at by a thread before its
request is submitted: elements follow each other by their lengths, so that each takes a step in Python.
"""

from __future__ import annotations

import struct
from typing import Final

from gpuserve.front.v2.types import InferRequest, RegionSlice
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol.tensor import BYTES, element_count, holds_elements

#: Tensors up to this size are looked at on the event loop, in 3 ms at most.
SHORT_NBYTES: Final = 64 << 10
#: Stands for what names the tensor, in a problem.
WHERE: Final = "{where}"
_MOST_ELEMENTS: Final = 1 << 62
_unpack_length = struct.Struct("<I").unpack_from


def has_long_strings(request: InferRequest) -> bool:
    """Whether the elements of an input are to be checked by a thread."""
    return any(
        one.datatype == BYTES
        and one.problem is None
        and len(one.data) > SHORT_NBYTES
        and type(one.data) is not RegionSlice
        for one in request.inputs
    )


def check_strings(request: InferRequest) -> InferRequest:
    """Return the request, with the problem of each input of BYTES noted, "" for none."""
    for one in request.inputs:
        if one.datatype == BYTES and not isinstance(one.data, RegionSlice):
            view = one.data.view if isinstance(one.data, Block) else one.data
            one.problem = strings_problem(view, min(element_count(one.shape), _MOST_ELEMENTS))
    return request


def strings_problem(data: memoryview | bytes, count: int) -> str:
    """Return what is wrong with a payload of ``count`` elements, with ``WHERE`` in it, or "" for nothing. An
    element is four bytes of length and so many bytes.
    """
    if holds_elements(data, count):
        return ""
    view = memoryview(data)
    seen, position, end = 0, 0, len(view)
    while position < end:
        left = end - position - 4
        if seen == count:
            return (
                f"unexpected number of string elements {count + 1} for inference {WHERE}, "
                f"expecting {count}, got {end - position} bytes after them"
            )
        if left < 0:
            return (
                f"incomplete string length indicator for inference {WHERE}, expecting 4 bytes "
                f"but only {left + 4} bytes available at element {seen}"
            )
        (length,) = _unpack_length(view, position)
        if length > left:
            return (
                f"incomplete string data for inference {WHERE}, expecting string of length "
                f"{length} but only {left} bytes available at element {seen}"
            )
        position += 4 + length
        seen += 1
    return f"expected {count} string elements for inference {WHERE}, got {seen}"
