"""Descriptors, timers and calls from other threads, in one loop of one thread. The supervisor could run
asyncio; it must also run inside the user's program, in a thread, next to an event loop of theirs, and stay
small. This is all it needs.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

Callback: TypeAlias = Callable[[], object]
#: Takes an unexpected exception of a callback. If the exception is raised again, ``run()`` ends with it.
OnError: TypeAlias = Callable[[Exception], None]

#: A descriptor whose callback failed is not watched for this time: it may stay readable.
REST_S: Final = 1.0
#: The longest time in one ``select``; epoll refuses 25 days.
_LONGEST_S: Final = 3600.0


def _raise(error: Exception) -> None:
    raise error


class Reactor:
    """``run()`` until ``stop()``. Only ``call_soon_threadsafe`` may be used from other threads and
    from signal handlers.
    """

    def __init__(self, on_error: OnError = _raise) -> None:
        self._on_error = on_error
        #: Descriptors that are not watched for a moment, because their callbacks failed.
        self._resting: dict[int, Callback] = {}
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callback]] = []
        self._order = itertools.count()
        self._calls: deque[Callback] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._on_wake)
        self._stopped = False
        # Reentrant: a signal handler may interrupt the very call that holds it.
        self._wake_lock = threading.RLock()

    def watch(self, fd: int, callback: Callback) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)
        self._resting.pop(fd, None)

    def unwatch(self, fd: int) -> None:
        """Do not call back for the descriptor any more; an unknown one is ignored."""
        self._resting.pop(fd, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def call_later(self, delay_s: float, callback: Callback) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), callback))

    def call_soon_threadsafe(self, callback: Callback) -> bool:
        """Call back in the reactor's thread, as soon as it gets to it; False: it is closed."""
        # The lock keeps close() from giving the number to another file between the test and the write.
        with self._wake_lock:
            if self._wake_fd < 0:
                return False
            self._calls.append(callback)
            os.eventfd_write(self._wake_fd, 1)
            return True

    def run(self) -> None:
        with self._woken_by_signals():
            while not self._stopped:
                self._run_due()
                for key, _ in self._selector.select(self._timeout_s()):
                    # An earlier callback of this round may have unwatched the descriptor.
                    is_watched = not self._stopped and self._selector.get_map().get(key.fd) == key
                    if is_watched and not self._has_run(key.data):
                        self._rest(key)

    @contextlib.contextmanager
    def _woken_by_signals(self) -> Iterator[None]:
        """Python runs a signal's handler between two instructions: one that comes after the last of them, and
        before the thread sleeps in ``select``, would wait for whatever wakes it next.
        """
        if threading.current_thread() is not threading.main_thread():  # handlers run there alone
            yield
            return
        readable, writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.watch(readable, lambda: os.read(readable, 4096))
        before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            self.unwatch(readable)
            os.close(readable)
            os.close(writable)

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        """Close the reactor's own descriptors. What other threads asked for until now is still called."""
        with self._wake_lock:
            self._selector.close()
            os.close(self._wake_fd)
            self._wake_fd = -1
        while self._calls:
            self._calls.popleft()()

    def _timeout_s(self) -> float | None:
        if self._calls or self._stopped:
            return 0.0
        if not self._timers:
            return None
        return min(_LONGEST_S, max(0.0, self._timers[0][0] - time.monotonic()))

    def _run_due(self) -> None:
        while self._calls and not self._stopped:
            self._has_run(self._calls.popleft())
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now and not self._stopped:
            self._has_run(heapq.heappop(self._timers)[2])

    def _has_run(self, callback: Callback) -> bool:
        """Run a callback; False: the callback raised, and ``on_error`` lets the loop go on."""
        try:
            callback()
        except Exception as error:
            self._on_error(error)
            return False
        return True

    def _rest(self, key: selectors.SelectorKey) -> None:
        """Watch a descriptor again after a moment, unless its owner has let go of it meanwhile."""
        if self._selector.get_map().get(key.fd) != key:
            return
        self.unwatch(key.fd)
        self._resting[key.fd] = key.data

        def watch_again() -> None:
            callback = self._resting.get(key.fd)
            if callback is not None and callback is key.data:
                self.watch(key.fd, callback)

        self.call_later(REST_S, watch_again)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
