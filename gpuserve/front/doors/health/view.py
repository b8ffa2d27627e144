"""The health of the front as another thread sees it: the last report, and whether the front still turns.
Pure: reports and times come in. It belongs to the thread that answers by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpuserve.front.requests.server_status import HealthReport

#: A front whose event loop has not turned for so long will not turn again: only a restart helps. No request
#: keeps it so long, however large.
STUCK_S: Final = 30.0
#: Before the front has said anything.
_NOTHING_YET: Final = HealthReport(live=True, started=False, ready=False, models={})


class HealthView:
    """A ``HealthSource`` of what the front has said. ``now``: the time that ``turned`` and ``look`` go by."""

    def __init__(self, now: float) -> None:
        self.report = _NOTHING_YET
        self.ended = False
        self._turned_at = now
        self._stuck = False
        self._watchers: list[Callable[[], None]] = []

    @property
    def live(self) -> bool:
        """Whether the front says that it is live, and still says anything."""
        return self.report.live and not self._stuck

    def of(self, service: str) -> bool | None:
        """The answer of ``grpc.health.v1`` for a service name; None where there is no such service."""
        return self.report._replace(live=self.live).of(service)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after anything may have changed. Call the result to end it."""
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback)

    def say(self, report: HealthReport, ended: bool) -> None:
        """Take over what the front says; ``ended``: it says nothing more."""
        self.report, self.ended = report, ended
        self._changed()

    def turned(self, now: float) -> None:
        """Note that the front's event loop turned at this time, in seconds."""
        self._turned_at = now

    def look(self, now: float) -> None:
        """Judge at this time, in seconds, whether the front still turns."""
        stuck = now - self._turned_at > STUCK_S
        if stuck is not self._stuck:
            self._stuck = stuck
            self._changed()

    def _changed(self) -> None:
        for callback in list(self._watchers):
            callback()
