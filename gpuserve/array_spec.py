"""What kind of array a callable is given, and where its inputs are to lie: from what users may leave out to
what ``ModelSpec`` says. Pure.

==========  ====================  =========================================
``array``   ``memory`` of inputs  they come as
==========  ====================  =========================================
None        None                  numpy arrays
None        "gpu" for some        those as CuPy arrays, the others of numpy
"cupy"      None                  CuPy arrays on the GPU
"torch"     None                  torch tensors on the GPU
any         "cpu"                 on the host: of torch if ``array`` is, otherwise of numpy
==========  ====================  =========================================
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from gpuserve.devices import names
from gpuserve_worker.tensor import BYTES

NUMPY: Final = "numpy"
CUPY: Final = "cupy"
TORCH: Final = "torch"
ARRAYS: Final = (NUMPY, CUPY, TORCH)
CPU: Final = "cpu"
GPU: Final = "gpu"
MEMORIES: Final = (CPU, GPU)


def array_problem(array: Any) -> str | None:
    """What is wrong with the ``array`` of a model; None where nothing is."""
    if array is None or array in ARRAYS:
        return None
    return f"array must be one of {', '.join(map(repr, ARRAYS))} or None, got {array!r:.100}"


def memory_problem(memory: Any, datatype: str, array: str | None) -> str | None:
    """What is wrong with the ``memory`` of an input of a model with this ``array``; None where nothing is."""
    if memory is not None and memory not in MEMORIES:
        return f"memory must be 'cpu', 'gpu' or None, got {memory!r:.100}"
    if memory != GPU:
        return None
    if datatype == BYTES:
        return "memory must be 'cpu': byte strings stay on the host"
    if array == NUMPY:
        return "memory 'gpu' needs array 'cupy' or 'torch': numpy arrays are on the host"
    return None


def device_problem(array: str, devices: Iterable[str]) -> str | None:
    """What is wrong with the devices of a model whose inputs come as this kind of array; None for nothing."""
    if array != CUPY or names.CPU not in devices:
        return None
    return (
        "CuPy arrays as inputs need a GPU: expected device 'cuda:0', 'cuda:*', … for every instance, or else "
        f"array 'torch', given {names.CPU!r}"
    )


def array_of(array: str | None, memories: Iterable[str | None]) -> str:
    """The kind of array that a model's inputs come as."""
    return array or (CUPY if GPU in memories else NUMPY)


def memory_of(memory: str | None, datatype: str, array: str | None) -> str:
    """Where an input is to lie."""
    if memory is not None:
        return memory
    return GPU if array in {CUPY, TORCH} and datatype != BYTES else CPU
