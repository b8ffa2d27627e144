"""Detection of bursts of refusals, and of batches that took much longer than earlier ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from gpuserve.core.event_log import EventKind
from gpuserve.front.observability.metrics.model_metrics import Histogram, ModelMetrics

#: This many refusals between two polls are a burst.
BURST: Final = 10
#: A batch is slow if it took this many times the mean of so many earlier batches, and at least ``SLOW_S``.
SLOW_TIMES: Final = 10.0
KNOWN_BATCHES: Final = 20
SLOW_S: Final = 0.1
#: The same event of one model or instance is reported no more often than this.
PAUSE_S: Final = 10.0


class DetectedEvent(NamedTuple):
    """An event that the front has observed and the supervisor is to publish."""

    kind: EventKind
    model: str
    version: int
    instance: str
    facts: Mapping[str, Any]


class AnomalyDetector:
    """The counts at the last poll, and at the last event about them."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, str], _ModelState] = {}

    def poll(self, one: ModelMetrics, now: float) -> Iterator[DetectedEvent]:
        """Yield the events of a model since the last poll. ``now`` is seconds of a monotonic clock."""
        of = one.model, one.version
        state = self._states.get(of)
        if state is None or state.metrics is not one:
            state = self._states[of] = _ModelState(one, _Refusals(one, now), {})
        if (facts := state.refusals.poll(one, now)) is not None:
            yield DetectedEvent(EventKind.REFUSALS, one.model, int(one.version), "", facts)
        for name, instance in one.instances.items():
            batches = state.batches.get(name)
            if batches is None:
                state.batches[name] = _Batches(instance.compute)
            elif (facts := batches.poll(instance.compute, now)) is not None:
                yield DetectedEvent(EventKind.SLOW_BATCH, one.model, int(one.version), name, facts)

    def retain(self, those: Iterable[ModelMetrics]) -> None:
        """Drop the state of all models but these."""
        kept = {(one.model, one.version) for one in those}
        for of in self._states.keys() - kept:
            del self._states[of]


class _ModelState(NamedTuple):
    metrics: ModelMetrics
    refusals: _Refusals
    batches: dict[str, _Batches]


class _Refusals:
    """The refusals of one model. ``since`` is the start of the burst, or the last event about it."""

    __slots__ = ("counts", "last", "quiet_until", "since")

    def __init__(self, metrics: ModelMetrics, now: float) -> None:
        self.counts = dict(metrics.outcomes.rejections)
        self.last = sum(self.counts.values())
        self.since = now
        self.quiet_until = now

    def poll(self, metrics: ModelMetrics, now: float) -> dict[str, Any] | None:
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
        period_s = round(now - since, 3)
        return {"refusals": sum(reasons.values()), "reasons": reasons, "period_s": period_s}


class _Batches:
    """The batches of one instance, by its duration histogram."""

    __slots__ = ("counts", "quiet_until", "total")

    def __init__(self, compute: Histogram) -> None:
        self.counts = list(compute.counts)
        self.total = compute.total
        self.quiet_until = 0.0

    def poll(self, compute: Histogram, now: float) -> dict[str, Any] | None:
        if compute.total == self.total:  # nothing ran
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
    """Return a lower bound of the slowest new batch and the count of batches over the limit, or None."""
    found = None
    for bound, old, new in zip(compute.bounds, before[1:], compute.counts[1:], strict=True):
        if new > old and bound >= limit_s:
            found = bound, (found[1] if found else 0) + new - old
    return found
