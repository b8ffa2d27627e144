"""All GPUs together: what is known of each, which are lost, and whether what is known is old. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpuserve.devices.machine import GpuReading, NvmlRound, Xid
from gpuserve.front.observe.gpu_health.health import GpuLife, GpuState

#: A round of questions may take this long beyond its interval before NVML counts as silent.
PATIENCE_S: Final = 2.0


class LostGpu(NamedTuple):
    """A GPU that no worker is to use."""

    uuid: str
    device: str
    reason: str


@dataclass(eq=False, slots=True)
class WatchedGpu:
    """One GPU. ``reading`` is the last one, and None where it is lost or NVML is silent about it."""

    uuid: str
    device: str
    product: str
    life: GpuLife
    reading: GpuReading | None = None
    #: How often each Xid came.
    xids: Counter[int] = field(default_factory=Counter)


class GpuFleet:
    """All GPUs that were ever heard of, by UUID. ``now`` is seconds of the monotonic clock everywhere."""

    def __init__(self, interval_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._gpus: dict[str, WatchedGpu] = {}
        self._devices: dict[str, str] = {}
        self._heard_at = now
        self._has_heard = False

    def __iter__(self) -> Iterator[WatchedGpu]:
        return iter(self._gpus.values())

    # ---- what is heard --------------------------------------------------------------------

    def call(self, uuid: str, device: str) -> None:
        """Note what the models of this server call a GPU; that is the same as long as the server runs."""
        self._devices[uuid] = device
        if (gpu := self._gpus.get(uuid)) is not None:
            gpu.device = device

    def restore(self, lost: Iterable[LostGpu], now: float) -> None:
        """Take over which GPUs an earlier front knew to be lost; each has to show that it is back."""
        for one in lost:
            self._gpu(one.uuid, one.device, "").life.fault(one.reason, now)

    def hear(self, report: NvmlRound, now: float) -> None:
        """Take in a round of answers. A GPU that is not in it any more is lost."""
        self._heard_at, self._has_heard = now, True
        for one in report.gpus:
            gpu = self._gpu(one.uuid, one.device, one.product)
            gpu.reading = one.reading
            gpu.life.heard(one, now)
        for uuid in self._gpus.keys() - {one.uuid for one in report.gpus}:
            self._gpus[uuid].reading = None
            self._gpus[uuid].life.fault("its driver does not list it any more", now)

    def hear_xid(self, xid: Xid, now: float) -> None:
        for uuid in xid.uuids:
            gpu = self._gpus.get(uuid)
            if gpu is not None:
                gpu.xids[xid.number] += 1
                gpu.life.xid(xid.number, now)

    def look(self, now: float) -> None:
        if self.is_stale(now):
            for gpu in self:
                gpu.reading = None
                gpu.life.silent()

    def _gpu(self, uuid: str, device: str, product: str) -> WatchedGpu:
        found = self._gpus.get(uuid)
        if found is None:
            device = self._devices.get(uuid, device)
            found = self._gpus[uuid] = WatchedGpu(uuid, device, product, GpuLife(uuid, self._interval_s))
        found.product = product or found.product
        return found

    # ---- questions ------------------------------------------------------------------------

    def age_s(self, now: float) -> float:
        return now - self._heard_at if self._has_heard else math.inf

    def is_stale(self, now: float) -> bool:
        """Whether NVML has been silent for longer than a round of questions should take."""
        return now - self._heard_at > self._interval_s + PATIENCE_S

    def lost(self) -> tuple[LostGpu, ...]:
        return tuple(
            LostGpu(one.uuid, one.device, one.life.reason) for one in self if one.life.state is GpuState.LOST
        )

    def states(self) -> Mapping[str, GpuState]:
        return {one.uuid: one.life.state for one in self}
