"""The responses of one batch on their way from the threads that send them to the one that passes them on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from gpuserve_worker.calling.response import StreamStep


class ResponseQueue:
    """What was sent and not yet taken, for each request in its order. ``wake`` is called, in any thread, when
    there is something for a taker that found nothing. Implements ``Outlet``.
    """

    def __init__(
        self, requests: int, declared: Collection[str], wake: Callable[[], object], *, decoupled: bool
    ) -> None:
        self.declared = declared
        self.decoupled = decoupled
        self.is_used = False
        # A sender may die, and so end its request, in any line, also in those below.
        self._lock = threading.RLock()
        self._wake = wake
        self._count = self._going_on = requests
        self._sent: dict[int, deque[Any]] = {}
        self._is_awaited = False
        self._is_dropped = False
        self._error: BaseException | None = None

    def put(self, position: int, answer: Any, *, final: bool) -> None:
        with self._lock:
            if self._is_dropped:
                return
            self.is_used = True
            if answer is not None or (final and self._count > 1):
                self._sent.setdefault(position, deque()).append((answer, final))
            self._going_on -= final
            wakes, self._is_awaited = self._is_awaited, False
        if wakes:
            self._wake()

    def fail(self, error: BaseException) -> bool:
        """End the requests that go on with an error; False where none does."""
        with self._lock:
            if not self._going_on or self._is_dropped:
                return False
            self._error = error
            self._going_on = 0
            wakes, self._is_awaited = self._is_awaited, False
        if wakes:
            self._wake()
        return True

    def take(self) -> StreamStep | None:
        """The next response of each request that has one, with None for the others; an empty step where
        every request has ended; None where some have not. Raises what ``fail`` was given.
        """
        with self._lock:
            if self._sent:
                return self._step()
            if self._error is not None:
                raise self._error
            if not self._going_on:
                return StreamStep(())
            self._is_awaited = True
            return None

    def take_all(self) -> list[Any] | None:
        """The one response of each request; None where some have not ended. Raises as ``take``."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._going_on:
                return self._step()
            self._is_awaited = True
            return None

    def drop(self) -> None:
        """Keep nothing any more: nobody takes it."""
        with self._lock:
            self._is_dropped = True
            self._sent = {}

    def _step(self) -> StreamStep:
        step: list[Any] = [None] * self._count
        last = []
        for position, answers in list(self._sent.items()):
            step[position], final = answers.popleft()
            if final:
                last.append(position)
            if not answers:
                del self._sent[position]
        return StreamStep(step, tuple(last))
