"""Lifecycles of the server as a whole and of its instances: states, transitions and restart back-off.
An instance that is HUNG ran its callable for too long and is being killed; it moves like READY, except HANG.
An instance that is ASLEEP (``on_demand``) keeps its process; it moves like READY, or is LOADING as it wakes::
            spawned            loaded             stop
    DOWN ────────────► LOADING ────────► READY ──────────► STOPPING        READY ──hang──► HUNG
     ▲ ▲                  │ died           │ died             │ died
     │ │  restart is due  ▼                ▼                  ▼
     │ └──────────────  WAITING ◄──────────┘               STOPPED
     │ its GPU is back    │ its GPU is lost
     └───────────────   FENCED
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any, Final, NamedTuple

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import Unavailable
from gpuserve.core.event_log import EventKind, EventLog
from gpuserve.core.states import EventTable, StepTable


class ServerState(enum.Enum):
    """The states of a server."""

    STARTING = "STARTING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


SERVER_STEPS: Final = StepTable(
    "the server",
    {
        ServerState.STOPPED: {ServerState.STARTING},
        ServerState.STARTING: {ServerState.SERVING, ServerState.STOPPING, ServerState.STOPPED},
        ServerState.SERVING: {ServerState.DRAINING, ServerState.STOPPING},
        ServerState.DRAINING: {ServerState.STOPPING},
        ServerState.STOPPING: {ServerState.STOPPED},
    },
)


class ServerLifecycle:
    """The state of one server. ``end()`` ends each of its runs."""

    def __init__(self, events: EventLog) -> None:
        self.state = ServerState.STOPPED
        self._events = events

    def move(self, state: ServerState) -> None:
        self.state = SERVER_STEPS.step(self.state, state)
        self._events.record(EventKind.SERVER_STATE, state=state.value)

    def end(self) -> None:
        """Enter STOPPED from any state, because all processes of the server have ended."""
        self.state = ServerState.STOPPED
        self._events.record(EventKind.SERVER_STATE, state=self.state.value)

    def change_refusal(self) -> Unavailable | None:
        """Return the error if nothing can be loaded, unloaded or changed at this moment, else None."""
        if self.state is ServerState.SERVING:
            return None
        return Unavailable("Server not ready" if self.state is ServerState.STARTING else "Server exiting")

    def command_refusal(self) -> Unavailable | None:
        """Return the error if no operator command except ``status`` is possible at this moment, else None."""
        if self.state is ServerState.SERVING:
            return None
        doing = "starting" if self.state is ServerState.STARTING else "stopping"
        return Unavailable(f"the server is {doing}, and takes no command but status")


class LiveSettings:
    """The present settings of a server. ``changed`` has the log and trace settings of clients, by kind."""

    def __init__(self, settings: ServerSettings) -> None:
        self.current = settings
        self.changed: dict[str, dict[str, Any]] = {}

    def adjust(self, changes: dict[str, Any]) -> None:
        self.current = dataclasses.replace(self.current, **changes)


class ServerObserver:
    """An observer of a server's start. Called in the supervisor's thread, so it must return at once."""

    def instance_changed(self, model: str, instance: str, device: str, state: str, phase: str) -> None:
        """Note that an instance is in a new state (``InstanceState`` name) or in a new phase of loading."""

    def server_ready(self, addresses: dict[str, str]) -> None:
        """Note that all models are loaded. Addresses are by "http", "grpc", "metrics" and "health"."""


class InstanceState(enum.Enum):
    """The states of an instance."""

    DOWN = "DOWN"
    LOADING = "LOADING"
    READY = "READY"
    HUNG = "HUNG"
    ASLEEP = "ASLEEP"
    WAITING = "WAITING"
    FENCED = "FENCED"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


class InstanceEvent(enum.Enum):
    """The events that change the state of an instance."""

    SPAWNED = "SPAWNED"
    LOADED = "LOADED"
    HANG = "HANG"
    SLEEP = "SLEEP"
    WAKE = "WAKE"
    DIED = "DIED"
    DUE = "DUE"
    FENCE = "FENCE"
    RELEASE = "RELEASE"
    STOP = "STOP"


INSTANCE_STEPS: Final = EventTable(
    "instance",
    {
        (InstanceState.DOWN, InstanceEvent.SPAWNED): InstanceState.LOADING,
        (InstanceState.DOWN, InstanceEvent.DIED): InstanceState.WAITING,  # its process could not be started
        (InstanceState.DOWN, InstanceEvent.FENCE): InstanceState.FENCED,
        (InstanceState.DOWN, InstanceEvent.STOP): InstanceState.STOPPED,
        (InstanceState.LOADING, InstanceEvent.LOADED): InstanceState.READY,
        (InstanceState.LOADING, InstanceEvent.DIED): InstanceState.WAITING,
        (InstanceState.LOADING, InstanceEvent.STOP): InstanceState.STOPPING,
        (InstanceState.READY, InstanceEvent.DIED): InstanceState.WAITING,
        (InstanceState.READY, InstanceEvent.STOP): InstanceState.STOPPING,
        (InstanceState.READY, InstanceEvent.HANG): InstanceState.HUNG,
        (InstanceState.READY, InstanceEvent.SLEEP): InstanceState.ASLEEP,
        (InstanceState.ASLEEP, InstanceEvent.WAKE): InstanceState.LOADING,
        (InstanceState.ASLEEP, InstanceEvent.DIED): InstanceState.WAITING,
        (InstanceState.ASLEEP, InstanceEvent.STOP): InstanceState.STOPPING,
        (InstanceState.HUNG, InstanceEvent.DIED): InstanceState.WAITING,
        (InstanceState.HUNG, InstanceEvent.STOP): InstanceState.STOPPING,
        (InstanceState.WAITING, InstanceEvent.DUE): InstanceState.DOWN,
        (InstanceState.WAITING, InstanceEvent.FENCE): InstanceState.FENCED,
        (InstanceState.WAITING, InstanceEvent.STOP): InstanceState.STOPPED,
        (InstanceState.FENCED, InstanceEvent.RELEASE): InstanceState.DOWN,
        (InstanceState.FENCED, InstanceEvent.STOP): InstanceState.STOPPED,
        (InstanceState.STOPPING, InstanceEvent.DIED): InstanceState.STOPPED,
        (InstanceState.STOPPING, InstanceEvent.STOP): InstanceState.STOPPING,
        (InstanceState.STOPPED, InstanceEvent.STOP): InstanceState.STOPPED,
    },
)

#: Restart back-off. The first restart comes at once; each further death at a young age doubles the delay.
FIRST_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 30.0
#: An instance that was ready for this long resets the back-off.
STEADY_S: Final = 10.0


class LiveInstance(NamedTuple):
    """A loaded worker as it is described to a front. ``link_fd`` is the front's end of its link. The worker's
    monitor keeps both descriptors. Its callable took ``load_s`` seconds to load, and runs ``slots`` batches
    at once. ``follower_pids`` are the processes of ranks other than 0.
    """

    name: str
    pid: int
    slots: int
    load_s: float
    link_fd: int
    pidfd: int
    follower_pids: tuple[int, ...] = ()


class InstanceLifecycle:
    """The state of one instance, and its next start. ``was_ready`` distinguishes a restart from a first
    start. ``restarts`` is for the metrics. Pure: times are arguments, in seconds of a monotonic clock.
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

    def apply(self, event: InstanceEvent, now: float) -> None:
        """Apply an event that happened at ``now``, and plan the restart after a death."""
        before = self.state
        self.state = INSTANCE_STEPS.after(before, event, self.name)
        if event is InstanceEvent.LOADED:
            self.was_ready = True
            self._ready_at = now
            self._is_excused = False
        elif event is InstanceEvent.DIED and self.state is InstanceState.WAITING:
            self._plan_restart(before, now)

    def restart_in_s(self, now: float) -> float:
        """Return the seconds until the next start: 0 if it is due, infinite if none is planned."""
        if self.state in {InstanceState.STOPPING, InstanceState.STOPPED, InstanceState.FENCED}:
            return math.inf
        return max(0.0, self.restart_at - now)

    def excuse(self, now: float) -> None:
        """Exclude the death of the present worker, or of the last one, from the restart back-off."""
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
