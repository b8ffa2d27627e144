"""The part of ``cupy.cuda.runtime`` about handles for other processes. In all of it cupy keeps the
interpreter's lock.
"""

from __future__ import annotations

from cuda_simulation import sharing
from cuda_simulation.context import current, entry

from cupy.cuda import _runtime_constants as constants


@entry(keeps_lock=True)
def ipcGetMemHandle(devPtr: int) -> bytes:
    return sharing.memory_handle(current(), devPtr)


@entry(keeps_lock=True)
def ipcOpenMemHandle(handle: bytes, flags: int = constants.cudaIpcMemLazyEnablePeerAccess) -> int:
    return sharing.open_memory(current(), handle, flags)


@entry(keeps_lock=True)
def ipcCloseMemHandle(devPtr: int) -> None:
    sharing.close_memory(current(), devPtr)


@entry(keeps_lock=True)
def ipcGetEventHandle(event: int) -> bytes:
    return sharing.event_handle(current(), event)


@entry(keeps_lock=True)
def ipcOpenEventHandle(handle: bytes) -> int:
    return sharing.open_event(current(), handle)
