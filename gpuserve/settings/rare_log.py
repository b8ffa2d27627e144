"""Log lines that others can cause as often as they like: only one of a kind in some time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

_PERIOD_S: Final = 10.0


class RareLog:
    """Warnings of one kind, at most one in ten seconds. Those between are counted, and told with the next."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._next_at = 0.0
        self._n_untold = 0

    def say(self, text: str, *arguments: Any) -> None:
        now = self._clock()
        if now < self._next_at:
            self._n_untold += 1
            return
        told = text % arguments
        if self._n_untold:
            told += f" ({self._n_untold} more like it before)"
        self._next_at, self._n_untold = now + _PERIOD_S, 0
        self._logger.warning("%s", told)
