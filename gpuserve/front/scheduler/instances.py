"""The instances of one model as its driver knows them: the links of those that are up, and when those that
are down may be expected. No request and no batch is known here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from gpuserve.front.links import WorkerLink
from gpuserve_worker.wire import DropSegment, Message, Segment

#: With no instance up and none due within this time, requests are refused instead of queued.
PATIENCE_S: Final = 5.0


class Instances:
    """Which instances are up; ``devices`` says on which device each of the model's is. One that is retired
    finishes what it has, and is not counted on.
    """

    def __init__(self, devices: Mapping[str, str]) -> None:
        self._devices = dict(devices)
        self._links: dict[str, WorkerLink] = {}
        self._retired: set[str] = set()
        #: New ones that have not been up yet.
        self._coming: set[str] = set()
        #: When the next start of each instance that is down is due; past while it loads.
        self._due_at: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Whether any is up that is not retired."""
        return not self._links.keys() <= self._retired

    def __contains__(self, instance: str) -> bool:
        """Whether it is one of the model's, or was and has not been forgotten."""
        return instance in self._devices

    def get(self, instance: str) -> WorkerLink | None:
        """Its link, if it is up."""
        return self._links.get(instance)

    def __getitem__(self, instance: str) -> WorkerLink:
        return self._links[instance]

    def links(self) -> list[WorkerLink]:
        """Those of the instances that are up."""
        return list(self._links.values())

    def names(self) -> list[str]:
        """Those that are up."""
        return list(self._links)

    def in_rotation(self) -> list[str]:
        """Those that are up and not retired."""
        return [name for name in self._links if name not in self._retired]

    @property
    def n_coming(self) -> int:
        """How many are new, and are neither up nor known to be down: nobody misses them yet."""
        return len(self._coming)

    def resize(self, devices: Mapping[str, str]) -> None:
        """The model has these; what it had besides is retired, or will be."""
        self._coming |= devices.keys() - self._devices.keys()
        self._devices |= devices

    def retire(self, instance: str) -> None:
        """It gets nothing new."""
        self._retired.add(instance)

    def forget(self, instance: str) -> WorkerLink | None:
        """The model does not have it any more; its link, as ``remove`` gives it."""
        link = self.remove(instance, None)
        self._devices.pop(instance, None)
        self._due_at.pop(instance, None)
        self._retired.discard(instance)
        return link

    def add(self, link: WorkerLink) -> None:
        """An instance is up."""
        self._due_at.pop(link.instance, None)
        self._coming.discard(link.instance)
        self._retired.discard(link.instance)  # another that had its name
        self._links[link.instance] = link

    def remove(self, instance: str, restart_in_s: float | None) -> WorkerLink | None:
        """An instance is down; its link, if it was up, after all has been heard. ``restart_in_s``: when its
        next start is due.
        """
        if (link := self._links.get(instance)) is not None:
            link.drain()  # what it answered before is answered
        self._coming.discard(instance)
        if restart_in_s is not None:
            self._due_at[instance] = time.monotonic() + restart_in_s
        return self._links.pop(instance, None)

    def owes(self, instance: str) -> bool:
        """Whether somebody has still to read what is on the device of one that is up."""
        return instance in self._links and self._links[instance].exports.owed > 0

    def device_of(self, instance: str) -> str:
        """The device that an instance is on."""
        return self._devices[instance]

    def none_is_due(self, device: str = "") -> bool:
        """Whether every instance, or every one of a device, is known to be down for longer than a request
        should wait.
        """
        patient_until = time.monotonic() + PATIENCE_S
        return all(
            self._due_at.get(name, 0) > patient_until
            for name, its_device in self._devices.items()
            if device in ("", its_device) and name not in self._retired
        )

    def announce_segment(self, segment: int, fd: int, nbytes: int) -> None:
        """The model's arena has a new segment: every worker is told."""
        self._tell(Segment(segment, nbytes), [fd])

    def announce_drop(self, segment: int) -> None:
        """The model's arena gave a segment up."""
        self._tell(DropSegment(segment))

    def _tell(self, message: Message, fds: Sequence[int] = ()) -> None:
        for link in self._links.values():
            link.send(message, fds)
