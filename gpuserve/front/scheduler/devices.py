"""The scheduler of a model whose instances are on several devices: a request that names memory of one of them
runs there, every other one anywhere. Pure; a model on one device has none of this.

What must run on a device waits in a scheduler of its own, which shares the instances with the one that all
other requests wait in. An instance with room is for the request that is next: by priority, then by age.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from gpuserve.errors import QueueFull
from gpuserve.front.scheduler.batcher import ModelScheduler
from gpuserve.front.scheduler.interface import SchedulerStatistics
from gpuserve.front.scheduler.queue import QueuedRequest, RequestState
from gpuserve.front.scheduler.slots import Batch
from gpuserve.spec import InstanceSpec

#: The counts of requests, which each of the schedulers has of its own.
_COUNTS: Final = (
    "queued", "queued_rows", "queued_nbytes", "accepted", "finished", "rejected", "cancelled", "expired",
    "retried", "lost",
)  # fmt: skip


#: In the place of a device, for requests that may run on any.
ANY: Final = ""
_AT_TURN: Final = operator.itemgetter(0)


class DeviceScheduler(ModelScheduler):
    """A ``ModelScheduler`` for requests that may run anywhere, with one for each device whose memory is
    named.

    ``devices`` says on which device each instance is. The limits of the queue are for all requests together,
    but for those of a single priority, which hold for each of the schedulers.
    """

    def __init__(self, devices: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._options = options
        self._devices = dict(devices)
        self._up: dict[str, None] = {}
        self._bound: dict[str, ModelScheduler] = {}

    # ---- requests -------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        """Refuse new requests from now on; what was accepted is still run."""
        super().stop_accepting()
        for one in self._bound.values():
            one.stop_accepting()

    def submit(self, request: QueuedRequest, now: float) -> None:
        """Queue a new request, for its device where it has one; raises as ``ModelScheduler.submit``."""
        device = request.device
        if self._bound or device:
            self._check_room(request)
        if device:
            self._of(device).submit(request, now)
        else:
            super().submit(request, now)

    def cancel(self, request: QueuedRequest) -> bool:
        """Take a request back, as ``ModelScheduler.cancel``."""
        if self._bound and request.state is RequestState.QUEUED and request.device:
            return self._bound[request.device].cancel(request)
        return super().cancel(request)

    def take_all(self, device: str = "") -> list[QueuedRequest]:
        """Take every queued request out, or those that must run on a device."""
        if device:
            return self._bound[device].take_all() if device in self._bound else []
        return [*super().take_all(), *(one for bound in self._bound.values() for one in bound.take_all())]

    def expire(self, now: float) -> list[QueuedRequest]:
        """Take every queued request out whose deadline is not after ``now``."""
        late = super().expire(now)
        for bound in self._bound.values():
            late += bound.expire(now)
        return late

    # ---- batches --------------------------------------------------------------------------

    def next_batch(self, now: float, instance: str | None = None) -> Batch | None:
        """Form one batch, for the instance named or for any, of requests that may run there."""
        waiting = self._waiting()
        if not waiting:
            return super().next_batch(now, instance)
        wanted = {device for _, device in waiting}
        first = self.first()
        if first is not None:
            waiting.append((_turn(first), ANY))
        for _, device in sorted(waiting, key=_AT_TURN):
            names = self.with_room() if instance is None else [instance]
            batch = self._next_of(device, now, names) if device else self._next_of_any(now, names, wanted)
            if batch is not None:
                return batch
        return None

    def next_wakeup(self, now: float, among: Collection[str] | None = None) -> float | None:
        """When time alone changes something, as ``ModelScheduler.next_wakeup``."""
        times = [super().next_wakeup(now, among)]
        for _, device in self._waiting():
            names = [one for one in self._on(device) if among is None or one in among]
            times.append(self._bound[device].next_wakeup(now, names))
        return min((time for time in times if time is not None), default=None)

    def _next_of(self, device: str, now: float, names: Collection[str]) -> Batch | None:
        """A batch of the requests that must run on a device, for one of these instances that is there."""
        for name in names:
            if self._devices[name] == device:
                batch = self._bound[device].next_batch(now, name)
                if batch is not None:
                    return batch
        return None

    def _next_of_any(self, now: float, names: Collection[str], wanted: Collection[str]) -> Batch | None:
        """A batch of the other requests, best for an instance whose device nobody waits for."""
        for name in sorted(names, key=lambda name: self._devices[name] in wanted):
            batch = super().next_batch(now, name)
            if batch is not None:
                return batch
        return None

    # ---- instances ------------------------------------------------------------------------

    def instance_up(self, name: str, slots: int = 1) -> None:
        """An instance is ready for batches, of which it runs ``slots`` at once."""
        super().instance_up(name, slots)
        self._up[name] = None

    def resize(self, instances: Sequence[InstanceSpec]) -> None:
        """The model has these instances from now on, on the devices that it had."""
        self._devices |= {one.name: one.device for one in instances}

    def retire(self, name: str) -> None:
        """An instance takes no more batches; it goes down once it is idle."""
        super().retire(name)
        self._up.pop(name, None)

    def instance_down(self, name: str) -> list[QueuedRequest]:
        """An instance died: the requests that are lost with it."""
        self._up.pop(name, None)
        return super().instance_down(name)

    def _put_back(self, requests: list[QueuedRequest]) -> None:
        super()._put_back([one for one in requests if not one.device])
        for device, bound in self._bound.items():
            bound._put_back([one for one in requests if one.device == device])

    def statistics(self) -> SchedulerStatistics:
        """The counts at this moment."""
        counts = super().statistics()
        for bound in self._bound.values():
            more = bound.statistics()
            counts = counts._replace(**{one: getattr(counts, one) + getattr(more, one) for one in _COUNTS})
        return counts

    # ---- inside ---------------------------------------------------------------------------

    def _of(self, device: str) -> ModelScheduler:
        bound = self._bound.get(device)
        if bound is None:
            bound = self._bound[device] = ModelScheduler(**self._options, slots=self._slots)
            if self.draining:
                bound.stop_accepting()
        return bound

    def _on(self, device: str) -> list[str]:
        """The instances on a device that are up."""
        return [name for name in self._up if self._devices[name] == device]

    def _waiting(self) -> list[tuple[tuple[bool, Any, float], str]]:
        """The devices for which requests wait, each with when its turn is."""
        found = []
        for device, bound in self._bound.items():
            first = bound.first()
            if first is not None:
                found.append((_turn(first), device))
        return found

    def _check_room(self, request: QueuedRequest) -> None:
        counts = self.statistics()
        try:
            self._queue.check_room(request, counts.queued, counts.queued_nbytes)
        except QueueFull:
            self._rejected += 1
            raise


def _turn(request: QueuedRequest) -> tuple[bool, Any, float]:
    """What goes first is the least: whose worker died, then by priority, where there are any, then by age."""
    return request.attempts == 0, getattr(request, "lane", (0, False)), request.enqueued_at
