"""The scheduler of a model whose instances are on several devices: a request that names memory of one of them
runs there, every other one anywhere. Pure; a model on one device has none of this. What must run on a device
waits in a scheduler of its own, which shares the instances with the one that all other requests wait in. An
instance with room is for the request that is next: by priority, then by age.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from typing import Any, Final

from gpuserve.front.batching.interface import Scheduler, SchedulerStatistics
from gpuserve.front.batching.model_scheduler import ModelScheduler
from gpuserve.front.batching.slots import Batch, InstanceSlots
from gpuserve.front.queueing.queue import QueuedRequest, RequestState
from gpuserve.front.queueing.suspects import Suspects

#: The counts of requests, which each of the schedulers has of its own.
_COUNTS: Final = (
    "queued", "queued_rows", "queued_nbytes", "accepted", "finished", "rejected", "cancelled", "expired",
    "retried", "lost",
)  # fmt: skip
#: In the place of a device, for requests that may run on any.
ANY: Final = ""
_TURN: Final = operator.itemgetter(0)


class DeviceScheduler(Scheduler):
    """A scheduler of the requests that may run anywhere, and one for each device whose memory is named.
    ``new_scheduler`` makes each of them, over the same instances. The limits of the queue are for all
    requests together, but for those of a single priority, which hold for each of the schedulers.
    """

    def __init__(self, new_scheduler: Callable[[InstanceSlots, Suspects], ModelScheduler]) -> None:
        self._new_scheduler = new_scheduler
        self._slots: InstanceSlots = InstanceSlots()
        self._suspects = Suspects()
        self._anywhere = new_scheduler(self._slots, self._suspects)
        #: By device, and in ``_all`` with the one before.
        self._bound: dict[str, ModelScheduler] = {}
        self._all = [self._anywhere]
        #: The device of each instance that takes batches or finishes what it has.
        self._devices: dict[str, str] = {}
        self.draining = False

    # ---- requests -------------------------------------------------------------------------

    def submit(self, request: QueuedRequest, now: float) -> None:
        device = request.device
        if self._bound or device:
            counts = self.statistics()
            self._anywhere.check_room(request, counts.queued, counts.queued_nbytes)
        scheduler = self._of(device)
        scheduler.draining = self.draining
        scheduler.submit(request, now)

    def cancel(self, request: QueuedRequest) -> bool:
        queued = request.state is RequestState.QUEUED
        return self._of(request.device if queued else ANY).cancel(request)

    def take_all(self, device: str = "") -> list[QueuedRequest]:
        if device:
            return self._bound[device].take_all() if device in self._bound else []
        return [request for one in self._all for request in one.take_all()]

    def hand_over(self, to: Scheduler, most_nbytes: int) -> list[QueuedRequest]:
        return next((taken for one in self._all if (taken := one.hand_over(to, most_nbytes))), [])

    def expire(self, now: float) -> list[QueuedRequest]:
        return [request for one in self._all for request in one.expire(now)]

    # ---- batches --------------------------------------------------------------------------

    def next_batch(self, now: float, instance: str | None = None) -> Batch | None:
        waiting = self._waiting()
        if not waiting:
            return self._anywhere.next_batch(now, instance)
        wanted = {device for _, device in waiting}
        first = self._anywhere.first()
        if first is not None:
            waiting.append((_turn(first), ANY))
        for _, device in sorted(waiting, key=_TURN):
            names = self.with_room() if instance is None else [instance]
            batch = self._next_of(device, now, names) if device else self._next_of_any(now, names, wanted)
            if batch is not None:
                return batch
        return None

    def next_wakeup(self, now: float, among: Collection[str] | None = None) -> float | None:
        times = [self._anywhere.next_wakeup(now, among)]
        up = set(self._slots.names)
        for device, bound in self._bound.items():
            on_device = [name for name in up if self._devices[name] == device]
            names = [name for name in on_device if among is None or name in among]
            times.append(bound.next_wakeup(now, names))
        return min((time for time in times if time is not None), default=None)

    def _next_of(self, device: str, now: float, names: Collection[str]) -> Batch | None:
        for name in names:
            if self._devices[name] == device:
                batch = self._bound[device].next_batch(now, name)
                if batch is not None:
                    return batch
        return None

    def _next_of_any(self, now: float, names: Collection[str], wanted: Collection[str]) -> Batch | None:
        """A batch of the other requests, best for an instance whose device nobody waits for."""
        for name in sorted(names, key=lambda name: self._devices[name] in wanted):
            batch = self._anywhere.next_batch(now, name)
            if batch is not None:
                return batch
        return None

    def computed(self, batch: Batch) -> None:
        self._slots.free_slot(batch)

    def complete(self, batch_id: int, took_s: float | None = None, now: float = math.inf) -> Batch:
        return self._anywhere.complete(batch_id, took_s, now)

    # ---- instances ------------------------------------------------------------------------

    def instance_up(self, name: str, slots: int = 1, device: str = "") -> None:
        self._anywhere.instance_up(name, slots)
        self._devices[name] = device

    def instance_down(self, name: str, died_at: float | None = None) -> list[QueuedRequest]:
        self._devices.pop(name, None)
        again, lost = self._anywhere.take_down(name, died_at)
        for device in {request.device for request in again}:
            self._of(device).put_back(one for one in again if one.device == device)
        self.blame = self._anywhere.blame
        if self.blame is not None and self.blame.is_new:
            for one in self._all:
                one.isolate(self.blame.client)
        return lost

    def statistics(self) -> SchedulerStatistics:
        counts = self._anywhere.statistics()
        for bound in self._bound.values():
            more = bound.statistics()
            counts = counts._replace(**{one: getattr(counts, one) + getattr(more, one) for one in _COUNTS})
        return counts

    # ---- inside ---------------------------------------------------------------------------

    def _of(self, device: str) -> ModelScheduler:
        if device == ANY:
            return self._anywhere
        bound = self._bound.get(device)
        if bound is None:
            bound = self._bound[device] = self._new_scheduler(self._slots, self._suspects)
            self._all.append(bound)
        return bound

    def _waiting(self) -> list[tuple[tuple[bool, Any, float], str]]:
        found = []
        for device, bound in self._bound.items():
            first = bound.first()
            if first is not None:
                found.append((_turn(first), device))
        return found


def _turn(request: QueuedRequest) -> tuple[bool, Any, float]:
    """What goes first is the least: whose worker died, then by priority, where there are any, then by age."""
    return request.attempts == 0, getattr(request, "lane", (0, False)), request.enqueued_at
