"""Copies of shared weights on a device. A sleeping model gives them back, and gets them again from the shared
memory on the host, without code of the callable.
"""

from __future__ import annotations

from typing import Any, Final

#: Each tensor in shared memory, its copy, and the bytes of the copy. A worker process has one model.
_COPIES: Final[list[tuple[Any, Any, int]]] = []


def on_device(value: Any, device: str, *, remember: bool) -> Any:
    """Return an object with copies of its torch tensors on a device: a tensor, a module, or a dict, list or
    tuple of such objects. Other objects stay as they are. ``remember`` the copies for ``drop`` and
    ``restore``. Raise ``TypeError`` if there is no tensor.
    """
    import copy

    import torch

    copies: dict[tuple[Any, ...], Any] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            place = value.data_ptr(), value.dtype, value.shape, value.stride()
            if place not in copies:  # tied weights stay tied
                copies[place] = value, value.detach().to(device, copy=True)
            return copies[place][1]
        if isinstance(value, torch.nn.Module):
            for tensor in (*value.parameters(), *value.buffers()):
                tensor.data = moved(tensor.data)
        elif isinstance(value, dict):
            found = copy.copy(value)  # an OrderedDict of torch has attributes
            found.update((name, moved(one)) for name, one in value.items())
            return found
        elif type(value) in {list, tuple}:
            return type(value)(map(moved, value))
        return value

    with torch.no_grad():
        result = moved(value)
    if not copies:
        raise TypeError(f"device={device!r} of shared_weights needs torch tensors, and load returned none")
    if remember:
        _COPIES.extend((source, one, one.untyped_storage().nbytes()) for source, one in copies.values())
    return result


def are_there() -> bool:
    return bool(_COPIES)


def drop() -> None:
    """Free the memory of all copies. Tensors over them stay, and have no bytes until ``restore``."""
    for _, one, _ in _COPIES:
        one.untyped_storage().resize_(0)


def restore() -> None:
    """Fill all copies again. Addresses on the device may be others. Raise torch's errors."""
    import torch

    with torch.inference_mode():
        for source, one, nbytes in _COPIES:
            one.untyped_storage().resize_(nbytes)
            one.copy_(source, non_blocking=True)
    if any(one.is_cuda for _, one, _ in _COPIES):
        torch.cuda.synchronize()
