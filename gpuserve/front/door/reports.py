"""When a door says how it is doing: often while that changes, and now and then in any case."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from gpuserve.front.passage.messages import Status

#: In any case: the front judges by it whether the door turns.
STATUS_S: Final = 0.25
#: While what a drain waits for changes.
_HURRIED_S: Final = 0.01


class Reports:
    """Looks and says, from ``open`` to ``close``. ``look`` counts over all connections."""

    def __init__(self, look: Callable[[], Status], say: Callable[[Status], None]) -> None:
        self._look = look
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._said: Status | None = None
        self._said_at = 0.0
        self._pause_s = STATUS_S

    def open(self) -> None:
        self._on_time()

    def hurry(self) -> None:
        """Say it now, and soon again when it is another."""
        self.close()
        self._said, self._pause_s = None, _HURRIED_S
        self._on_time()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_time(self) -> None:
        status, now, said = self._look(), self._loop.time(), self._said
        awaited = status.notice, status.n_unaware, status.n_held
        if said is None or awaited != (said.notice, said.n_unaware, said.n_held):
            self._pause_s = _HURRIED_S if status.notice else STATUS_S
            due = True
        else:
            self._pause_s = min(STATUS_S, 2 * self._pause_s)
            due = now - self._said_at >= STATUS_S - _HURRIED_S
        if due:
            self._said, self._said_at = status, now
            self._say(status)
        self._timer = self._loop.call_later(self._pause_s, self._on_time)
