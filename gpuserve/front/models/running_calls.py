"""Which calls of a model's callable are not back after its limit. Pure: times and batches come in. It is
looked now and then at what runs, and nothing is done for a batch: a look is all that it costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

#: Without a limit a call that is not back after so long is told of, once.
TELL_AFTER_S: Final = 60.0
#: And none of the same instance so soon after another.
TELL_AGAIN_S: Final = 60.0
#: A look that comes so much later than it should means that this process, or its machine, stood still. The
#: worker may have as well, so that time counts for nobody.
_LATE_S: Final = 1.0


class RunningCall(NamedTuple):
    """A batch at an instance that runs it: since when, and how many responses have come of it. With
    ``is_held_back`` it waits for clients to take those.
    """

    instance: str
    batch_id: int
    began_at: float
    n_responses: int = 0
    is_held_back: bool = False


class OverdueCall(NamedTuple):
    """A call that is not back; with a limit its instance is to be ended. A batch that gives responses is a
    call for each.
    """

    call: RunningCall
    ran_s: float
    limit_s: float


class _Seen:
    """One batch since it was seen first, or gave its last response."""

    __slots__ = ("n_responses", "since", "told")

    def __init__(self, call: RunningCall, since: float) -> None:
        self.n_responses = call.n_responses
        self.since = since
        self.told = False


class CallWatch:
    """The calls of one model. ``limit_s`` 0: none is ended, but those are told of that take very long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: dict[int, _Seen] = {}
        self._told_at: dict[str, float] = {}
        self._look_due_at = 0.0

    def look(self, calls: Iterable[RunningCall], now: float, next_look_at: float) -> list[OverdueCall]:
        """Say which calls are overdue now. Each is said once."""
        late_s = now - self._look_due_at if self._look_due_at else 0.0
        stood_s = late_s if late_s > _LATE_S else 0.0
        self._look_due_at = next_look_at
        before, self._seen = self._seen, {}
        overdue = []
        for call in calls:
            seen = before.get(call.batch_id)
            if seen is None:
                seen = _Seen(call, min(now, call.began_at + stood_s))
            elif call.is_held_back or call.n_responses != seen.n_responses:
                seen.n_responses, seen.since = call.n_responses, now
            else:
                seen.since += stood_s
            self._seen[call.batch_id] = seen
            if not seen.told and self._is_overdue(call, seen, now):
                seen.told = True
                overdue.append(OverdueCall(call, now - seen.since, self._limit_s))
        return overdue

    def _is_overdue(self, call: RunningCall, seen: _Seen, now: float) -> bool:
        ran_s = now - seen.since
        if self._limit_s:
            return ran_s >= self._limit_s
        if ran_s < TELL_AFTER_S or now < self._told_at.get(call.instance, -TELL_AGAIN_S) + TELL_AGAIN_S:
            return False
        self._told_at[call.instance] = now
        return True
