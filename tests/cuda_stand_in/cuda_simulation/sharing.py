"""Memory and events between processes, whoever asks: cupy's functions, and those of CUDA's own libraries."""

from __future__ import annotations

import time
from typing import Final

from cuda_simulation import errors, handles
from cuda_simulation.context import Context
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.handles import Kind
from cuda_simulation.memory import Origin
from cuda_simulation.visible import Device

LAZY_PEER_ACCESS: Final = 1
_POLL_S: Final = 0.002


def memory_handle(context: Context, address: int) -> bytes:
    """Of the whole allocation that an address is in. Raises CUDARuntimeError: it cannot be shared."""
    found = context.addresses.around(address)
    if found is None or found.origin is not Origin.MALLOC:
        raise CUDARuntimeError(errors.INVALID_VALUE)
    return handles.handle(Kind.MEMORY, found.block.name, found.offset)


def open_memory(context: Context, handle: bytes, flags: int) -> int:
    """Where the allocation begins. What is open already is counted once more, at the same address. Raises
    CUDARuntimeError: it is no handle, of this process, or of what there is no more.
    """
    name, offset = handles.parse(Kind.MEMORY, handle)
    if flags != LAZY_PEER_ACCESS:
        raise CUDARuntimeError(errors.INVALID_VALUE)
    _take_time(context)
    return context.imports.open(name, offset, lambda device: _check_reach(context, device))


def close_memory(context: Context, address: int) -> None:
    """Give back what ``open_memory`` gave. Raises CUDARuntimeError: it did not, or not so often."""
    context.imports.close(address, lambda: _settle(context))
    _take_time(context)


def event_handle(context: Context, event: int) -> bytes:
    """Raises CUDARuntimeError: the event is not one for several processes."""
    name = context.events.get(event).name
    if name is None:
        raise CUDARuntimeError(errors.INVALID_RESOURCE_HANDLE)
    return handles.handle(Kind.EVENT, name)


def open_event(context: Context, handle: bytes) -> int:
    """Raises CUDARuntimeError: it is no handle, or of what there is no more."""
    name, _ = handles.parse(Kind.EVENT, handle)
    return context.events.open(name, context.device).handle


def _take_time(context: Context) -> None:
    context.spend(context.view.now.ipc_open_s)
    while context.view.now.handles_held:
        time.sleep(_POLL_S)


def _settle(context: Context) -> None:
    for device in context.devices:
        context.scheduler.wait(context.streams.unfinished_on(device))


def _check_reach(context: Context, device: Device) -> None:
    """Memory of another device is used by peer access, which is enabled with the flag."""
    if device == context.device:
        return
    if not context.can_reach(context.device, device):
        raise CUDARuntimeError(errors.PEER_ACCESS_UNSUPPORTED)
    context.peers.add((context.device, device))
