"""Inputs as torch tensors, for models that ask for them. torch is imported when the first one is made. No
tensor is copied here, and none moves to a device or from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuserve_worker.protocol.tensor import BF16, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: What carries the bytes of types that not every version of DLPack, or of torch, reads.
CARRIERS: Final[dict[str, Any]] = {BF16: np.int16, "BOOL": np.uint8}


def as_tensor(array: Any) -> Any:
    """A tensor over the memory of a numpy array of numbers. Whatever else is given stays what it is."""
    import torch

    if not isinstance(array, np.ndarray) or array.dtype.kind == "O":
        return array
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def bfloat16_array(tensor: Any) -> NDArray[Any]:
    """A numpy array over the memory of a tensor of bfloat16 on the host."""
    import torch

    array: NDArray[Any] = tensor.view(torch.int16).numpy().view(numpy_dtype(BF16))
    return array


def from_device(array: Any, datatype: str) -> Any:
    """A tensor over the memory of an array on a device, which is of the type that carries ``datatype``."""
    import torch

    tensor = torch.from_dlpack(array)
    if datatype not in CARRIERS:
        return tensor
    return tensor.view(torch.bfloat16 if datatype == BF16 else torch.bool)
