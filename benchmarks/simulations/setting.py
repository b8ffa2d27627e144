"""What is simulated: a model, what things cost, who may send batches to whom, where connections end. Pure."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from typing import Final

_LAYOUTS: Final = 1001


class Sharing(enum.Enum):
    """Who may send batches to which worker."""

    #: Each worker belongs to one front, which has ``1 + prefetch`` slots there.
    DIVIDED = "divided"
    #: Each front has one slot at every worker.
    SLOT_EACH = "a slot each"
    #: Between two batches a worker lends its ``1 + prefetch`` slots to the front whose requests wait longest.
    #: One that stands still lends when it is asked.
    LENT_TO_OLDEST = "lent to the oldest"
    #: The same, to the front with the most requests that wait.
    LENT_TO_MOST = "lent to the most"


#: Those in which slots are lent.
LENDING: Final = frozenset({Sharing.LENT_TO_OLDEST, Sharing.LENT_TO_MOST})


@dataclass(frozen=True, slots=True)
class Model:
    """A batch of up to ``max_rows`` takes ``batch_s``, however many there are in it."""

    batch_s: float
    max_rows: int


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU seconds of a front for a request and, besides, for a batch and for a slot that it is lent; the way
    of a message to another process; and what a worker does around the callable.
    """

    request_s: float
    batch_s: float = 40e-6
    loan_s: float = 10e-6
    hop_s: float = 50e-6
    worker_s: float = 75e-6


@dataclass(frozen=True, slots=True)
class Deployment:
    """Fronts, workers and what is between them. ``prefetch`` is how many batches wait in a worker."""

    model: Model
    costs: Costs
    fronts: int
    workers: int
    sharing: Sharing
    prefetch: int = 0

    def slots(self, front: int) -> list[int]:
        """The slots that a front has at each worker at the start."""
        match self.sharing:
            case Sharing.DIVIDED:
                owned = (worker % self.fronts == front for worker in range(self.workers))
                return [(1 + self.prefetch) * one for one in owned]
            case Sharing.SLOT_EACH:
                return [1] * self.workers
            case Sharing.LENT_TO_OLDEST | Sharing.LENT_TO_MOST:
                return [0] * self.workers


def hashed(connections: int, fronts: int, seed: int) -> tuple[int, ...]:
    """The front of each connection where a hash chooses: of many draws the one in the middle, by the largest
    share that a front gets.
    """
    source = random.Random(seed)
    draws = [tuple(source.randrange(fronts) for _ in range(connections)) for _ in range(_LAYOUTS)]
    return sorted(draws, key=lambda draw: max(map(draw.count, range(fronts))))[_LAYOUTS // 2]


def in_turns(connections: int, fronts: int) -> tuple[int, ...]:
    """The front of each connection where each front accepts as many as the others."""
    return tuple(connection % fronts for connection in range(connections))
