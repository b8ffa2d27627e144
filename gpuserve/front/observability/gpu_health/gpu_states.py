"""The health of GPUs as states, and the set of all GPUs. Pure: times and readings are arguments.

::

                 silent                  fault
    HEALTHY ────────────────► SUSPECT ────────────► LOST
       ▲ ▲      answered         │                   │ ▲
       │ └───────────────────────┘       fault       │ │
       │ └───────────────────────────────────────────┼─┘
       └─────────────────────────────────────────────┘
                 back: answered well for long enough

SUSPECT: NVML does not answer, which says little about the GPU, so it stays in use. LOST: the GPU cannot be
used. Only a period of good answers ends this state; the period doubles for a GPU that is lost repeatedly.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from gpuserve.core.states import EventTable
from gpuserve.devices.machine import GpuReading, GpuReport, NvmlRound, Xid

#: Xids after which the GPU stays in use, by source: the list ``ignoredXids`` of NVIDIA's
#: k8s-device-plugin (internal/rm/health.go), or the immediate action in NVIDIA's Xid catalog.
NON_FENCING_XIDS: Final[Mapping[int, str]] = {
    number: source
    for source, numbers in {
        "Xid catalog: IGNORE": (14, 37, 38, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153,
                                157, 160, 161),
        "Xid catalog: RESTART_APP": (8, 11, 25, 32, *range(39, 42), 60, *range(69, 73), 75, 76, 77, 80,
                                     *range(82, 87), 88, 89, 94, *range(96, 106), *range(126, 136), 139),
        "Xid catalog: informational, the driver's recovery action decides": (154,),
        "k8s-device-plugin: fault of an application": (13, 31, 43, 45, 68, 109),
    }.items()
    for number in numbers
}  # fmt: skip
#: An uncorrectable memory error that the driver contained: only the processes that used the memory fail.
CONTAINED_XID: Final = 94
#: NVML's count of uncorrectable errors includes a contained error by then.
CONTAINED_S: Final = 10.0
#: A lost GPU returns after this many rounds of good answers, and twice as many if it is lost again soon.
PROBATION_READINGS: Final = 5
MAX_PROBATION_S: Final = 600.0
#: A GPU that was healthy this long counts as recovered for good.
STEADY_S: Final = 3600.0


class GpuState(enum.Enum):
    """Usability states of a GPU, as far as is known."""

    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"
    LOST = "LOST"


class GpuEvent(enum.Enum):
    """Events of a GPU."""

    ANSWERED = "ANSWERED"
    SILENT = "SILENT"
    FAULT = "FAULT"
    BACK = "BACK"


TRANSITIONS: Final[dict[tuple[GpuState, GpuEvent], GpuState]] = {
    (GpuState.HEALTHY, GpuEvent.ANSWERED): GpuState.HEALTHY,
    (GpuState.HEALTHY, GpuEvent.SILENT): GpuState.SUSPECT,
    (GpuState.HEALTHY, GpuEvent.FAULT): GpuState.LOST,
    (GpuState.SUSPECT, GpuEvent.ANSWERED): GpuState.HEALTHY,
    (GpuState.SUSPECT, GpuEvent.SILENT): GpuState.SUSPECT,
    (GpuState.SUSPECT, GpuEvent.FAULT): GpuState.LOST,
    (GpuState.LOST, GpuEvent.ANSWERED): GpuState.LOST,
    (GpuState.LOST, GpuEvent.SILENT): GpuState.LOST,
    (GpuState.LOST, GpuEvent.FAULT): GpuState.LOST,
    (GpuState.LOST, GpuEvent.BACK): GpuState.HEALTHY,
}

LIVES: Final = EventTable("GPU", TRANSITIONS)


class WatchedGpu:
    """One GPU and its state. ``reason`` says why the GPU is lost, ``interval_s`` is the period of NVML."""

    def __init__(self, uuid: str, device: str, product: str, interval_s: float) -> None:
        self.uuid = uuid
        self.device = device
        self.product = product
        self.state = GpuState.HEALTHY
        self.reason = ""
        #: The last reading, or None if the GPU is lost or NVML is silent about it.
        self.reading: GpuReading | None = None
        #: The count of each Xid.
        self.xids: Counter[int] = Counter()
        self._first_probation_s = interval_s * PROBATION_READINGS
        self._probation_s = 0.0
        #: The time since which a lost GPU has answered well.
        self._good_since = math.inf
        self._back_at = -math.inf
        self._uncorrected: int | None = None
        self._contained_at = -math.inf

    def on_report(self, report: GpuReport, now: float) -> None:
        self.reading = report.reading
        fault = report.fault or self._memory_fault(report.reading, now)
        if fault:
            self.fault(fault, now)
        elif report.reading is None:
            self.silent()
        else:
            self._good_since = min(self._good_since, now)
            is_back = self.state is GpuState.LOST and now - self._good_since >= self._probation_s
            self._apply(GpuEvent.BACK if is_back else GpuEvent.ANSWERED)
            if is_back:
                self.reason, self._back_at = "", now

    def xid(self, number: int, now: float) -> None:
        """Process an error that the driver reported. ``NON_FENCING_XIDS`` leave the state as it is."""
        self.xids[number] += 1
        if number == CONTAINED_XID:
            self._contained_at = now
        if number not in NON_FENCING_XIDS:
            self.fault(f"its driver reported Xid {number}", now)

    def fault(self, reason: str, now: float) -> None:
        """Record that the GPU cannot be used; the first reason is kept."""
        if self.state is not GpuState.LOST:
            again = now - self._back_at < STEADY_S
            doubled = min(MAX_PROBATION_S, self._probation_s * 2)
            self._probation_s = max(doubled, self._first_probation_s) if again else self._first_probation_s
            self.reason = reason
        self._good_since = math.inf
        self._apply(GpuEvent.FAULT)

    def silent(self) -> None:
        self.reading = None
        self._good_since = math.inf
        self._apply(GpuEvent.SILENT)

    def _memory_fault(self, reading: GpuReading | None, now: float) -> str:
        """Return a text about new memory errors, or "" for none and for those that the driver contained."""
        count = None if reading is None else reading.ecc_uncorrected
        if count is None:
            return ""
        before, self._uncorrected = self._uncorrected, count
        if before is None or count <= before or now - self._contained_at <= CONTAINED_S:
            return ""
        return f"its memory had {count - before} uncorrectable error{'s' * (count - before > 1)}"

    def _apply(self, event: GpuEvent) -> None:
        self.state = LIVES.after(self.state, event, self.uuid)


# ---- all GPUs ------------------------------------------------------------------------------------

#: The extra time of an NVML round before NVML counts as silent.
PATIENCE_S: Final = 2.0


class LostGpu(NamedTuple):
    """A GPU that no worker may use."""

    uuid: str
    device: str
    reason: str


class GpuSet:
    """All GPUs seen so far, by UUID. ``now`` is seconds of the monotonic clock everywhere."""

    def __init__(self, interval_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._gpus: dict[str, WatchedGpu] = {}
        self._devices: dict[str, str] = {}
        self._updated_at = now
        self._is_updated = False

    def __iter__(self) -> Iterator[WatchedGpu]:
        return iter(self._gpus.values())

    # ---- input --------------------------------------------------------------------------------

    def set_device(self, uuid: str, device: str) -> None:
        """Set the device name of a GPU in this server's models, which never changes."""
        self._devices[uuid] = device
        if (gpu := self._gpus.get(uuid)) is not None:
            gpu.device = device

    def restore(self, lost: Iterable[LostGpu], now: float) -> None:
        """Take over the lost GPUs of an earlier front. Each has to answer well again."""
        for one in lost:
            self._gpu(one.uuid, one.device, "").fault(one.reason, now)

    def update(self, report: NvmlRound, now: float) -> None:
        """Process a round of NVML answers. A GPU that is missing from the round is lost."""
        self._updated_at, self._is_updated = now, True
        for one in report.gpus:
            gpu = self._gpu(one.uuid, one.device, one.product)
            gpu.on_report(one, now)
        for uuid in self._gpus.keys() - {one.uuid for one in report.gpus}:
            self._gpus[uuid].reading = None
            self._gpus[uuid].fault("its driver does not list it any more", now)

    def count_xid(self, xid: Xid, now: float) -> None:
        for uuid in xid.uuids:
            gpu = self._gpus.get(uuid)
            if gpu is not None:
                gpu.xid(xid.number, now)

    def check_age(self, now: float) -> None:
        if self.is_stale(now):
            for gpu in self:
                gpu.silent()

    def _gpu(self, uuid: str, device: str, product: str) -> WatchedGpu:
        found = self._gpus.get(uuid)
        if found is None:
            device = self._devices.get(uuid, device)
            found = self._gpus[uuid] = WatchedGpu(uuid, device, product, self._interval_s)
        found.product = product or found.product
        return found

    # ---- queries ------------------------------------------------------------------------------

    def age_s(self, now: float) -> float:
        return now - self._updated_at if self._is_updated else math.inf

    def is_stale(self, now: float) -> bool:
        """Return whether NVML has been silent for longer than a round should take."""
        return now - self._updated_at > self._interval_s + PATIENCE_S

    def lost(self) -> tuple[LostGpu, ...]:
        return tuple(LostGpu(one.uuid, one.device, one.reason) for one in self if one.state is GpuState.LOST)

    def states(self) -> Mapping[str, GpuState]:
        return {one.uuid: one.state for one in self}
