"""What in the counts of models is worth an event: bursts of refusals, and batches that took much longer than
those before. Pure: it is given the time, and looks at what was counted anyway, so no request costs more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from gpuserve.core.event_log import EventKind
from gpuserve.front.observe.metrics import Histogram, ModelMetrics

#: So many refusals from one look to the next are a burst.
BURST: Final = 10
#: A batch is slow that took so many times the mean of at least so many before it, and no less than this.
SLOW_TIMES: Final = 10.0
KNOWN_BATCHES: Final = 20
SLOW_S: Final = 0.1
#: Of one model or instance, the same is told no more often.
PAUSE_S: Final = 10.0


class Notice(NamedTuple):
    """An event that the front has seen and the supervisor is to tell."""

    kind: EventKind
    model: str
    version: int
    instance: str
    facts: Mapping[str, Any]


class Noticing:
    """What was counted at the last look, and at the last event about it."""

    def __init__(self) -> None:
        self._watched: dict[tuple[str, str], _Watched] = {}

    def look(self, one: ModelMetrics, now: float) -> Iterator[Notice]:
        """Give what there is to be told of a model. ``now`` is seconds of a monotonic clock."""
        of = one.model, one.version
        watched = self._watched.get(of)
        if watched is None or watched.metrics is not one:
            watched = self._watched[of] = _Watched(one, _Refusals(one, now), {})
        if (facts := watched.refusals.look(one, now)) is not None:
            yield Notice(EventKind.REFUSALS, one.model, int(one.version), "", facts)
        for name, instance in one.instances.items():
            batches = watched.batches.get(name)
            if batches is None:
                watched.batches[name] = _Batches(instance.compute)
            elif (facts := batches.look(instance.compute, now)) is not None:
                yield Notice(EventKind.SLOW_BATCH, one.model, int(one.version), name, facts)

    def keep(self, those: Iterable[ModelMetrics]) -> None:
        """Forget all models but these."""
        kept = {(one.model, one.version) for one in those}
        for of in self._watched.keys() - kept:
            del self._watched[of]


class _Watched(NamedTuple):
    metrics: ModelMetrics
    refusals: _Refusals
    batches: dict[str, _Batches]


class _Refusals:
    """The refusals of one model; ``since`` is when the burst began, or the last event about it."""

    __slots__ = ("counts", "last", "quiet_until", "since")

    def __init__(self, metrics: ModelMetrics, now: float) -> None:
        self.counts = dict(metrics.outcomes.rejections)
        self.last = sum(self.counts.values())
        self.since = now
        self.quiet_until = now

    def look(self, metrics: ModelMetrics, now: float) -> dict[str, Any] | None:
        counts = metrics.outcomes.rejections
        total = sum(counts.values())
        is_burst, self.last = total - self.last >= BURST, total
        if is_burst and now < self.quiet_until:
            return None
        before, since = self.counts, self.since
        if total != sum(before.values()) or not is_burst:
            self.counts, self.since = dict(counts), now
        if not is_burst:
            return None
        self.quiet_until = now + PAUSE_S
        reasons = {name: more for name, n in counts.items() if (more := n - before.get(name, 0)) > 0}
        return {
            "refusals": sum(reasons.values()), "reasons": reasons, "period_s": round(now - since, 3)
        }  # fmt: skip


class _Batches:
    """The batches of one instance, as its histogram counts them."""

    __slots__ = ("counts", "quiet_until", "total")

    def __init__(self, compute: Histogram) -> None:
        self.counts = list(compute.counts)
        self.total = compute.total
        self.quiet_until = 0.0

    def look(self, compute: Histogram, now: float) -> dict[str, Any] | None:
        if compute.total == self.total:  # nothing has run
            return None
        before, known, spent_s = self.counts, sum(self.counts), self.total
        self.counts, self.total = list(compute.counts), compute.total
        if known < KNOWN_BATCHES or now < self.quiet_until:
            return None
        usual_s = spent_s / known
        slow = _over(compute, before, max(SLOW_S, SLOW_TIMES * usual_s))
        if slow is None:
            return None
        self.quiet_until = now + PAUSE_S
        over_s, batches = slow
        return {"over_s": over_s, "usual_s": round(usual_s, 6), "batches": batches}


def _over(compute: Histogram, before: list[int], limit_s: float) -> tuple[float, int] | None:
    """Return what the slowest new batch took at least, and how many took over the limit; None: none did."""
    found = None
    for bound, old, new in zip(compute.bounds, before[1:], compute.counts[1:], strict=True):
        if new > old and bound >= limit_s:
            found = bound, (found[1] if found else 0) + new - old
    return found
