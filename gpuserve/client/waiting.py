"""How long, and how often, a client asks a server that is not ready yet. Pure; the clock is an argument."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0
#: One question may take this long, so that a connection that hangs does not use up the whole wait, and
#: this short, so that the last one has a chance.
_LONGEST_QUESTION_S: Final = 10.0
_SHORTEST_QUESTION_S: Final = 0.1


class Wait:
    """One wait of ``timeout_s`` seconds. ``error`` is what the last question met if it had no answer."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.error: Exception | None = None
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._pause_s = _FIRST_PAUSE_S

    @property
    def question_s(self) -> float:
        """How long the next question may take."""
        return min(max(self._deadline - self._clock(), _SHORTEST_QUESTION_S), _LONGEST_QUESTION_S)

    def pause_s(self) -> float | None:
        """How long to pause before the next question; None: the time is up. Pauses grow."""
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            return None
        pause, self._pause_s = self._pause_s, min(self._pause_s * 2, _LONGEST_PAUSE_S)
        return min(pause, remaining)
