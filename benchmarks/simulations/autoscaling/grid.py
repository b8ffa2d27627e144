"""The settings that are compared, on which traffic, and which of them is taken. Pure and seeded."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from benchmarks.simulations.autoscaling.controller import DEFAULT_UP, Kind, Policy, Rules, Scaling
from benchmarks.simulations.autoscaling.run import USUAL, Outcome, Setting, Surroundings, run
from benchmarks.simulations.autoscaling.service import Service, Steady, steady_states
from benchmarks.simulations.autoscaling.traffic import DAY_S, Trace, arrivals, bursty, diurnal

SEED: Final = 20
#: Traffic in pods that would be fully busy with it: the top of the day; calm and bursts.
_PEAK, _CALM, _BURST = 20.0, 4.0, 16.0
_BURSTY_S: Final = 18 * 3600
#: What a day may refuse: one request in a hundred thousand.
_REFUSED: Final = 1e-5
#: A longer window has to save so much of what bursts refuse, or the shorter one is taken.
_WORTHWHILE: Final = 0.05

TARGETS: Final = tuple(percent / 100 for percent in range(30, 101, 10))
DOWN_WINDOWS_S: Final = (120, 300, 600)
#: What is not in the grid. Twice as many pods at most in the time in which one starts: until the new ones say
#: something, a queue that was left over asks for ever more of them.
_UP: Final = Rules(0, (Policy(Kind.PERCENT, 100, 60),))
_DOWN: Final = Rules(300, (Policy(Kind.PERCENT, 10, 60),))
BASE: Final = Setting(Scaling(0.7, _UP, _DOWN))
#: A pod on a node that is there, and one for which a node has to come first.
STARTS_S: Final = (60.0, 240.0)


@dataclass(frozen=True, slots=True)
class Case:
    """Pods of one service under one trace. ``work_s`` is how long one pod would be fully busy with it."""

    service: Service
    states: Sequence[Steady]
    trace: Trace
    arrivals: Sequence[int]

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.service.name}; {self.trace.name}"

    @property
    def work_s(self) -> float:
        """The work in the trace, in seconds of a pod."""
        return sum(self.arrivals) / self.service.capacity_hz

    def run(self, setting: Setting, where: Surroundings = USUAL) -> Outcome:
        """Run the fleet under a setting."""
        return run(self.service, self.states, self.arrivals, setting, SEED, where)


class Point(NamedTuple):
    """A case under a setting, without its history. ``pods`` is the mean of pods, ``spare`` that over the pods
    that would be fully busy.
    """

    target: float
    window_s: int
    start_s: float
    case: str
    refused_part: float
    p50_ms: float
    p99_ms: float
    pods: float
    spare: float
    events: int
    most_pods: int


class Variation(NamedTuple):
    """One thing that is not as in the setting taken."""

    what: str
    value: str
    setting: Setting
    where: Surroundings


def cases(
    services: Iterable[Service],
    seed: int = SEED,
    *,
    day_s: int = DAY_S,
    bursty_s: int = _BURSTY_S,
    requests: int = 12_000,
) -> list[Case]:
    """Every service under either trace."""
    found: list[Case] = []
    for service in services:
        states, full = steady_states(service, seed, requests), service.capacity_hz
        traces = (
            diurnal(_PEAK * full, seed, day_s),
            bursty(_CALM * full, _BURST * full, seed, bursty_s),
        )
        found += [Case(service, states, one, arrivals(one, seed)) for one in traces]
    return found


def with_target(setting: Setting, target: float, window_s: int) -> Setting:
    """The same with another target, and another window on the way down."""
    down = replace(setting.scaling.down, window_s=window_s)
    return replace(setting, scaling=replace(setting.scaling, target=target, down=down))


def point(case: Case, setting: Setting, where: Surroundings = USUAL) -> Point:
    """Run one point of the grid."""
    seen, seconds = case.run(setting, where), len(case.arrivals)
    return Point(
        setting.scaling.target,
        setting.scaling.down.window_s,
        where.start_s,
        case.name,
        seen.refused_part,
        seen.p50_s * 1e3,
        seen.p99_s * 1e3,
        seen.pod_s / seconds,
        seen.pod_s / case.work_s,
        seen.events,
        seen.most_pods,
    )


def points(
    over: Sequence[Case],
    targets: Sequence[float] = TARGETS,
    windows_s: Sequence[int] = DOWN_WINDOWS_S,
    starts_s: Sequence[float] = STARTS_S,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Point]:
    """The points of the grid."""
    found = []
    for target in targets:
        for window_s in windows_s:
            tell(f"target {target:g}, window {window_s} s")
            setting = with_target(BASE, target, window_s)
            for start_s in starts_s:
                where = replace(USUAL, start_s=start_s)
                found += [point(case, setting, where) for case in over]
    return found


def choose(found: Sequence[Point], longest_wait_ms: Mapping[str, float]) -> tuple[float, int]:
    """The target and the window down.

    Of each window the targets are walked upwards, as long as no day refuses requests or has a p99 of the
    time that requests wait above ``longest_wait_ms`` of its case, and as every case needs fewer pods than
    under the target before. Of the windows it is the shortest, unless a longer one saves a worthwhile part of
    what bursts refuse.

    Raises:
        ValueError: under no setting do the days keep their limits.
    """
    windows = sorted({one.window_s for one in found})
    walked = [(_highest([one for one in found if one.window_s == at], longest_wait_ms), at) for at in windows]
    good = [(target, window_s) for target, window_s in walked if target is not None]
    if not good:
        raise ValueError("under no setting do the days keep their limits")
    best = good[0]
    for one in good[1:]:
        if _refused(_of(found, one)) < (1 - _WORTHWHILE) * _refused(_of(found, best)):
            best = one
    return best


def _highest(found: Sequence[Point], longest_wait_ms: Mapping[str, float]) -> float | None:
    """Of one window, the target at which the walk ends."""
    highest, before = None, [math.inf] * len(found)
    for target in sorted({one.target for one in found}):
        here = [one for one in found if one.target == target]
        pods = [one.pods for one in here if one.start_s == STARTS_S[0]]
        if not _holds(here, longest_wait_ms) or not all(map(operator.lt, pods, before)):
            break
        highest, before = target, pods
    return highest


def longest_waits_ms(over: Iterable[Case]) -> dict[str, float]:
    """For the cases that must keep it, the days: a request may wait for one batch."""
    return {case.name: case.service.batch_s * 1e3 for case in over if case.trace.name.startswith("diurnal")}


def _of(found: Sequence[Point], setting: tuple[float, int]) -> list[Point]:
    return [one for one in found if (one.target, one.window_s) == setting]


def _holds(found: Sequence[Point], longest_wait_ms: Mapping[str, float]) -> bool:
    return all(
        one.refused_part <= _REFUSED and one.p99_ms <= longest_wait_ms[one.case]
        for one in found
        if one.case in longest_wait_ms
    )


def _refused(found: Sequence[Point]) -> float:
    return math.fsum(one.refused_part for one in found)


def variations(taken: Setting) -> Iterator[Variation]:
    """The setting taken, with one thing at a time otherwise."""
    yield Variation("as taken", "", taken, USUAL)
    for name, policies in (
        ("100 % or 4 pods in 15 s", DEFAULT_UP.policies),
        ("100 % in 30 s", (Policy(Kind.PERCENT, 100, 30),)),
        ("100 % in 120 s", (Policy(Kind.PERCENT, 100, 120),)),
    ):
        yield Variation("at most up", name, _scaled(taken, up=Rules(0, policies)), USUAL)
    for window_s in (30, 60):
        up = replace(taken.scaling.up, window_s=window_s)
        yield Variation("window up", f"{window_s} s", _scaled(taken, up=up), USUAL)
    for name, policies in (
        ("no limit", ()),
        ("1 pod in 120 s", (Policy(Kind.PODS, 1, 120),)),
    ):
        down = replace(taken.scaling.down, policies=policies)
        yield Variation("at most down", name, _scaled(taken, down=down), USUAL)
    yield Variation("a pod says at most", "2", replace(taken, limit=2.0), USUAL)
    for average_s in (30, 60):
        yield Variation("averaged over", f"{average_s} s", replace(taken, average_s=average_s), USUAL)
    for start_s in (15.0, 120.0, 240.0):
        yield Variation("a pod starts in", f"{start_s:g} s", taken, replace(USUAL, start_s=start_s))
    yield Variation("queue of a pod", "32,768 rows", taken, replace(USUAL, queue_rows=32_768))


def _scaled(setting: Setting, *, up: Rules | None = None, down: Rules | None = None) -> Setting:
    scaling = replace(setting.scaling, up=up or setting.scaling.up, down=down or setting.scaling.down)
    return replace(setting, scaling=scaling)
