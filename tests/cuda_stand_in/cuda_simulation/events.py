"""Events: places in streams, for this process or for several. The state of an interprocess event is in a
file, so that a stream of another process can wait for it.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cuda_simulation import errors, owners
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.misuse import undefined
from cuda_simulation.scheduler import Operation
from cuda_simulation.visible import Device

BLOCKING_SYNC: Final = 1
DISABLE_TIMING: Final = 2
INTERPROCESS: Final = 4
_HANDLES: Final = 0x0052_0000_0000
_HANDLE_STEP: Final = 0x20
_STATE_NBYTES: Final = 64


class SharedState:
    """How often an interprocess event was recorded and reached, and by whom it was recorded last."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._fields = memoryview(mmap.mmap(file.fileno(), _STATE_NBYTES)).cast("Q")

    def record(self) -> int:
        """Count a record; its number."""
        owner = owners.this_process()
        self._fields[2], self._fields[3] = owner.pid, owner.started
        self._fields[0] += 1
        return self._fields[0]

    def reach(self, number: int) -> None:
        self._fields[1] = max(self._fields[1], number)

    def recorded(self) -> int:
        """The number of the last record."""
        return self._fields[0]

    def reached(self, number: int) -> bool:
        """Whether a record's place is reached; what a dead process recorded is."""
        return self._fields[1] >= number or not owners.Owner(self._fields[2], self._fields[3]).alive


@dataclass(eq=False)
class Event:
    """An event. ``place`` is what it was recorded with last in this process."""

    handle: int
    device: Device
    flags: int
    place: Operation | None = None
    shared: SharedState | None = None
    name: owners.OwnedName | None = None

    @property
    def done(self) -> bool:
        """Whether it was reached; one that was never recorded is."""
        if self.shared:
            return self.shared.reached(self.shared.recorded())
        return self.place is None or self.place.done


class Events:
    """The events of this process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "events"
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._events: dict[int, Event] = {}
        self._destroyed: set[int] = set()

    def create(self, device: Device, flags: int) -> Event:
        """Raises CUDARuntimeError: an interprocess event has no timing."""
        if not flags & INTERPROCESS:
            return self._add(Event(self._handle(), device, flags))
        if not flags & DISABLE_TIMING:
            raise CUDARuntimeError(errors.INVALID_VALUE)
        name = owners.new_name()
        path = self._directory / device.uuid / str(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(_STATE_NBYTES))
        return self._add(Event(self._handle(), device, flags, shared=SharedState(path), name=name))

    def open(self, name: owners.OwnedName, device: Device) -> Event:
        """An event of another process. Raises CUDARuntimeError: it is gone."""
        for path in self._directory.glob(f"*/{name}") if name.owner.alive else ():
            state = SharedState(path)
            return self._add(Event(self._handle(), device, DISABLE_TIMING | INTERPROCESS, shared=state))
        raise CUDARuntimeError(errors.MAP_BUFFER_OBJECT_FAILED)

    def get(self, handle: int) -> Event:
        """Raises CUDARuntimeError: there never was such an event. One that is destroyed ends the process."""
        found = self._events.get(handle)
        if found is not None:
            return found
        if handle in self._destroyed:
            undefined(f"the event {handle:#x} is used and was destroyed before")
        raise CUDARuntimeError(errors.INVALID_RESOURCE_HANDLE)

    def destroy(self, handle: int) -> None:
        event = self.get(handle)
        with self._lock:
            del self._events[handle]
            self._destroyed.add(handle)
        if event.name:
            (self._directory / event.device.uuid / str(event.name)).unlink(missing_ok=True)

    def _add(self, event: Event) -> Event:
        with self._lock:
            self._events[event.handle] = event
        return event

    def _handle(self) -> int:
        return _HANDLES + next(self._numbers) * _HANDLE_STEP


def mark(event: Event, gpu_uuid: str) -> Operation:
    """The operation that an event is recorded with."""
    shared = event.shared
    if shared is None:
        event.place = Operation(gpu_uuid)
    else:
        number = shared.record()
        event.place = Operation(gpu_uuid, effect=lambda: shared.reach(number))
    return event.place


def hold(event: Event, gpu_uuid: str) -> Operation | None:
    """The operation with which a stream waits for an event as it is recorded now; None: it has not to."""
    shared = event.shared
    if shared is not None:
        number = shared.recorded()
        return Operation(gpu_uuid, may_start=lambda: shared.reached(number))
    return Operation(gpu_uuid, after=[event.place]) if event.place else None
