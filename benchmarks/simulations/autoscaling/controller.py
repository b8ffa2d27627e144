"""The HorizontalPodAutoscaler of ``autoscaling/v2`` for one metric of type Pods with an average value, as its
documentation describes it. Pure: readings and the time go in, a number of pods comes out.

Left out, since nothing here has them: several metrics, pods that failed, and the readiness rules for CPU.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: Of ``--horizontal-pod-autoscaler-sync-period`` and ``--horizontal-pod-autoscaler-tolerance``, by default.
SYNC_PERIOD_S: Final = 15
TOLERANCE: Final = 0.1


class Kind(enum.Enum):
    """What the value of a policy counts."""

    PODS = "Pods"
    PERCENT = "Percent"


class Direction(enum.Enum):
    """Where the number of pods goes."""

    UP = 1
    DOWN = -1


@dataclass(frozen=True, slots=True)
class Policy:
    """So many pods, or per cent of them, may come or go within ``period_s``."""

    kind: Kind
    value: int
    period_s: int

    def limit(self, before: int, direction: Direction) -> int:
        """How many pods there may be, where there were ``before`` at the begin of the period."""
        if self.kind is Kind.PODS:
            return before + direction.value * self.value
        exact = before * (100 + direction.value * self.value) / 100
        return math.ceil(exact) if direction is Direction.UP else math.floor(exact)


@dataclass(frozen=True, slots=True)
class Rules:
    """One direction: the most careful recommendation of the window is taken, and of the policies the one that
    allows the most. Without policies there is no limit.
    """

    window_s: int
    policies: tuple[Policy, ...] = ()


#: What an HPA has that says nothing of its behaviour.
DEFAULT_UP: Final = Rules(0, (Policy(Kind.PERCENT, 100, 15), Policy(Kind.PODS, 4, 15)))
DEFAULT_DOWN: Final = Rules(300, (Policy(Kind.PERCENT, 100, 15),))


@dataclass(frozen=True, slots=True)
class Scaling:
    """The settings of one autoscaler."""

    target: float
    up: Rules = DEFAULT_UP
    down: Rules = DEFAULT_DOWN
    least: int = 1
    most: int = 64
    tolerance: float = TOLERANCE


class Autoscaler:
    """One autoscaler over time. ``decide`` is called once a sync period."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._recommended: deque[tuple[float, int]] = deque()
        #: When, and by how many pods.
        self._changes: deque[tuple[float, int]] = deque()
        self._longest_s = max(scaling.up.window_s, scaling.down.window_s)
        policies = (*scaling.up.policies, *scaling.down.policies)
        self._longest_period_s = max((one.period_s for one in policies), default=0)

    def decide(self, now: float, pods: int, readings: Sequence[float]) -> int:
        """How many pods there are to be from now on.

        Args:
            pods: how many there are, those that start included.
            readings: what those that say something say; the others are missing.
        """
        wanted = recommend(pods, readings, self._scaling)
        if wanted is None:
            return pods
        stable = self._stabilised(now, pods, min(max(wanted, self._scaling.least), self._scaling.most))
        chosen = self._within_policies(now, pods, stable)
        if chosen != pods:
            self._changes.append((now, chosen - pods))
        return chosen

    def _stabilised(self, now: float, pods: int, wanted: int) -> int:
        """Up to the least, and down to the most, that was recommended within the windows."""
        self._recommended.append((now, wanted))
        while now - self._recommended[0][0] > self._longest_s:
            self._recommended.popleft()
        up, down = self._scaling.up.window_s, self._scaling.down.window_s
        least = min(one for at, one in self._recommended if now - at <= up)
        most = max(one for at, one in self._recommended if now - at <= down)
        return min(max(pods, least), most)

    def _within_policies(self, now: float, pods: int, wanted: int) -> int:
        while self._changes and now - self._changes[0][0] >= self._longest_period_s:
            self._changes.popleft()
        if wanted > pods:
            rules, direction = self._scaling.up, Direction.UP
        else:
            rules, direction = self._scaling.down, Direction.DOWN
        limits = [one.limit(self._before(now, pods, one), direction) for one in rules.policies]
        if not limits or wanted == pods:
            return wanted
        if direction is Direction.UP:
            return max(pods, min(wanted, max(limits)))
        return min(pods, max(wanted, min(limits)))

    def _before(self, now: float, pods: int, policy: Policy) -> int:
        """How many pods there were when the period of a policy began."""
        return pods - sum(change for at, change in self._changes if now - at < policy.period_s)


def recommend(pods: int, readings: Sequence[float], scaling: Scaling) -> int | None:
    """How many pods bring the average to the target; None: nobody says anything, so nothing is done.

    Pods that say nothing are taken to be idle where the others want more of them, and to be at the target
    where the others want fewer. They change no direction.
    """
    if not readings:
        return None
    ratio = sum(readings) / len(readings) / scaling.target
    missing = pods - len(readings)
    if missing <= 0:
        return pods if _is_near(ratio, scaling) else _ceil(ratio * len(readings))
    filled = sum(readings) + (missing * scaling.target if ratio < 1 else 0.0)
    careful = filled / pods / scaling.target
    if _is_near(careful, scaling) or (careful > 1) != (ratio > 1):
        return pods
    wanted = _ceil(careful * pods)
    return pods if (careful < 1 and wanted > pods) or (careful > 1 and wanted < pods) else wanted


def _is_near(ratio: float, scaling: Scaling) -> bool:
    return 1 - scaling.tolerance <= ratio <= 1 + scaling.tolerance


def _ceil(value: float) -> int:
    """Up to the next whole number, but for what rounding added."""
    return math.ceil(value - 1e-9)
