"""Requests that must run on a device, for the tests of schedulers."""

from __future__ import annotations

from collections.abc import Hashable

from gpuserve.front.scheduling.request_queue import QueuedRequest


class BoundRequest(QueuedRequest):
    """A request for one device, or for any where it is "". Its inputs are on the device ``near``."""

    __slots__ = ("_device", "_near")

    def __init__(
        self,
        rows: int,
        nbytes: int,
        merge_key: Hashable,
        deadline: float | None = None,
        retriable: bool = True,
        priority: int = 0,
        device: str = "",
        near: str = "",
    ) -> None:
        super().__init__(rows, nbytes, merge_key, deadline, retriable, priority)
        self._device = device
        self._near = near

    @property
    def device(self) -> str:
        return self._device

    @property
    def near(self) -> str:
        return self._near
