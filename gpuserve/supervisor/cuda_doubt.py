"""Whether CUDA can be used on this machine at all, as states and a table. Pure: nothing is started here.

::

              doubted             fails                   fails
    WORKING ───────────► ASKING ───────────► ASKING_AGAIN ───────────► BROKEN
       ▲                    │ works               │ works                │ works
       └────────────────────┴─────────────────────┴──────────────────────┘

It is doubted when no worker on any GPU can open its device. Then a fresh process is asked, and only its word
counts; twice, as one may fail for reasons of its own.
"""

from __future__ import annotations

import enum
from typing import Final


class Doubt(enum.Enum):
    """What is believed."""

    WORKING = "WORKING"
    ASKING = "ASKING"
    ASKING_AGAIN = "ASKING_AGAIN"
    BROKEN = "BROKEN"


class DoubtEvent(enum.Enum):
    """What can be learnt."""

    DOUBTED = "DOUBTED"
    WORKS = "WORKS"
    FAILS = "FAILS"


TRANSITIONS: Final[dict[tuple[Doubt, DoubtEvent], Doubt]] = {
    (Doubt.WORKING, DoubtEvent.DOUBTED): Doubt.ASKING,
    (Doubt.WORKING, DoubtEvent.WORKS): Doubt.WORKING,
    (Doubt.ASKING, DoubtEvent.WORKS): Doubt.WORKING,
    (Doubt.ASKING, DoubtEvent.FAILS): Doubt.ASKING_AGAIN,
    (Doubt.ASKING_AGAIN, DoubtEvent.WORKS): Doubt.WORKING,
    (Doubt.ASKING_AGAIN, DoubtEvent.FAILS): Doubt.BROKEN,
    (Doubt.BROKEN, DoubtEvent.WORKS): Doubt.WORKING,
    (Doubt.BROKEN, DoubtEvent.FAILS): Doubt.BROKEN,
}


class IllegalTransition(Exception):
    """An event that cannot happen in a state: a defect of the supervisor."""


class CudaDoubt:
    """The state of the belief. ``works`` is what the server may say of it."""

    def __init__(self) -> None:
        self.state = Doubt.WORKING

    @property
    def works(self) -> bool:
        """False only after two processes have failed, until one succeeds."""
        return self.state is not Doubt.BROKEN

    def apply(self, event: DoubtEvent) -> None:
        """Move on.

        Raises:
            IllegalTransition: the table has no such step.
        """
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise IllegalTransition(f"CUDA: {event.name} in state {self.state.name}")
        self.state = after
