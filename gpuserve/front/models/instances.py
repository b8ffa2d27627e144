"""The instances of one model: the links of those that are up, and when to expect the others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve_worker.protocol.wire import DropSegment, Message, Segment

#: If no instance is up and none is due within this time, requests are refused instead of queued.
PATIENCE_S: Final = 5.0


class ModelInstances:
    """The instances that are up, and their devices. A retired instance only finishes its batches."""

    def __init__(self, devices: Mapping[str, str]) -> None:
        self._devices = dict(devices)
        self.up: dict[str, WorkerLink] = {}
        #: The links of workers that sleep: they stay open, so that messages about memory go on.
        self.parked: dict[str, WorkerLink] = {}
        self._retired: set[str] = set()
        #: New instances that have not been up yet, and those that start on demand.
        self._starting: set[str] = set()
        #: The time of the next start of each instance that is down; in the past while it loads.
        self._due_at: dict[str, float] = {}
        #: The time since when each down or new instance is missing. Empty at the start of the model.
        self._missed_since: dict[str, float] = {}

    def __bool__(self) -> bool:
        return not self.up.keys() <= self._retired

    @property
    def asleep(self) -> bool:
        """Return whether requests wait for instances that all start later, on demand."""
        return not self and self._devices.keys() <= self._starting

    def sleep(self) -> None:
        """Expect the instances that are not up whenever they come, as at the start of the model."""
        self._starting = set(self._devices)
        for earlier in (self._retired, self._due_at, self._missed_since):
            earlier.clear()

    def __contains__(self, instance: str) -> bool:
        """Return whether an instance belongs to the model, or did and has not been forgotten."""
        return instance in self._devices

    def state_of(self, instance: str, now: float) -> tuple[str, float | None]:
        """Return the state of an instance, "" on demand, and the seconds until it is started again."""
        if instance in self.up:
            return ("LEAVING" if instance in self._retired else "READY"), None
        if self.asleep:
            return "", None
        due_in_s = self._due_at.get(instance, now) - now
        return ("WAITING", round(due_in_s, 1)) if due_in_s > 0 else ("LOADING", None)

    def in_rotation(self) -> list[str]:
        return [name for name in self.up if name not in self._retired]

    @property
    def n_starting(self) -> int:
        """Return the number of new instances that are neither up nor known to be down."""
        return len(self._starting)

    def resize(self, devices: Mapping[str, str]) -> None:
        if self.asleep:
            self._devices = dict(devices)
            self.sleep()
            return
        new = devices.keys() - self._devices.keys()
        self._starting |= new
        self._missed_since |= dict.fromkeys(new, time.monotonic())
        self._devices |= devices

    def retire(self, instance: str) -> None:
        """Stop counting on an instance: it gets no new batches."""
        self._retired.add(instance)

    def forget(self, instance: str) -> WorkerLink | None:
        link = self.remove(instance, None)
        self._devices.pop(instance, None)
        self._due_at.pop(instance, None)
        self._missed_since.pop(instance, None)
        self._retired.discard(instance)
        return link

    def add(self, link: WorkerLink) -> None:
        self._due_at.pop(link.instance, None)
        self._missed_since.pop(link.instance, None)
        self._starting.discard(link.instance)
        self._retired.discard(link.instance)  # a former instance with the same name
        self.up[link.instance] = link

    def remove(self, instance: str, restart_in_s: float | None) -> WorkerLink | None:
        """Remove an instance that is down, to start in ``restart_in_s``. Returns its link if it was up."""
        if (link := self.up.get(instance)) is not None:
            link.drain()  # its earlier answers count
        self._starting.discard(instance)
        now = time.monotonic()
        self._missed_since.setdefault(instance, now)
        if restart_in_s is not None:
            self._due_at[instance] = now + restart_in_s
        return self.up.pop(instance, None)

    def has_unread_exports(self, instance: str) -> bool:
        """Return whether tensors on the device of an instance that is up still have readers."""
        return instance in self.up and self.up[instance].exports.owed > 0

    def device_of(self, instance: str) -> str:
        return self._devices[instance]

    def none_expected(self, device: str = "") -> bool:
        """Return whether every instance (on a device) is down for longer than a request should wait."""
        now = time.monotonic()
        return not self.asleep and all(
            name not in self.up
            and (
                self._missed_since.get(name, now) <= now - PATIENCE_S
                or self._due_at.get(name, now) > now + PATIENCE_S
            )
            for name, its_device in self._devices.items()
            if device in ("", its_device) and name not in self._retired
        )

    def announce_segment(self, segment: int, fd: int, nbytes: int) -> None:
        self._send_to_all(Segment(segment, nbytes), [fd])

    def announce_drop(self, segment: int) -> None:
        self._send_to_all(DropSegment(segment))

    def _send_to_all(self, message: Message, fds: Sequence[int] = ()) -> None:
        for link in self.open_links():
            link.send(message, fds)

    def open_links(self) -> list[WorkerLink]:
        """Return the links of the instances that are up or sleep."""
        return [*self.up.values(), *self.parked.values()]
