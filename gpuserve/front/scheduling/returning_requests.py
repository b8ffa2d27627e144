"""The forecast of requests that follow the answers of a batch. Pure.

Many clients send their next request when they have an answer. If a batch starts with the few requests that
wait at the end of the last one, such clients split into groups that take turns: of 64 clients 32 wait while
the other 32 are computed. A short wait for those that were just answered makes one batch of all, which on
most models takes hardly longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

#: Clients count as sending again when they are answered if at least this part of the answered rows returns
#: within the duration of a batch, and on average the last of them by this part of the duration. Independent
#: arrivals at the full load of an instance hardly do both: of few rows fewer return, of many the last comes
#: later.
_LEAST_SHARE: Final = 0.9
_LATEST: Final = 0.85
#: The weight of the latest batch in the averages.
_WEIGHT: Final = 1 / 8
#: How much longer than on average the return of all rows may take.
_SLACK: Final = 1.5
#: No row is expected any more when none has come for this part of the average time until all have.
_PAUSE: Final = 0.5
#: The least gain in rows per second for which a batch waits.
_LEAST_GAIN: Final = 1.02


class ReturningRequests:
    """Learns how soon the clients of one model send again, and when it pays to wait for them.

    The caller counts rows that arrive up to ``until``: it adds them to ``rows`` and sets ``last_at``.
    """

    __slots__ = ("_answered", "_answered_at", "_part", "_share", "_took_s", "last_at", "rows", "until")

    def __init__(self) -> None:
        #: The end of the window of the latest batch, which is as long as the batch took.
        self.until = -math.inf
        #: The rows that arrived within the window, and when the last of them did.
        self.rows = 0
        self.last_at = 0.0
        self._answered = 0
        self._answered_at = 0.0
        self._took_s = 0.0
        #: Averages: the part of the rows that returns, and the part of the window until the last has.
        self._share = 0.0
        self._part = 1.0

    def on_answered(self, rows: int, took_s: float, now: float) -> None:
        """Learn from the window of the batch before, and open that of a batch which took ``took_s``."""
        if self._took_s:
            self._share += (min(1.0, self.rows / self._answered) - self._share) * _WEIGHT
            part = (self.last_at - self._answered_at) / self._took_s if self.rows else 1.0
            self._part += (part - self._part) * _WEIGHT
        self._answered, self._answered_at, self._took_s, self.rows = rows, now, took_s, 0
        self.until = now + took_s

    def wait_until(
        self, waiting: int, now: float, most: int, takes_s: Callable[[int], float | None]
    ) -> float:
        """Return until when a batch of the ``waiting`` rows should wait; minus infinity: not at all.

        Args:
            waiting: at least 1.
            now: on the clock of ``on_answered``, in seconds.
            most: the rows that fit into the batch besides.
            takes_s: returns the expected duration of a batch of so many rows in seconds; None if unknown.
        """
        missing = min(most, self._answered - self.rows)
        if self._share < _LEAST_SHARE or self._part > _LATEST or missing <= 0:
            return -math.inf
        return_s = self._part * self._took_s
        until = min(self.until, self._answered_at + _SLACK * return_s)
        if self.rows:
            until = min(until, self.last_at + _PAUSE * return_s)
        alone_s, together_s = takes_s(waiting), takes_s(waiting + missing)
        if now >= until or alone_s is None or together_s is None:
            return -math.inf
        rest_s = max(0.0, self._answered_at + return_s - now)
        gain = (waiting + missing) * alone_s / (waiting * (together_s + rest_s))
        return until if gain > _LEAST_GAIN else -math.inf
