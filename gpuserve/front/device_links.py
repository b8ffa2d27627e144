"""Which workers run on which device, so that a region of device memory can be opened by one of them."""

from __future__ import annotations

from gpuserve.front.links import WorkerLink


class DeviceLinks:
    """The links of the workers that are up, by their device."""

    def __init__(self) -> None:
        self._links: dict[str, list[WorkerLink]] = {}

    def add(self, device: str, link: WorkerLink) -> None:
        """A worker on that device is up, until its link is closed."""
        links = self._links.setdefault(device, [])
        links.append(link)
        link.on_close.append(links.remove)

    def on(self, device: str) -> list[WorkerLink]:
        """The workers on that device, the longest there first."""
        return self._links.get(device, [])
