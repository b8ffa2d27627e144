"""One sequence as its scheduler knows it: where it is in its life, and which of its requests wait. Pure.

::

    BACKLOG ──seat──► SEATED ──end──► ENDED
       ▲  │             │               ▲
       │  └─────────────┼──────end──────┘
       └───step back────┘

A correlation id may begin anew at any time, also before its last request has run: the requests of both
sequences then stand in one line here, so that the callable never meets them in another order. A *run* is
what belongs to one beginning: the requests from a start to the next.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from gpuserve.core.states import StepTable
from gpuserve.front.queueing.queue import QueuedRequest


class SequenceState(enum.Enum):
    """What a sequence has: a place in the backlog, a seat, or an end, which is final."""

    BACKLOG = enum.auto()
    SEATED = enum.auto()
    ENDED = enum.auto()


STATES: Final = StepTable(
    "sequence",
    {
        SequenceState.BACKLOG: {SequenceState.SEATED, SequenceState.ENDED},
        SequenceState.SEATED: {SequenceState.BACKLOG, SequenceState.ENDED},
    },
)


@dataclass(eq=False, slots=True)
class ActiveSequence:
    """A sequence that has not ended. ``open``: a request may join it that is no start. ``begun``: the
    callable has been given a part of it and not yet its end.
    """

    id: int | str
    state: SequenceState = SequenceState.BACKLOG
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    running: QueuedRequest | None = None
    open: bool = False
    begun: bool = False
    instance: str = ""
    seat: int = -1

    def become(self, state: SequenceState) -> None:
        """Go on to another state; raises ``IllegalTransition`` where that cannot follow."""
        self.state = STATES.step(self.state, state, repr(self.id))

    @property
    def ready(self) -> bool:
        return bool(self.waiting) and self.running is None and self.state is SequenceState.SEATED

    @property
    def idle(self) -> bool:
        return not self.waiting and self.running is None

    def join(self, request: QueuedRequest) -> None:
        self.waiting.append(request)
        self.open = not _ends(request)

    def dispatch(self) -> QueuedRequest:
        self.running = request = self.waiting.popleft()
        self.begun = True
        return request

    def finish(self) -> bool:
        """End the request that runs; whether it was the last of its run."""
        assert self.running is not None
        last = _ends(self.running)
        self.running = None
        if last:
            self.begun = False
        return last

    def take_begun(self) -> list[QueuedRequest]:
        """Take out what waits of the run that has begun; those that start anew behind it stay."""
        position = next((n for n, one in enumerate(self.waiting) if _starts(one)), len(self.waiting))
        return self._take(0, position)

    def take_run(self, request: QueuedRequest) -> list[QueuedRequest]:
        """Take out what waits of the run of a request that waits, itself included."""
        at = self.waiting.index(request)
        first = next((n for n in range(at, -1, -1) if _starts(self.waiting[n])), 0)
        behind = range(at + 1, len(self.waiting))
        end = next((n for n in behind if _starts(self.waiting[n])), len(self.waiting))
        return self._take(first, end)

    def _take(self, first: int, end: int) -> list[QueuedRequest]:
        taken = list(islice(self.waiting, first, end))
        if end == len(self.waiting):  # what is taken back cannot be gone on with
            self.open = False
        left = [*islice(self.waiting, first), *islice(self.waiting, end, None)]
        self.waiting = deque(left)
        return taken


def _starts(request: QueuedRequest) -> bool:
    return request.correlation is not None and request.correlation.start


def _ends(request: QueuedRequest) -> bool:
    return request.correlation is not None and request.correlation.end
