"""Models with ``on_demand`` in the front: reports of their use, and their way out of rotation and back.

A cold model is like a model at the start of the server: its requests wait in the queue for instances that are
still to come up. A report tells the supervisor of the first of them at once. Periodic reports repeat what the
supervisor needs for its decisions, so that none of them has to arrive.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.pending_request import OnAnswer, OnResponse, PendingRequest
from gpuserve.front.observability.metrics.model_metrics import OnDemandMetrics
from gpuserve.front.requests.inference import InferRequest
from gpuserve.front.service.control import NotifySupervisor
from gpuserve.supervisor.control import front_messages as messages

#: Periods of reports while a cold model has requests, and otherwise.
_WAITING_S: Final = 0.1
_PERIOD_S: Final = 1.0
#: Pause between reports of first requests: a burst for hundreds of cold models makes a few reports.
_PAUSE_S: Final = 0.02
#: Poll period for the last running requests of a model in use that gives way.
_POLL_S: Final = 0.005


class OnDemandDriver(ModelDriver):
    """The driver of a model with ``on_demand``. ``on_use`` is called after each request for the model."""

    on_use: Callable[[], None]

    def submit(
        self, request: InferRequest, on_response: OnResponse | None = None, on_answer: OnAnswer | None = None
    ) -> PendingRequest:
        pending = super().submit(request, on_response, on_answer)
        self.on_use()
        return pending

    def accept_transferred(self, pending: PendingRequest) -> None:
        super().accept_transferred(pending)
        self.on_use()


class OnDemandDrivers:
    """The drivers of models with ``on_demand``, by generation. ``gpu_memory`` returns bytes by process."""

    def __init__(
        self, notify_supervisor: NotifySupervisor, gpu_memory: Callable[[], tuple[tuple[int, int], ...]]
    ) -> None:
        self._notify_supervisor = notify_supervisor
        self._gpu_memory = gpu_memory
        self._drivers: dict[int, OnDemandDriver] = {}
        self._metrics: dict[int, OnDemandMetrics] = {}
        self._used_at: dict[int, float] = {}
        #: Whether the latest report named a model.
        self._reported = False
        self._next_report: asyncio.TimerHandle | None = None
        self._reported_at = -math.inf
        #: The times since when requests wait for a cold model.
        self._waiting_since: dict[int, float] = {}

    def add(self, generation: int, driver: OnDemandDriver) -> None:
        self._drivers[generation] = driver
        driver.on_use = partial(self._on_use, generation, driver)
        self._metrics[generation] = driver.metrics.on_demand = driver.metrics.on_demand or OnDemandMetrics()
        driver.workers.sleep()
        if self._next_report is None:
            self._report()

    def remove(self, generation: int) -> None:
        self._drivers.pop(generation, None)
        self._metrics.pop(generation, None)
        self._used_at.pop(generation, None)
        self._waiting_since.pop(generation, None)

    def instance_up(self, generation: int) -> None:
        """Note that a model is warm from now on."""
        if (since := self._waiting_since.pop(generation, None)) is not None:
            self._metrics[generation].cold_starts.observe(time.monotonic() - since)

    async def sleep(self, message: messages.Sleep) -> None:
        """Take the instances of a model out of rotation, and answer the supervisor."""
        driver = self._drivers.get(message.generation)
        if driver is None:
            return
        workers = driver.workers
        if message.is_used and not driver.statistics().sequences:
            workers.retire_all()
            # A call that hangs is ended by execution_timeout_s.
            while not workers.all_idle():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            if message.generation not in self._drivers:
                return
        # Another model may still read outputs on a GPU.
        elif workers.instances.up and (_unfinished(driver) or not workers.all_idle()):
            self._notify_supervisor(messages.Asleep(message.generation, False))
            return
        if message.reason:
            self._metrics[message.generation].evictions[message.reason] += 1
        workers.sleep(keeps_processes=message.keeps_processes)
        self._notify_supervisor(messages.Asleep(message.generation, True))

    def show_memory(self, message: messages.ResidentMemory) -> None:
        """Show the memory of the resident models in the metrics."""
        for generation, metrics in self._metrics.items():
            spec = self._drivers[generation].spec
            rows = [one for one in message.models if one[:2] == (spec.name, spec.version)]
            metrics.nbytes = {device: nbytes for *_, device, nbytes in rows}
            metrics.is_asleep = (spec.name, spec.version) in message.asleep

    def _on_use(self, generation: int, driver: OnDemandDriver) -> None:
        now = self._used_at[generation] = time.monotonic()
        if generation not in self._waiting_since and driver.workers.instances.asleep:
            self._waiting_since[generation] = now
            self._report_in(max(0.0, self._reported_at + _PAUSE_S - now))

    def _report(self) -> None:
        """Report the use of all models now, and then periodically."""
        now, rows = time.monotonic(), []
        for generation, driver in self._drivers.items():
            asleep = driver.workers.instances.asleep
            if asleep and generation not in self._waiting_since:  # most models, if there are hundreds
                continue
            unfinished = _unfinished(driver)
            if unfinished:
                self._used_at[generation] = now
            else:
                self._waiting_since.pop(generation, None)
            if unfinished or not asleep:
                rows.append((generation, now - self._used_at.setdefault(generation, now), unfinished))
        if rows or self._reported:  # the last of them may have expired
            self._notify_supervisor(messages.Usage(tuple(rows), self._gpu_memory()))
        self._reported, self._reported_at = bool(rows), now
        self._report_in(_WAITING_S if self._waiting_since else _PERIOD_S)

    def _report_in(self, delay_s: float) -> None:
        if self._next_report is not None:
            self._next_report.cancel()
        self._next_report = asyncio.get_running_loop().call_later(delay_s, self._report)


def _unfinished(driver: OnDemandDriver) -> int:
    """Return the number of requests that wait or run, and of open sequences, whose state would be lost."""
    return driver.unfinished + driver.statistics().sequences
