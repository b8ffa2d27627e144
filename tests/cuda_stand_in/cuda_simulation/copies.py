"""Copies, as CUDA makes them: which pointers are whose, which engine, and when the host has to wait."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

import numpy as np

from cuda_simulation import errors, host
from cuda_simulation.context import Context
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.memory import Bytes, is_device_address
from cuda_simulation.reads import Read
from cuda_simulation.scheduler import Engine, Operation
from cuda_simulation.streams import Stream


class Direction(Enum):
    """The values are CUDA's kinds."""

    HOST_TO_HOST = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


_BY_ADDRESS: Final = 4
#: Up to this size CUDA stages a pageable source without a wait.
_STAGED_AT_ONCE_NBYTES: Final = 64 << 10
#: How much faster than the bus a GPU copies within its own memory, about.
_WITHIN_DEVICE: Final = 50
_ENGINES: Final = {
    Direction.HOST_TO_DEVICE: Engine.HOST_TO_DEVICE,
    Direction.DEVICE_TO_HOST: Engine.DEVICE_TO_HOST,
    Direction.DEVICE_TO_DEVICE: Engine.DEVICE_TO_DEVICE,
}


def copy(
    context: Context, target: int, source: int, nbytes: int, kind: int, stream: Stream, *, wait: bool
) -> None:
    """Queue a copy; with ``wait`` as ``cudaMemcpy``, which waits for all copies that touch the host.

    Raises:
        CUDARuntimeError: a pointer is not of the kind, or the range is not inside one allocation.
    """
    if nbytes == 0:
        return
    direction = _direction(context, target, source, nbytes, kind)
    if direction is Direction.HOST_TO_HOST:
        context.scheduler.wait(context.streams.unfinished(stream))
        host.write(target, _from_host(source, nbytes))
        return
    is_staged = direction is Direction.HOST_TO_DEVICE and not context.page_locked.holds(source, nbytes)
    if is_staged and nbytes > _STAGED_AT_ONCE_NBYTES:  # the staging memory is free after what is queued
        context.scheduler.wait(context.streams.unfinished(stream))
    read, put, host_waits = _ends(context, direction, target, source, nbytes)
    speed = context.view.now.copy_bytes_per_s
    if direction is Direction.DEVICE_TO_DEVICE:
        speed *= _WITHIN_DEVICE
    queued = Operation(
        stream.device.gpu_uuid,
        _ENGINES[direction],
        nbytes / speed if speed else 0.0,
        begin=read.begin,
        effect=lambda: put(read.end()),
    )
    context.streams.queue(stream, queued)
    # A pageable source is staged by now; CUDA returns then, be the copy to the device done or not.
    if host_waits or (wait and direction is not Direction.DEVICE_TO_DEVICE and not is_staged):
        context.scheduler.wait([queued])


def fill(context: Context, target: int, value: int, nbytes: int, stream: Stream) -> None:
    """Queue a memset. Raises CUDARuntimeError: the range is not inside one allocation."""
    if nbytes:
        _check_device(context, target, nbytes, writes=True)
        context.launch(stream, lambda: _device(context, target, nbytes).fill(value & 0xFF))


def _direction(context: Context, target: int, source: int, nbytes: int, kind: int) -> Direction:
    to, of = is_device_address(target), is_device_address(source)
    found = Direction(2 * of + to)
    if kind not in {found.value, _BY_ADDRESS}:
        raise CUDARuntimeError(errors.INVALID_VALUE)
    for address, is_device in ((target, to), (source, of)):
        if is_device:
            _check_device(context, address, nbytes, writes=address == target)
    return found


def _ends(
    context: Context, direction: Direction, target: int, source: int, nbytes: int
) -> tuple[Read, Callable[[Bytes | None], None], bool]:
    """How the copy reads and writes, and whether the host has to wait for it in any case."""
    if direction is Direction.HOST_TO_DEVICE:
        locked = context.page_locked.holds(source, nbytes)
        staged = None if locked else _from_host(source, nbytes)
        read = Read(lambda: _content(source, nbytes) if locked else staged)
    else:
        read = Read(lambda: _device(context, source, nbytes))
    if direction is Direction.DEVICE_TO_HOST:
        pageable = not context.page_locked.holds(target, nbytes)
        if pageable:
            _from_host(target, nbytes)  # which raises where there is no memory
        return read, lambda content: _to_host(target, content), pageable
    return read, lambda content: _to_device(context, target, nbytes, content), False


def _check_device(context: Context, address: int, nbytes: int, *, writes: bool) -> None:
    found = context.addresses.around(address, nbytes)
    if found is None or (writes and found.address in context.addresses.read_only):
        raise CUDARuntimeError(errors.INVALID_VALUE)


def _device(context: Context, address: int, nbytes: int) -> Bytes:
    """Device memory at the time of the copy: copies reach all devices."""
    found = context.addresses.around(address, nbytes)
    if found is None:
        raise CUDARuntimeError(errors.ILLEGAL_ADDRESS)
    return found.part(address, nbytes)


def _to_device(context: Context, target: int, nbytes: int, content: Bytes | None) -> None:
    if content is not None:
        np.copyto(_device(context, target, nbytes), content)


def _to_host(target: int, content: Bytes | None) -> None:
    """To nobody where the process has unmapped its page-locked memory: the pages are CUDA's alone then."""
    if content is not None:
        host.write(target, content)


def _content(source: int, nbytes: int) -> Bytes | None:
    """Host memory as it is; None where the process has none."""
    content = np.empty(nbytes, np.uint8)
    return content if host.read(source, content) else None


def _from_host(source: int, nbytes: int) -> Bytes:
    content = _content(source, nbytes)
    if content is None:
        raise CUDARuntimeError(errors.INVALID_VALUE)
    return content
