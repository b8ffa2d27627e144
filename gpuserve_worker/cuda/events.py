"""CUDA events to be used again and again: to make one costs more than to record it. Nothing waits here."""

from __future__ import annotations

from collections import deque

from gpuserve_worker.cuda.runtime import Runtime


class Events:
    """Events of one device. Any thread may take one and give it back."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # Operations on a deque are atomic; a lock could be asked for in the middle of a collection.
        self._plain: deque[int] = deque()
        self._timing: deque[int] = deque()

    def take(self, *, timing: bool = False) -> int:
        """An event; with ``timing`` one that keeps its time.

        Raises:
            CudaError: there is none to be had.
        """
        try:
            return (self._timing if timing else self._plain).popleft()
        except IndexError:
            return self._runtime.create_event(timing=timing)

    def give(self, event: int, *, timing: bool = False) -> None:
        """Nobody waits for this event any more."""
        (self._timing if timing else self._plain).append(event)

    def close(self) -> None:
        """Destroy those that nobody uses.

        Raises:
            CudaError: the device cannot be used any more.
        """
        for free in (self._plain, self._timing):
            while free:
                self._runtime.destroy_event(free.popleft())
