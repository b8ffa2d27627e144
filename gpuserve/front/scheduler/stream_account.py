"""What the responses of a decoupled model's batch were, for the statistics: at which index of its request's
stream each came, and how long it took. Nothing is passed on here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from gpuserve.front.metrics import ModelMetrics
from gpuserve.front.scheduler.pending import PendingRequest
from gpuserve.front.statistics import ResponseFate


class StreamAccount:
    """One batch, sent to its worker at ``sent_at``."""

    __slots__ = ("_indices", "_last_at", "_metrics")

    def __init__(self, metrics: ModelMetrics, requests: int, sent_at: float) -> None:
        self._metrics = metrics
        self._indices = [0] * requests
        self._last_at = [sent_at] * requests

    def responded(self, position: int, pending: PendingRequest, came_at: float, *, failed: bool) -> None:
        """A response that came then is with its door; ``failed`` ones are the last of their request."""
        output_s = time.monotonic() - came_at
        if failed:
            self._add(position, ResponseFate.FAIL, came_at, output_s)
            return
        if self._indices[position] == 0:
            self._metrics.first_response.observe((came_at - pending.enqueued_at) * 1000)
        self._add(position, ResponseFate.SUCCESS, came_at, output_s)

    def ended(self, requests: Sequence[PendingRequest], *, failed: bool) -> None:
        """The batch ended, as a whole; told before its requests are counted."""
        now = time.monotonic()
        for position, pending in enumerate(requests):
            if pending.cancelled or pending.is_given_up:
                self._add(position, ResponseFate.CANCEL, now)
            elif not pending.is_over:
                self._add(position, ResponseFate.FAIL if failed else ResponseFate.EMPTY, now)

    def _add(self, position: int, fate: ResponseFate, now: float, output_s: float = 0.0) -> None:
        index, since_s = self._indices[position], now - self._last_at[position]
        self._indices[position] = index + 1
        self._last_at[position] = now
        self._metrics.statistics.responded(index, fate, since_s, output_s)
