"""The part of ``cupy.cuda.runtime`` about handles for other processes."""

from __future__ import annotations

from cuda_simulation import errors, handles, owners
from cuda_simulation.context import Context, current, entry
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.handles import Kind
from cuda_simulation.memory import Allocation, Origin
from cuda_simulation.visible import Device

from cupy.cuda import _runtime_constants as constants


@entry()
def ipcGetMemHandle(devPtr: int) -> bytes:
    """Of the whole allocation that the pointer is in."""
    found = current().addresses.around(devPtr)
    if found is None or found.origin is not Origin.MALLOC:
        raise CUDARuntimeError(errors.INVALID_VALUE)
    return handles.handle(Kind.MEMORY, found.name)


@entry()
def ipcOpenMemHandle(handle: bytes, flags: int = constants.cudaIpcMemLazyEnablePeerAccess) -> int:
    """The base of the allocation. What is open already is counted once more, at the same address."""
    name = handles.parse(Kind.MEMORY, handle)
    if flags != constants.cudaIpcMemLazyEnablePeerAccess:
        raise CUDARuntimeError(errors.INVALID_VALUE)
    context = current()
    allocation, opened = context.imported.get(str(name)) or (_imported(context, name), 0)
    _check_reach(context, allocation.device)
    context.imported[str(name)] = allocation, opened + 1
    return allocation.address


@entry()
def ipcCloseMemHandle(devPtr: int) -> None:
    context = current()
    found = context.addresses.at(devPtr)
    if found is None or found.origin is not Origin.IMPORTED:
        raise CUDARuntimeError(errors.INVALID_VALUE)
    allocation, opened = context.imported[str(found.name)]
    if opened > 1:
        context.imported[str(found.name)] = allocation, opened - 1
        return
    for device in context.devices:
        context.scheduler.wait(context.streams.unfinished_on(device))
    del context.imported[str(found.name)]
    context.addresses.remove(found)


@entry()
def ipcGetEventHandle(event: int) -> bytes:
    name = current().events.get(event).name
    if name is None:
        raise CUDARuntimeError(errors.INVALID_RESOURCE_HANDLE)
    return handles.handle(Kind.EVENT, name)


@entry()
def ipcOpenEventHandle(handle: bytes) -> int:
    name = handles.parse(Kind.EVENT, handle)
    return current().events.open(name, current().device).handle


def _imported(context: Context, name: owners.OwnedName) -> Allocation:
    found = context.files.open(name)
    if found is None:
        raise CUDARuntimeError(errors.MAP_BUFFER_OBJECT_FAILED)
    uuid, content = found
    device = _device(context, uuid)
    _check_reach(context, device)
    return context.addresses.add(device, Origin.IMPORTED, name, content, content.nbytes)


def _check_reach(context: Context, device: Device) -> None:
    """Memory of another device is used by peer access, which is enabled with the flag."""
    if device == context.device:
        return
    if not context.can_reach(context.device, device):
        raise CUDARuntimeError(errors.PEER_ACCESS_UNSUPPORTED)
    context.peers.add((context.device, device))


def _device(context: Context, uuid: str) -> Device:
    """The device of that UUID, also where this process does not see it."""
    known = [one for one in context.devices if one.uuid == uuid]
    return known[0] if known else Device(uuid, context.view.gpu(uuid).uuid, 0)
