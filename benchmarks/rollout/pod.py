"""One pod in the hands of a kubelet: its states, its probes, its end. No clock, no process, no socket here.

The shell (``node.py``) tells it what happened and does what it orders.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Final

from benchmarks.rollout.manifest import PodTemplate
from benchmarks.rollout.probes import ProbeRun

#: After its preStop a container has so long at least, whatever is left of its grace period.
LEAST_GRACE_S: Final = 2.0
#: The first restart comes at once, the second after this time, then twice as long each time.
BACKOFF_S: Final = 10.0
MOST_BACKOFF_S: Final = 300.0
#: Who ran so long is forgiven earlier ends.
FORGIVEN_S: Final = 600.0


class PodState(Enum):
    """Of its container, and whether there is to be another."""

    CREATED = "created"
    STARTING = "starting"  #: it runs; its startup probe has not passed
    STARTED = "started"
    ENDING = "ending"  #: it was deleted, or a probe failed for good
    WAITING = "waiting"  #: it has ended and will be started again
    GONE = "gone"


TRANSITIONS: Final = {
    PodState.CREATED: {PodState.STARTING, PodState.GONE},
    PodState.STARTING: {PodState.STARTED, PodState.ENDING, PodState.WAITING},
    PodState.STARTED: {PodState.ENDING, PodState.WAITING},
    PodState.ENDING: {PodState.WAITING, PodState.GONE},
    PodState.WAITING: {PodState.STARTING, PodState.GONE},
    PodState.GONE: set(),
}


class Order(Enum):
    """What is to be done to the processes."""

    START = "start"
    TERM = "SIGTERM"
    KILL = "SIGKILL"


class ProbeKind(Enum):
    """In the order in which a kubelet cares for them."""

    STARTUP = "startup"
    READINESS = "readiness"
    LIVENESS = "liveness"


class Pod:
    """``n_starts`` tells the container from earlier ones: answers to its probes carry it."""

    def __init__(self, name: str, template: PodTemplate, now: float) -> None:
        self.name = name
        self.template = template
        self.created = now
        self.state = PodState.CREATED
        self.deleted = False
        self.n_starts = 0
        #: Times that its grace period was over.
        self.n_killed = 0
        #: Times that a probe ended it.
        self.n_failed = 0
        self.ready_since: float | None = None
        self._runs: dict[ProbeKind, ProbeRun] = {}
        self._start_at = now
        self._started_at = now
        self._term_at = self._kill_at = math.inf
        self._n_ends = 0

    # ---- what the controllers see -----------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.ready_since is not None

    @property
    def takes_requests(self) -> bool:
        """Whether it belongs into the endpoint list."""
        return self.ready and not self.deleted

    def available(self, now: float, min_ready_s: float) -> bool:
        """Ready for so long that a rollout may count on it."""
        return self.ready_since is not None and now >= self.ready_since + min_ready_s

    # ---- what is due ------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """When there is something to order or to ask; infinite where it waits to be told."""
        return min(
            self._start_at,
            self._term_at,
            self._kill_at,
            *(run.due for run in self._runs.values()),
            math.inf,
        )

    def orders(self, now: float) -> list[Order]:
        """What is to be done by now; each thing is said once."""
        given = []
        if now >= self._start_at:
            given.append(self._start(now))
        if now >= self._term_at:
            self._term_at = math.inf
            given.append(Order.TERM)
        if now >= self._kill_at:
            self._kill_at = math.inf
            self.n_killed += 1
            given.append(Order.KILL)
        return given

    def questions(self, now: float) -> list[ProbeKind]:
        """The probes to ask now. Each is answered with ``answered`` before it is asked again."""
        found = [kind for kind, run in self._runs.items() if now >= run.due]
        for kind in found:
            self._runs[kind].asked()
        return found

    # ---- what happened ----------------------------------------------------------------------

    def answered(self, kind: ProbeKind, n_start: int, good: bool, now: float) -> None:
        """A probe of that start of the container came back; one of an earlier start is of no interest."""
        run = self._runs.get(kind)
        if run is None or n_start != self.n_starts:
            return
        run.answered(good, now)
        if kind is ProbeKind.READINESS:
            self._note_readiness(run.passing, now)
        elif run.decided and not run.passing:
            self.n_failed += 1
            self._end(now, self.template.grace_s if run.probe.grace_s is None else run.probe.grace_s)
        elif kind is ProbeKind.STARTUP and run.passing:
            self._note_started(now)

    def exited(self, now: float) -> None:
        """All processes of the container are gone."""
        self._runs.clear()
        self.ready_since = None
        self._term_at = self._kill_at = math.inf
        if self.deleted:
            self._move(PodState.GONE)
            return
        self._move(PodState.WAITING)
        self._n_ends = 1 if now - self._started_at >= FORGIVEN_S else self._n_ends + 1
        pause_s = 0.0 if self._n_ends == 1 else BACKOFF_S * 2.0 ** (self._n_ends - 2)
        self._start_at = now + min(pause_s, MOST_BACKOFF_S)

    def delete(self, now: float) -> None:
        """It is to go, and no other container is to come."""
        if self.deleted:
            return
        self.deleted = True
        self._start_at = math.inf
        if self.state in {PodState.CREATED, PodState.WAITING}:
            self._move(PodState.GONE)
        elif self.state is not PodState.ENDING:
            self._end(now, self.template.grace_s)

    # ---- transitions ------------------------------------------------------------------------

    def _start(self, now: float) -> Order:
        self._move(PodState.STARTING)
        self._start_at = math.inf
        self._started_at = now
        self.n_starts += 1
        startup = self.template.container.startup
        if startup is None:
            self._note_started(now)
        else:
            self._runs = {ProbeKind.STARTUP: ProbeRun(startup, now, passing=False)}
        return Order.START

    def _note_started(self, now: float) -> None:
        self._move(PodState.STARTED)
        container = self.template.container
        self._runs = {}
        if container.readiness is None:
            self._note_readiness(True, now)
        else:
            self._runs[ProbeKind.READINESS] = ProbeRun(container.readiness, now, passing=False)
        if container.liveness is not None:
            self._runs[ProbeKind.LIVENESS] = ProbeRun(container.liveness, now, passing=True)

    def _note_readiness(self, ready: bool, now: float) -> None:
        if not ready:
            self.ready_since = None
        elif self.ready_since is None:
            self.ready_since = now

    def _end(self, now: float, grace_s: float) -> None:
        """The preStop hook is part of the grace period."""
        self._move(PodState.ENDING)
        self._runs.clear()
        if not self.deleted:
            self.ready_since = None
        self._term_at = now + min(self.template.container.pre_stop_s, grace_s)
        self._kill_at = max(now + grace_s, self._term_at + LEAST_GRACE_S)

    def _move(self, state: PodState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"pod {self.name} cannot go from {self.state.name} to {state.name}")
        self.state = state
