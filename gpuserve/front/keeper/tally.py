"""What a door has said of itself. Pure."""

from __future__ import annotations

from typing import Any, Final

from gpuserve.front.exchange.transport import DoorCounts
from gpuserve.front.passage.messages import Status

#: The fields of ``Status`` that only grow.
_COUNTED: Final = ("n_requests", "cpu_s", "refused", "late", "limited", "intake_refused", "reclaimed")
#: Of a door that has said nothing yet.
_NOTHING = Status(
    notice=0,
    n_unaware=0,
    n_held=0,
    n_requests=0,
    cpu_s=0.0,
    n_streams=0,
    unsent_nbytes=0,
    refused={},
    late={},
    limited={},
    intake_nbytes=0,
    intake_refused=0,
    arena_nbytes=0,
    arena_blocks=0,
    reclaimed={},
)


class DoorTally:
    """The account of one door over all of its processes, each of which goes on from the counts before it."""

    def __init__(self) -> None:
        self.restarts = 0
        self._said = _NOTHING
        self.counts = _counts(_NOTHING, 0)

    @property
    def counted(self) -> dict[str, Any]:
        """What the next process in this place is to go on from, by the fields of ``Status``."""
        return {name: getattr(self._said, name) for name in _COUNTED}

    def note(self, status: Status) -> None:
        self._said = status
        self.counts = _counts(status, self.restarts)

    def end(self) -> None:
        """The process has ended, and is started again: what it counted stays counted."""
        self.note(_NOTHING._replace(**self.counted))

    def restarted(self, restarts: int) -> None:
        """Note how many processes were started in this place, but for the first."""
        self.restarts = restarts
        self.counts = self.counts._replace(restarts=restarts)

    def n_unaware(self, n_notices: int, n_open: int) -> int:
        """Of so many connections, after so many notices; one that was not heard of counts for all."""
        if not n_notices:
            return 0
        return n_open if self._said.notice < n_notices else self._said.n_unaware


def _counts(said: Status, restarts: int) -> DoorCounts:
    fields = {name: getattr(said, name) for name in DoorCounts._fields if name != "restarts"}
    return DoorCounts(restarts=restarts, **fields)
