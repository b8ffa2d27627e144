"""The life of one instance as states and a table. Pure: the time is an argument (seconds of a monotonic
clock), and nothing is started here. One that is HUNG ran its callable for too long and is being killed; the
arrows from there are those from READY, but for ``hang``.

::

            spawned            loaded             stop
    DOWN ────────────► LOADING ────────► READY ──────────► STOPPING        READY ──hang──► HUNG
     ▲ ▲                  │ died           │ died             │ died
     │ │  restart is due  ▼                ▼                  ▼
     │ └──────────────  WAITING ◄──────────┘               STOPPED
     │ its GPU is back    │ its GPU is lost
     └───────────────   FENCED
"""

from __future__ import annotations

import enum
import math
from typing import Final, NamedTuple

from gpuserve.states import EventTable


class InstanceState(enum.Enum):
    """Where an instance stands."""

    DOWN = "DOWN"
    LOADING = "LOADING"
    READY = "READY"
    HUNG = "HUNG"
    WAITING = "WAITING"
    FENCED = "FENCED"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


class LifeEvent(enum.Enum):
    """What can happen to an instance."""

    SPAWNED = "SPAWNED"
    LOADED = "LOADED"
    HANG = "HANG"
    DIED = "DIED"
    DUE = "DUE"
    FENCE = "FENCE"
    RELEASE = "RELEASE"
    STOP = "STOP"


STEPS: Final = EventTable(
    "instance",
    {
        (InstanceState.DOWN, LifeEvent.SPAWNED): InstanceState.LOADING,
        (InstanceState.DOWN, LifeEvent.DIED): InstanceState.WAITING,  # not even a process was to be had
        (InstanceState.DOWN, LifeEvent.FENCE): InstanceState.FENCED,
        (InstanceState.DOWN, LifeEvent.STOP): InstanceState.STOPPED,
        (InstanceState.LOADING, LifeEvent.LOADED): InstanceState.READY,
        (InstanceState.LOADING, LifeEvent.DIED): InstanceState.WAITING,
        (InstanceState.LOADING, LifeEvent.STOP): InstanceState.STOPPING,
        (InstanceState.READY, LifeEvent.DIED): InstanceState.WAITING,
        (InstanceState.READY, LifeEvent.STOP): InstanceState.STOPPING,
        (InstanceState.READY, LifeEvent.HANG): InstanceState.HUNG,
        (InstanceState.HUNG, LifeEvent.DIED): InstanceState.WAITING,
        (InstanceState.HUNG, LifeEvent.STOP): InstanceState.STOPPING,
        (InstanceState.WAITING, LifeEvent.DUE): InstanceState.DOWN,
        (InstanceState.WAITING, LifeEvent.FENCE): InstanceState.FENCED,
        (InstanceState.WAITING, LifeEvent.STOP): InstanceState.STOPPED,
        (InstanceState.FENCED, LifeEvent.RELEASE): InstanceState.DOWN,
        (InstanceState.FENCED, LifeEvent.STOP): InstanceState.STOPPED,
        (InstanceState.STOPPING, LifeEvent.DIED): InstanceState.STOPPED,
        (InstanceState.STOPPING, LifeEvent.STOP): InstanceState.STOPPING,
        (InstanceState.STOPPED, LifeEvent.STOP): InstanceState.STOPPED,
    },
)

#: The first restart comes at once; one that dies young again waits longer each time.
FIRST_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 30.0
#: An instance that was ready this long has shown that it can run: its next death starts afresh.
STEADY_S: Final = 10.0


class LiveInstance(NamedTuple):
    """A loaded worker, of this server or of an attached program, as it is handed to a front. ``link_fd`` is
    the front's end of its link; it and ``pidfd`` stay the keeper's. Its callable took ``load_s`` seconds to
    load, and takes ``slots`` batches at once.
    """

    name: str
    pid: int
    slots: int
    load_s: float
    link_fd: int
    pidfd: int


class InstanceLife:
    """One instance: its state, and when its next start is due. ``was_ready`` tells a restart from a first
    start; ``restarts`` counts for the metrics.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = InstanceState.DOWN
        self.was_ready = False
        self.restarts = 0
        self.restart_at = 0.0
        self._ready_at = 0.0
        self._young_deaths = 0
        self._is_excused = False

    def apply(self, event: LifeEvent, now: float) -> None:
        """Enter the state that an event at ``now`` leads to, and plan the restart after a death."""
        before = self.state
        self.state = STEPS.after(before, event, self.name)
        if event is LifeEvent.LOADED:
            self.was_ready = True
            self._ready_at = now
            self._is_excused = False
        elif event is LifeEvent.DIED and self.state is InstanceState.WAITING:
            self._plan_restart(before, now)

    def restart_in_s(self, now: float) -> float:
        """Return the seconds until the next start; 0 when it is due, infinite where none is planned."""
        if self.state in {InstanceState.STOPPING, InstanceState.STOPPED, InstanceState.FENCED}:
            return math.inf
        return max(0.0, self.restart_at - now)

    def excuse(self, now: float) -> None:
        """Leave the death of the present worker, or of the last one, out of the restart back-off."""
        if self.state in {InstanceState.READY, InstanceState.HUNG}:
            self._is_excused = True
        else:
            self._young_deaths = max(0, self._young_deaths - 1)
            self.restart_at = min(self.restart_at, now)

    def _plan_restart(self, before: InstanceState, now: float) -> None:
        if before in {InstanceState.READY, InstanceState.HUNG} and now - self._ready_at >= STEADY_S:
            self._young_deaths = 0
        delay_s = 0.0
        if self._young_deaths and not self._is_excused:
            delay_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self._young_deaths - 1))
        self._young_deaths += not self._is_excused
        self._is_excused = False
        self.restarts += 1
        self.restart_at = now + delay_s
