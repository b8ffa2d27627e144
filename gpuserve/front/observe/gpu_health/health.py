"""The health of one GPU as states and a table. Pure: time is an argument, nothing is asked here.

::

                 silent                  fault
    HEALTHY ────────────────► SUSPECT ────────────► LOST
       ▲ ▲      answered         │                   │ ▲
       │ └───────────────────────┘       fault       │ │
       │ └───────────────────────────────────────────┼─┘
       └─────────────────────────────────────────────┘
                 back: answered well for long enough

SUSPECT: NVML does not answer, which says little about the GPU: it is used on. LOST: it cannot be used;
nothing but a time of good answers ends that, which is longer each time for one that comes and goes.
"""

from __future__ import annotations

import enum
import math
from typing import Final

from gpuserve.core.states import EventTable
from gpuserve.devices.machine import GpuReading, GpuReport

#: Errors that a program makes, not the GPU: those that NVIDIA's device plugin for Kubernetes passes over too.
APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
#: A lost GPU is back after so many rounds of good answers; each time it is lost again soon, twice as many.
PROBATION_READINGS: Final = 5
MAX_PROBATION_S: Final = 600.0
#: A GPU that was healthy this long is not counted as one that comes and goes.
STEADY_S: Final = 3600.0


class GpuState(enum.Enum):
    """Whether a GPU can be used, as far as is known."""

    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"
    LOST = "LOST"


class GpuEvent(enum.Enum):
    """What can happen to a GPU."""

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


class GpuLife:
    """One GPU. ``reason`` says why it is lost. ``interval_s`` is the time between two rounds of questions."""

    def __init__(self, uuid: str, interval_s: float) -> None:
        self.uuid = uuid
        self.state = GpuState.HEALTHY
        self.reason = ""
        self._first_probation_s = interval_s * PROBATION_READINGS
        self._probation_s = 0.0
        #: Since when a lost GPU answers well.
        self._good_since = math.inf
        self._back_at = -math.inf
        self._uncorrected: int | None = None

    def heard(self, report: GpuReport, now: float) -> None:
        fault = report.fault or self._memory_fault(report.reading)
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
        """Judge the GPU by an error that its driver reported; those that a program makes change nothing."""
        if number not in APPLICATION_XIDS:
            self.fault(f"its driver reported Xid {number}", now)

    def fault(self, reason: str, now: float) -> None:
        """Note that the GPU cannot be used; the first reason is kept."""
        if self.state is not GpuState.LOST:
            again = now - self._back_at < STEADY_S
            doubled = min(MAX_PROBATION_S, self._probation_s * 2)
            self._probation_s = max(doubled, self._first_probation_s) if again else self._first_probation_s
            self.reason = reason
        self._good_since = math.inf
        self._apply(GpuEvent.FAULT)

    def silent(self) -> None:
        self._good_since = math.inf
        self._apply(GpuEvent.SILENT)

    def _memory_fault(self, reading: GpuReading | None) -> str:
        """That there are new uncorrectable errors; "" if none. Those before the first reading are history."""
        count = None if reading is None else reading.ecc_uncorrected
        if count is None:
            return ""
        before, self._uncorrected = self._uncorrected, count
        if before is None or count <= before:
            return ""
        return f"its memory had {count - before} uncorrectable error{'s' * (count - before > 1)}"

    def _apply(self, event: GpuEvent) -> None:
        self.state = LIVES.after(self.state, event, self.uuid)
