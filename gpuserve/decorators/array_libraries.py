"""Arrays of other libraries than numpy, on a device or not, as the decorators meet them: what numpy's
functions do not do with them, or would do on the host. Values of a device are brought to the host only where
a decorator has to look at them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpuserve.decorators.errors import BatchError
from gpuserve_worker.calling.context import ModelContext
from gpuserve_worker.protocol.tensor import TensorSpec

_CUPY: Final = "cupy"
_TORCH: Final = "torch"


def library_of(array: Any) -> str:
    """The name of the library that an array is of; "numpy" for what is none."""
    if isinstance(array, np.ndarray | np.generic):
        return "numpy"
    name = type(array).__module__.partition(".")[0]
    return name if name in {_CUPY, _TORCH} else "numpy"


def on_host(array: Any) -> Any:
    """The values as a numpy array; waits for the device where they are on one."""
    library = library_of(array)
    if library == _CUPY:
        return array.get()
    if library == _TORCH:
        tensor = array.detach().resolve_neg().cpu()
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return array


def concatenated(arrays: Sequence[Any]) -> Any:
    """One array of the same library, with the rows of all. Raises ``ValueError`` where their shapes do not
    fit, or they are of several libraries.
    """
    libraries = {library_of(one) for one in arrays}
    if libraries == {"numpy"}:
        return np.concatenate(arrays)
    if len(libraries) > 1:
        raise ValueError(f"arrays of {' and '.join(sorted(libraries))} cannot be joined")
    (name,) = libraries
    library = sys.modules[name]
    try:
        return library.cat(list(arrays)) if name == _TORCH else library.concatenate(list(arrays))
    except RuntimeError as error:  # torch's word for shapes that do not fit
        raise ValueError(str(error)) from None


def repeated(row: Any, times: int) -> Any:
    """An array with this one row so many times; ``row`` has shape ``[1, …]``."""
    if library_of(row) == _TORCH:
        return row.expand(times, *row.shape[1:])
    return sys.modules[_CUPY].broadcast_to(row, (times, *row.shape[1:]))


def as_inputs_of(model: ModelContext, spec: TensorSpec, value: Any) -> Any:
    """A numpy array as the model is given this input: of its library, and on its device. Raises
    ``BatchError`` where the library cannot take it.
    """
    if value.dtype.kind == "O" or model.array == "numpy":
        return value
    there = spec.memory == "gpu" and model.device != "cpu"
    try:
        if model.array == _TORCH:
            return _torch_tensor(value, there)
        return sys.modules[_CUPY].asarray(value) if there else value
    except (TypeError, ValueError) as error:
        raise BatchError(f"The default of input {spec.name!r} cannot be given on the GPU: {error}") from None


def _torch_tensor(value: Any, there: bool) -> Any:
    from gpuserve_worker.calling.torch_tensors import as_tensor

    tensor = as_tensor(value)
    return tensor.cuda() if there else tensor
