"""Streams: what was queued on each, and what the legacy default stream waits for and holds up."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

from cuda_simulation import errors
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.misuse import undefined
from cuda_simulation.scheduler import Operation, Scheduler
from cuda_simulation.visible import Device

NON_BLOCKING: Final = 1
LEGACY: Final = 1
PER_THREAD: Final = 2
#: Handles of streams look like addresses, and are none.
_HANDLES: Final = 0x0051_0000_0000
_HANDLE_STEP: Final = 0x40


@dataclass(eq=False)
class Stream:
    """A stream of a device. ``last`` is what was queued last; a ``legacy`` one is the device's stream 0."""

    handle: int
    device: Device
    blocking: bool
    legacy: bool = False
    last: Operation | None = None
    flags: int = 0
    priority: int = 0


class Streams:
    """The streams of this process."""

    def __init__(
        self,
        scheduler: Scheduler,
        is_captured: Callable[[int, Operation], bool],
        wait_for_room: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._is_captured = is_captured
        self._wait_for_room = wait_for_room
        self._lock = scheduler.lock
        self._numbers = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._destroyed: set[int] = set()
        self._legacy: dict[Device, Stream] = {}
        self._per_thread = threading.local()
        #: What was queued last on streams that are destroyed.
        self._orphans: list[tuple[Device, Operation]] = []

    def create(self, device: Device, flags: int, priority: int = 0) -> Stream:
        handle = _HANDLES + next(self._numbers) * _HANDLE_STEP
        stream = Stream(handle, device, not flags & NON_BLOCKING, flags=flags, priority=priority)
        with self._lock:
            self._streams[handle] = stream
        return stream

    def get(self, handle: int, current: Device) -> Stream:
        """The stream of a handle. Raises CUDARuntimeError: there never was one. A destroyed one ends us."""
        if handle in {0, LEGACY}:
            with self._lock:
                return self._legacy.setdefault(current, Stream(0, current, blocking=True, legacy=True))
        if handle == PER_THREAD:
            return self._of_this_thread(current)
        found = self._streams.get(handle)
        return self._missing(handle) if found is None else found

    def destroy(self, handle: int) -> None:
        """What is queued is executed all the same."""
        with self._lock:
            stream = self._streams.pop(handle, None) or self._missing(handle)
            self._destroyed.add(handle)
            self._orphans = [one for one in self._orphans if not one[1].done]
            if stream.last:
                self._orphans.append((stream.device, stream.last))

    def queue(self, stream: Stream, operation: Operation) -> Operation:
        """Put an operation at the end of a stream, or into the graph that is captured there."""
        if self._is_captured(stream.handle, operation):
            return operation
        self._wait_for_room()
        with self._lock:
            operation.after += self._before(stream)
            stream.last = operation
            self._scheduler.submit(operation)
        return operation

    def unfinished(self, stream: Stream) -> list[Operation]:
        """What waiting for a stream has to wait for."""
        with self._lock:
            return [one for one in self._before(stream) if not one.done]

    def unfinished_on(self, device: Device) -> list[Operation]:
        """What waiting for a device has to wait for."""
        with self._lock:
            last = [one.last for one in self._on(device) if one.last]
            last += [operation for of, operation in self._orphans if of == device]
            return [one for one in last if not one.done]

    def _missing(self, handle: int) -> NoReturn:
        if handle in self._destroyed:
            undefined(f"the stream {handle:#x} is used and was destroyed before")
        raise CUDARuntimeError(errors.INVALID_RESOURCE_HANDLE)

    def _before(self, stream: Stream) -> list[Operation]:
        streams = [stream]
        if stream.legacy:
            streams = [one for one in self._on(stream.device) if one.blocking]
        elif stream.blocking and stream.device in self._legacy:
            streams.append(self._legacy[stream.device])
        return [one.last for one in streams if one.last]

    def _on(self, device: Device) -> list[Stream]:
        every = [*self._streams.values(), *self._legacy.values()]
        return [one for one in every if one.device == device]

    def _of_this_thread(self, device: Device) -> Stream:
        if not hasattr(self._per_thread, "streams"):
            self._per_thread.streams = {}
        if device not in self._per_thread.streams:
            self._per_thread.streams[device] = self.create(device, 0)
        stream: Stream = self._per_thread.streams[device]
        return stream
