"""What a door has said of itself, with what those before it in its place had counted. Pure."""

from __future__ import annotations

from collections import Counter

from gpuserve.front.exchange.transport import DoorCounts
from gpuserve.front.passage.messages import Status

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
    intake_nbytes=0,
    intake_refused=0,
    arena_nbytes=0,
    arena_blocks=0,
)


class DoorTally:
    """The account of one door over all of its processes."""

    def __init__(self) -> None:
        self.restarts = 0
        self._said = _NOTHING
        self._past = self.counts = _summed(None, _NOTHING, 0)

    def note(self, status: Status) -> None:
        self._said = status
        self.counts = _summed(self._past, status, self.restarts)

    def end(self) -> None:
        """The process has ended, and is started again: what it counted stays counted."""
        self._past = self.counts
        self.note(_NOTHING)

    def restarted(self) -> None:
        self.restarts += 1
        self.counts = self.counts._replace(restarts=self.restarts)

    def n_unaware(self, n_notices: int, n_open: int) -> int:
        """Of so many connections, after so many notices; one that was not heard of counts for all."""
        if not n_notices:
            return 0
        return n_open if self._said.notice < n_notices else self._said.n_unaware


def _summed(past: DoorCounts | None, said: Status, restarts: int) -> DoorCounts:
    return DoorCounts(
        n_requests=said.n_requests + (past.n_requests if past else 0),
        cpu_s=said.cpu_s + (past.cpu_s if past else 0.0),
        restarts=restarts,
        refused=Counter(said.refused) + Counter(past.refused if past else {}),
        late=Counter(said.late) + Counter(past.late if past else {}),
        intake_refused=said.intake_refused + (past.intake_refused if past else 0),
        n_held=said.n_held,
        n_streams=said.n_streams,
        unsent_nbytes=said.unsent_nbytes,
        intake_nbytes=said.intake_nbytes,
        arena_nbytes=said.arena_nbytes,
        arena_blocks=said.arena_blocks,
    )
