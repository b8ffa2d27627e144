"""Threads that each own one resource and run calls on it, with a bounded queue in front of them. A thread is
started when a call comes and none is free, up to a limit. All state is under one lock.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

Resource = TypeVar("Resource")


class PoolClosed(Exception):
    """The pool takes no calls any more."""


class PoolFull(Exception):
    """As many calls wait as the pool may hold."""


class _Work(NamedTuple):
    future: Future[Any]
    call: Callable[[Any], Any]

    def do(self, resource: Any) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.call(resource))
        except BaseException as error:  # whoever waits for the future is to know, whatever it is
            self.future.set_exception(error)


class ResourcePool(Generic[Resource]):
    """Runs calls on up to ``max_threads`` resources, each made by ``open_resource`` in the thread that uses
    it. Up to ``max_waiting`` calls wait besides those that run; None is no limit.
    """

    def __init__(
        self,
        open_resource: Callable[[], contextlib.AbstractContextManager[Resource]],
        max_threads: int | None,
        max_waiting: int | None,
    ) -> None:
        self._open_resource = open_resource
        self._max_threads = max_threads
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._work_came = threading.Condition(self._lock)
        self._room_came = threading.Condition(self._lock)
        self._waiting: collections.deque[_Work] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, call: Callable[[Resource], Any], timeout_s: float) -> Future[Any]:
        """Have ``call`` run; waits up to ``timeout_s`` for room in the queue.

        Raises:
            PoolFull, PoolClosed: it will not be run.
        """
        work = _Work(Future(), call)
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not self._accept(work):
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._room_came.wait(remaining):
                    raise PoolFull
        return work.future

    def close(self, wait: bool) -> None:
        """Take no more calls; what waits is still run. With ``wait``, return when all is done."""
        with self._lock:
            self._closed = True
            self._work_came.notify_all()
            self._room_came.notify_all()
            threads = list(self._threads)
        if wait:
            for thread in threads:
                thread.join()

    def _accept(self, work: _Work) -> bool:
        """Give the work to a free thread, to a new one, or to the queue; False where that is full."""
        if self._closed:
            raise PoolClosed
        if self._idle <= len(self._waiting):  # every free thread has its work already
            if self._max_threads is None or len(self._threads) < self._max_threads:
                self._start(work)
                return True
            if self._max_waiting is not None and len(self._waiting) - self._idle >= self._max_waiting:
                return False
        self._waiting.append(work)
        self._work_came.notify()
        return True

    def _start(self, work: _Work) -> None:
        thread = threading.Thread(target=self._run, args=(work,), name="gpuserve-client", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, first: _Work) -> None:
        work: _Work | None = first
        del first
        with self._open_resource() as resource:
            while work is not None:
                work.do(resource)
                work = None  # nobody but the caller holds the answer while this thread waits
                work = self._next()

    def _next(self) -> _Work | None:
        """The next call that waits; None: the pool is closed and there is none."""
        with self._lock:
            self._idle += 1
            while not self._waiting and not self._closed:
                self._work_came.wait()
            self._idle -= 1
            self._room_came.notify()
            return self._waiting.popleft() if self._waiting else None
