"""The functions of NVML that wait for events; Xids are the only ones that come."""

from __future__ import annotations

import time
from typing import Any

from cuda_simulation.machine import xids

from pynvml._devices import gpu_of, refused
from pynvml._errors import entry, library
from pynvml._structures import EventData, c_nvmlDevice_t

nvmlEventTypeNone = 0
nvmlEventTypeSingleBitEccError = 1
nvmlEventTypeDoubleBitEccError = 2
nvmlEventTypePState = 4
nvmlEventTypeXidCriticalError = 8
nvmlEventTypeClock = 16
nvmlEventTypeAll = 65439
_SUPPORTED = 31
_POLL_S = 0.01
_MS = 1000


class c_nvmlEventSet_t:
    """What somebody waits for, and how far he has heard."""

    def __init__(self, heard: int) -> None:
        self.heard = heard
        self.gpus: dict[str, int] = {}


@entry
def nvmlDeviceGetSupportedEventTypes(handle: Any) -> int:
    gpu_of(handle)
    return _SUPPORTED


@entry
def nvmlEventSetCreate() -> c_nvmlEventSet_t:
    return c_nvmlEventSet_t(len(xids(library.view.directory)))


@entry
def nvmlDeviceRegisterEvents(handle: Any, eventTypes: int, eventSet: c_nvmlEventSet_t) -> None:
    eventSet.gpus[gpu_of(handle).uuid] = eventTypes


@entry
def nvmlEventSetWait_v2(eventSet: c_nvmlEventSet_t, timeoutms: int) -> EventData:
    deadline = time.monotonic() + timeoutms / _MS
    while True:
        found = _next(eventSet)
        if found:
            return found
        if any(library.view.gpu(uuid).lost for uuid in eventSet.gpus):
            raise refused("GPU_IS_LOST")
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise refused("TIMEOUT")
        time.sleep(min(_POLL_S, left_s))


@entry
def nvmlEventSetWait(eventSet: c_nvmlEventSet_t, timeoutms: int) -> EventData:
    return nvmlEventSetWait_v2(eventSet, timeoutms)


@entry
def nvmlEventSetFree(eventSet: c_nvmlEventSet_t) -> None:
    eventSet.gpus.clear()


def _next(event_set: c_nvmlEventSet_t) -> EventData | None:
    for uuid, xid in xids(library.view.directory)[event_set.heard :]:
        event_set.heard += 1
        if event_set.gpus.get(uuid, 0) & nvmlEventTypeXidCriticalError:
            return EventData(c_nvmlDevice_t(uuid), nvmlEventTypeXidCriticalError, xid)
    return None
