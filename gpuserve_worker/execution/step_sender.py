"""The sending of the responses of a step while the next step runs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

#: After a step that has let no other thread run, responses are sent before the next step, so many times.
_OWN_STEPS: Final = 256


class StepSender:
    """Jobs that are done in order, by a thread while a step runs or by the loop between two steps.

    The thread gets the interpreter's lock as soon as ``step`` waits or computes outside Python. A step that
    keeps the lock would delay the responses of the step before; then the loop does the jobs for a while.
    ``flush`` sends the messages that jobs hold. ``fail`` ends the worker's loop with an exception of a job in
    the thread.
    """

    def __init__(self, flush: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        self._flush = flush
        self._fail = fail
        self._jobs: deque[Callable[[], None]] = deque()
        self._working = threading.Lock()
        #: Released to wake the thread.
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._own_steps = 0

    def add(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)

    def start_jobs(self) -> None:
        """Let the thread do the jobs. The loop calls this right before ``admit`` and ``step``: each system
        call in between gives the interpreter's lock to the thread.
        """
        if not self._jobs:
            return
        if self._own_steps:
            self._own_steps -= 1
            self.finish_jobs()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="step sender", daemon=True)
            self._thread.start()
        if self._asleep.locked():
            self._asleep.release()

    def end_step(self) -> None:
        """Do the jobs of the step before, if the thread could not do them."""
        if self._jobs:
            self._own_steps = _OWN_STEPS
            self.finish_jobs()

    def finish_jobs(self) -> None:
        """Do all jobs, or wait until the thread has done them."""
        with self._working:
            if self._jobs:
                while self._jobs:
                    self._jobs.popleft()()
                self._flush()

    def close(self) -> None:
        """End the thread. Remaining jobs are dropped."""
        self._closed = True
        self._jobs.clear()
        if self._thread is not None:
            if self._asleep.locked():
                self._asleep.release()
            self._thread.join()

    def _run(self) -> None:
        while self._asleep.acquire() and not self._closed:
            try:
                self.finish_jobs()
            except BaseException as error:  # the front is gone, or a defect of gpuserve
                self._fail(error)
                return
