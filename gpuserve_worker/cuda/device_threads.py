"""The two threads beside that of a ``DeviceLoop``: one receives and brings inputs on their way while the
callable runs, one waits for outputs. What is done with a batch is not known here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

from gpuserve_worker.cuda.device import Device
from gpuserve_worker.cuda.jobs import Job, Jobs
from gpuserve_worker.reception import Reception

#: A thread that does not end within this time is at work on a device that does not answer any more.
_JOIN_S: Final = 5.0


class Intake:
    """Receives while the callable runs, once it is told to; until something comes while it does not."""

    def __init__(
        self, device: Device, reception: Reception[Job], jobs: Jobs, on_fault: Callable[[BaseException], None]
    ) -> None:
        self._device = device
        self._reception = reception
        self._jobs = jobs
        self._on_fault = on_fault
        self._armed = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="gpuserve-intake", daemon=True)

    def start(self) -> None:
        """Start the thread; it waits."""
        self._thread.start()

    def arm(self) -> None:
        """Receive from now on."""
        self._armed.set()

    def end(self) -> None:
        """End the thread. The link must have been told to receive nothing more."""
        self._is_over = True
        self._armed.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._device.enter_beside()
            while self._waits():
                self._jobs.stage_ahead()
                self._reception.turns.receive_until(self._may_rest, self._receive)
        except BaseException as error:  # it is the loop's own thread that is to raise it
            self._on_fault(error)

    def _waits(self) -> bool:
        """Wait until there is something to do; whether there is."""
        self._armed.wait()
        self._armed.clear()
        return not self._is_over

    def _may_rest(self) -> bool:
        """Whether the loop's own thread receives by itself."""
        reception = self._reception
        return not reception.running or reception.ended or reception.stopping

    def _receive(self) -> None:
        self._reception.receive()
        if self._reception.running:
            self._jobs.stage_ahead()


class Finisher:
    """Finishes batches in the order in which they are given."""

    def __init__(
        self, device: Device, finish: Callable[[Job], None], on_fault: Callable[[BaseException], None]
    ) -> None:
        self._device = device
        self._finish = finish
        self._on_fault = on_fault
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gpuserve-finisher", daemon=True)

    def start(self) -> None:
        """Start the thread; it waits."""
        self._thread.start()

    def take(self, job: Job) -> None:
        """One more, whose outputs are on their way."""
        self._jobs.put(job)

    def end(self) -> None:
        """End the thread when it has finished all that it was given."""
        self._jobs.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._device.enter_beside()
            while (job := self._jobs.get()) is not None:
                self._finish(job)
                del job
        except BaseException as error:  # it is the loop's own thread that is to raise it
            self._on_fault(error)
