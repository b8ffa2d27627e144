"""Whether a callable, or its framework, has kept what it returned, and may write to it again: an output
buffer of its own, for instance. Then its next call has to wait until the copy is made. Told by who refers
to the array and to its memory; where that cannot be told, it counts as kept. No CUDA here.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

#: References to the memory of a CuPy array: its pointer's, and the one that asks.
_MEMORY: Final = 2
#: References to the base of a view: the view's, and the one that asks.
_BASE: Final = 2
#: References to the storage of a torch tensor: the tensor's, and the one that asks.
_STORAGE: Final = 2
#: Where it is imported, a compiled callable may replay a graph of kernels that writes to the memory of what
#: it has returned before, without a reference to that.
_GRAPHS: Final = "torch._inductor.cudagraph_trees"


def is_kept(value: Any, cupy_array: type) -> bool:
    """Whether anybody but the answer that holds it refers to an array of the device. To be called, as
    ``_references`` does, by a function that was given the value out of that answer.
    """
    if sys.getrefcount(value) > _references():
        return True
    if isinstance(value, cupy_array):
        return _is_shared(value)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or _GRAPHS in sys.modules:
        return True
    return _is_shared_storage(torch, value)


def _is_shared(array: Any) -> bool:
    """Whether another array than a CuPy array and its base has the same memory."""
    base = array.base
    if base is None:
        return sys.getrefcount(array.data.mem) > _MEMORY
    del base  # it would count
    return sys.getrefcount(array.base) > _BASE or sys.getrefcount(array.data.mem) > _MEMORY + 1


def _is_shared_storage(torch: Any, tensor: Any) -> bool:
    try:
        users = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    except (AttributeError, RuntimeError, NotImplementedError):  # no part of torch's interface
        return True
    return int(users) > _STORAGE


@functools.cache
def _references() -> int:
    """How many references to a value there are in ``is_kept`` if nobody but a mapping holds it."""
    answer = {"": object()}
    return _checked(answer[""])


def _checked(value: object) -> int:
    """As ``OutputRules``."""
    return _asked(value)


def _asked(value: object) -> int:
    """As ``DeviceArrays.is_kept``."""
    return _counted(value)


def _counted(value: object) -> int:
    """As ``is_kept``."""
    return sys.getrefcount(value)
