"""The instances of one model: the links of those that are up, and when the others may be expected."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from gpuserve.front.links.worker_link import WorkerLink
from gpuserve_worker.protocol.wire import DropSegment, Message, Segment

#: With no instance up and none due within this time, requests are refused instead of queued.
PATIENCE_S: Final = 5.0


class Instances:
    """Which instances are up, and on which devices. One that is retired just finishes what it has."""

    def __init__(self, devices: Mapping[str, str]) -> None:
        self._devices = dict(devices)
        self.up: dict[str, WorkerLink] = {}
        self._retired: set[str] = set()
        #: New ones that have not been up yet.
        self._coming: set[str] = set()
        #: When the next start of each instance that is down is due; past while it loads.
        self._due_at: dict[str, float] = {}
        #: Since when each instance that is down, or new, is waited for; not at the start of the model.
        self._missed_since: dict[str, float] = {}

    def __bool__(self) -> bool:
        return not self.up.keys() <= self._retired

    def __contains__(self, instance: str) -> bool:
        """Whether an instance is one of the model's, or was and has not been forgotten."""
        return instance in self._devices

    def standing(self, instance: str, now: float) -> tuple[str, float | None]:
        """The state of one of the model's instances, and in how many seconds it is started again."""
        if instance in self.up:
            return ("LEAVING" if instance in self._retired else "READY"), None
        due_in_s = self._due_at.get(instance, now) - now
        return ("WAITING", round(due_in_s, 1)) if due_in_s > 0 else ("LOADING", None)

    def in_rotation(self) -> list[str]:
        return [name for name in self.up if name not in self._retired]

    @property
    def n_coming(self) -> int:
        """How many instances are new, and are neither up nor known to be down: nobody misses them yet."""
        return len(self._coming)

    def resize(self, devices: Mapping[str, str]) -> None:
        new = devices.keys() - self._devices.keys()
        self._coming |= new
        self._missed_since |= dict.fromkeys(new, time.monotonic())
        self._devices |= devices

    def retire(self, instance: str) -> None:
        """Count on an instance no more: it gets nothing new."""
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
        self._coming.discard(link.instance)
        self._retired.discard(link.instance)  # another that had its name
        self.up[link.instance] = link

    def remove(self, instance: str, restart_in_s: float | None) -> WorkerLink | None:
        """Take an instance out that is down, to start in ``restart_in_s``; its link, if it was up."""
        if (link := self.up.get(instance)) is not None:
            link.drain()  # what it answered before is answered
        self._coming.discard(instance)
        now = time.monotonic()
        self._missed_since.setdefault(instance, now)
        if restart_in_s is not None:
            self._due_at[instance] = now + restart_in_s
        return self.up.pop(instance, None)

    def owes(self, instance: str) -> bool:
        """Whether somebody has still to read what is on the device of one that is up."""
        return instance in self.up and self.up[instance].exports.owed > 0

    def device_of(self, instance: str) -> str:
        return self._devices[instance]

    def none_is_due(self, device: str = "") -> bool:
        """Whether every instance, or every one of a device, is down for longer than a request should wait."""
        now = time.monotonic()
        return all(
            name not in self.up
            and (
                self._missed_since.get(name, now) <= now - PATIENCE_S
                or self._due_at.get(name, now) > now + PATIENCE_S
            )
            for name, its_device in self._devices.items()
            if device in ("", its_device) and name not in self._retired
        )

    def announce_segment(self, segment: int, fd: int, nbytes: int) -> None:
        self._tell(Segment(segment, nbytes), [fd])

    def announce_drop(self, segment: int) -> None:
        self._tell(DropSegment(segment))

    def _tell(self, message: Message, fds: Sequence[int] = ()) -> None:
        for link in self.up.values():
            link.send(message, fds)
