"""Warnings that clients can cause at any rate, bounded in lines per second."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

#: Seconds between two lines.
LOG_INTERVAL_S: Final = 10.0


class BoundedLog:
    """A logger that writes one warning in ``LOG_INTERVAL_S`` and counts those that it suppresses."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_at = -LOG_INTERVAL_S
        self._n_suppressed = 0

    def __call__(self, text: str) -> None:
        now = self._clock()
        if now - self._logged_at < LOG_INTERVAL_S:
            self._n_suppressed += 1
            return
        more = f" ({self._n_suppressed} similar warnings suppressed before)" if self._n_suppressed else ""
        self._logged_at, self._n_suppressed = now, 0
        logger.warning("%s%s", text, more)
