"""Rate limits by shared resources: a server-wide limiter, and the batch source of one model under limits.
Pure.

An instance that requests its resources gets them at once if they are free and no instance waits for any of
them. Otherwise it waits. Whenever resources become free, the waiting instances are visited in the order of
``executions x max(priority, 1)``, the lowest first. An instance whose resources are free has them *reserved*
and is woken. An instance whose resources are not free blocks all of them for those behind it, so small needs
do not starve a large one.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpuserve.config.settings.checks import limit_of
from gpuserve.config.settings.server import ResourceLimit
from gpuserve.front.scheduling.request_queue import QueuedRequest
from gpuserve.front.scheduling.scheduler import Scheduler
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import DeviceResource, InstanceSpec


class RateLimitedSource:
    """The ``BatchSource`` of a model under limits. ``wake`` is called when ``next_batch`` may return a batch.

    It asks the scheduler for a batch only for an instance that the ``SharedResources`` let run.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        instances: Sequence[InstanceSpec],
        limiter: SharedResources,
        wake: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._limiter = limiter
        self._wake = wake
        self._rates = limiter.add(instances, wake)
        #: Instances that are removed for good when they go down.
        self._retired: set[str] = set()
        #: The instance of each batch that holds resources.
        self._running: dict[int, str] = {}
        #: Instances that wait for resources.
        self._refused: set[str] = set()

    def next_batch(self, now: float) -> Batch | None:
        self._refused.clear()
        if self._scheduler.statistics().queued:
            for name in self._scheduler.with_room():
                batch = self._form_batch_for(name, now)
                if batch is not None:
                    return batch
        for name, rate in self._rates.items():
            if name not in self._refused:
                self._limiter.withdraw(rate)
        return None

    def _form_batch_for(self, name: str, now: float) -> Batch | None:
        rate = self._rates[name]
        if not self._limiter.acquire(rate):
            self._refused.add(name)
            return None
        batch = self._scheduler.next_batch(now, name)
        if batch is None:
            self._limiter.release(rate, unused=True)
            return None
        self._running[batch.batch_id] = name
        return batch

    def next_wakeup(self, now: float) -> float | None:
        """Return when time alone changes something. The limiter wakes instances that wait for resources."""
        open_to = [one for one in self._scheduler.with_room() if one not in self._refused]
        return self._scheduler.next_wakeup(now, open_to)

    def complete(self, batch_id: int, took_s: float | None = None, now: float = math.inf) -> Batch:
        batch = self._scheduler.complete(batch_id, took_s, now)
        self._limiter.release(self._rates[self._running.pop(batch_id)])
        return batch

    def return_batch(self, batch_id: int, *, begun: bool) -> list[QueuedRequest]:
        lost = self._scheduler.return_batch(batch_id, begun=begun)
        self._limiter.release(self._rates[self._running.pop(batch_id)], unused=not begun)
        return lost

    def instance_down(self, name: str, died_at: float | None = None) -> list[QueuedRequest]:
        lost = self._scheduler.instance_down(name, died_at)
        for batch_id in [n for n, instance in self._running.items() if instance == name]:
            del self._running[batch_id]
            self._limiter.release(self._rates[name])
        if name in self._rates:
            self._limiter.withdraw(self._rates[name])
        if name in self._retired:
            self._retired.remove(name)
            self._limiter.remove([self._rates.pop(name)])
        return lost

    def resize(self, instances: Sequence[InstanceSpec]) -> None:
        new = [one for one in instances if one.name not in self._rates]
        self._rates |= self._limiter.add(new, self._wake)

    def retire(self, name: str) -> None:
        """Give an instance no new batches. It keeps its resources until its batches end."""
        self._scheduler.retire(name)
        self._retired.add(name)
        self._limiter.withdraw(self._rates[name])

    def close(self) -> None:
        self._limiter.remove(self._rates.values())


@dataclass(eq=False, slots=True)
class InstanceRate:
    """The needs of one instance and its state in the limiter. ``executions`` counts grants of resources."""

    needs: dict[DeviceResource, int]
    #: At least 1.
    priority: int
    wake: Callable[[], None]
    executions: int = 0
    waits: bool = False
    reserved: bool = False

    @property
    def turn(self) -> int:
        """Return the rank among waiting instances: the lowest is served first."""
        return self.executions * self.priority


class SharedResources:
    """A server's resources and users. Without a limit a resource is as large as the largest need."""

    def __init__(self, limits: Iterable[ResourceLimit]) -> None:
        self._limits = tuple(limits)
        self._instances: list[InstanceRate] = []
        self._available: dict[DeviceResource, int] = {}
        self._in_use: Counter[DeviceResource] = Counter()

    def add(self, instances: Iterable[InstanceSpec], wake: Callable[[], None]) -> dict[str, InstanceRate]:
        made = {
            one.name: InstanceRate(self._needs(one), max(one.rate.priority, 1), wake) for one in instances
        }
        self._instances += made.values()
        self._count()
        return made

    def _needs(self, instance: InstanceSpec) -> dict[DeviceResource, int]:
        """Return the needs of an instance, capped at the limits. Its start reports needs above a limit."""
        needs = instance.rate.needs(instance.device)
        for resource, count in needs.items():
            limit = limit_of(resource, self._limits)
            needs[resource] = count if limit is None else min(count, limit)
        return needs

    def remove(self, instances: Iterable[InstanceRate]) -> None:
        for instance in instances:
            self._instances.remove(instance)
        self._count()
        self._serve_waiting()

    def acquire(self, instance: InstanceRate) -> bool:
        """Give an instance the resources for one run. False: it waits, and will be woken."""
        if not instance.reserved:
            instance.waits = True
            self._serve_waiting(asking=instance)
        if not instance.reserved:
            return False
        instance.reserved = False
        instance.executions += 1
        return True

    def release(self, instance: InstanceRate, *, unused: bool = False) -> None:
        """Return the resources of one run. ``unused``: the instance did not run."""
        self._in_use.subtract(instance.needs)
        instance.executions -= unused
        self._serve_waiting()

    def withdraw(self, instance: InstanceRate) -> None:
        """Stop an instance from waiting, because it has nothing to run, and free its reservation."""
        instance.waits = False
        if instance.reserved:
            instance.reserved = False
            self._in_use.subtract(instance.needs)
            self._serve_waiting()

    def _serve_waiting(self, asking: InstanceRate | None = None) -> None:
        claimed: Counter[DeviceResource] = Counter()
        for instance in sorted(
            [one for one in self._instances if one.waits], key=operator.attrgetter("turn")
        ):
            if any(self._free(one) - claimed[one] < count for one, count in instance.needs.items()):
                claimed.update(instance.needs)
                continue
            self._in_use.update(instance.needs)
            instance.waits, instance.reserved = False, True
            if instance is not asking:
                instance.wake()

    def _free(self, resource: DeviceResource) -> int:
        return self._available[resource] - self._in_use[resource]

    def _count(self) -> None:
        most: dict[DeviceResource, int] = {}
        for instance in self._instances:
            for resource, count in instance.needs.items():
                most[resource] = max(most.get(resource, 0), count)
        limited = {resource: limit_of(resource, self._limits) for resource in most}
        self._available = {one: most[one] if limit is None else limit for one, limit in limited.items()}
