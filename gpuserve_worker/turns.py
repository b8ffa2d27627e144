"""Whose turn it is to receive from a worker's link, where several threads may wait for a message.

The loop receives batches. A callable that asks another model waits for its answer, in the loop's own thread
or in another that it started. Whoever waits receives for all, one thread at a time. No message is
understood here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Turns:
    """One turn, taken by one thread at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._waiting = 0

    def try_take(self) -> bool:
        """Take the turn if nobody has it. Without a waiting thread this and ``give`` cost next to nothing."""
        return self._turn.acquire(blocking=False)

    def give(self) -> None:
        """Whoever waits may receive now, or find that what it waited for has come."""
        self._turn.release()
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def receive_until(self, ready: Callable[[], bool], receive: Callable[[], None]) -> None:
        """Return when something is true, which a message may make it; ``receive`` takes one."""
        with self._changed:
            self._waiting += 1  # before the look at the turn, so that who gives it up tells of it
        try:
            while not ready():
                if self.try_take():
                    try:
                        if not ready():
                            receive()
                    finally:
                        self.give()
                else:
                    self._wait_for_turn(ready)
        finally:
            with self._changed:
                self._waiting -= 1

    def _wait_for_turn(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            if self._turn.locked() and not ready():
                self._changed.wait()
