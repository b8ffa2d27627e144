"""The choice of a model's scheduler, and the scheduler of a model whose instances are on several devices.
Pure.

A request that names memory of a device runs on that device, every other request anywhere. The requests bound
to a device wait in a scheduler of their own, which shares the instances with the scheduler of all other
requests. An instance with room serves the request that is next: by priority, then by age. An ensemble's step
whose inputs lie on a device runs on the nearest of the least busy devices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, TypeAlias

from gpuserve.devices.machine import GpuLink
from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.request_queue import QueuedRequest, RequestState
from gpuserve.front.scheduling.scheduler import Scheduler, SchedulerStatistics
from gpuserve.front.scheduling.sequence_scheduler import SequenceScheduler
from gpuserve.front.scheduling.slots import Batch, InstanceSlots
from gpuserve.front.scheduling.suspects import Suspects
from gpuserve.model.spec import ModelSpec

#: Returns how two devices reach each other's memory.
LinkBetween: TypeAlias = Callable[[str, str], GpuLink]


def link_by_name(device: str, other: str) -> GpuLink:
    return GpuLink.SAME if device == other else GpuLink.HOST


def make_scheduler(
    spec: ModelSpec, front_lost_at: float = -math.inf, link_between: LinkBetween = link_by_name
) -> Scheduler:
    """Return the scheduler that suits the spec. ``front_lost_at`` is when a previous front died."""
    if spec.in_sequences:
        return SequenceScheduler(spec, front_lost_at)
    if len({one.first_device for one in spec.instances}) > 1:
        return DeviceScheduler(partial(ModelScheduler, spec), link_between)
    return ModelScheduler(spec)


#: The counts that each of the schedulers keeps separately.
_COUNTS: Final = (
    "queued", "queued_rows", "queued_nbytes", "accepted", "finished", "rejected", "cancelled", "expired",
    "retried", "lost",
)  # fmt: skip
#: The device of requests that may run on any.
ANY: Final = ""
_TURN: Final = operator.itemgetter(0)


class DeviceScheduler(Scheduler):
    """A scheduler of the requests that may run anywhere, and one for each device whose memory requests name.

    ``new_scheduler`` makes each of them, over the same instances. The limits of the queue apply to all
    requests together, except the limits of a single priority, which apply to each of the schedulers.
    """

    def __init__(
        self,
        new_scheduler: Callable[[InstanceSlots, Suspects], ModelScheduler],
        link_between: LinkBetween = link_by_name,
    ) -> None:
        self._new_scheduler = new_scheduler
        self._link_between = link_between
        self._slots: InstanceSlots = InstanceSlots()
        self._suspects = Suspects()
        self._anywhere = new_scheduler(self._slots, self._suspects)
        #: By device; ``_all`` contains these and ``_anywhere``.
        self._bound: dict[str, ModelScheduler] = {}
        self._all = [self._anywhere]
        #: The device of each instance that is up or finishes its batches.
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

    def remove_all(self, device: str = "") -> list[QueuedRequest]:
        if device:
            return self._bound[device].remove_all() if device in self._bound else []
        return [request for one in self._all for request in one.remove_all()]

    def transfer(self, to: Scheduler, most_nbytes: int) -> list[QueuedRequest]:
        return next((taken for one in self._all if (taken := one.transfer(to, most_nbytes))), [])

    def expire(self, now: float) -> list[QueuedRequest]:
        return [request for one in self._all for request in one.expire(now)]

    # ---- batches --------------------------------------------------------------------------

    def next_batch(self, now: float, instance: str | None = None) -> Batch | None:
        waiting = self._waiting()
        first = self._anywhere.first()
        if not waiting and not (first is not None and first.near):
            return self._anywhere.next_batch(now, instance)
        wanted = {device for _, device in waiting}
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
        """Form a batch of unbound requests, preferably where no bound request waits for the device, then at
        the least busy instance, then next to the inputs of the first request.
        """
        first = self._anywhere.first()
        near = "" if first is None else first.near

        def cost(name: str) -> tuple[bool, float, GpuLink]:
            device = self._devices[name]
            link = self._link_between(device, near) if near else GpuLink.SAME
            return device in wanted, self._slots.load(name), link

        for name in sorted(names, key=cost):
            batch = self._anywhere.next_batch(now, name)
            if batch is not None:
                return batch
        return None

    def exceeded_memory(self, batch: Batch) -> None:
        for one in self._all:
            one.exceeded_memory(batch)

    def computed(self, batch: Batch) -> None:
        self._slots.free_slot(batch)

    def complete(self, batch_id: int, took_s: float | None = None, now: float = math.inf) -> Batch:
        return self._anywhere.complete(batch_id, took_s, now)

    def return_batch(self, batch_id: int, *, begun: bool) -> list[QueuedRequest]:
        device = self._slots.batch(batch_id).requests[0].device
        return self._of(device).return_batch(batch_id, begun=begun)

    # ---- instances ------------------------------------------------------------------------

    def instance_up(self, name: str, slots: int = 1, device: str = "") -> None:
        self._anywhere.instance_up(name, slots)
        self._devices[name] = device

    def instance_down(self, name: str, died_at: float | None = None) -> list[QueuedRequest]:
        self._devices.pop(name, None)
        again, lost = self._anywhere.remove_instance(name, died_at)
        for device in {request.device for request in again}:
            self._of(device).requeue(one for one in again if one.device == device)
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
    """Return a sort key: requests whose worker died first, then by priority if there is one, then by age."""
    return request.attempts == 0, getattr(request, "lane", (0, False)), request.enqueued_at
