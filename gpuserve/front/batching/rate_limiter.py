"""Which instances of all models may run now, where a server limits rates: each needs resources while it runs,
and there is only so much of them. Pure; ``rate_limited.py`` asks it for one model.

An instance that asks is given what it needs at once, if that is free and nobody waits for any of it.
Otherwise it waits; whenever resources come free, those that wait are looked through, the one with the lowest
``executions x max(priority, 1)`` first. One whose resources are free has them *reserved* and is woken. One
whose resources are not free keeps all that it needs from those behind it: what needs much is not starved by
what needs little.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpuserve.config.settings.rate_limits import limit_of
from gpuserve.config.settings.server import ResourceLimit
from gpuserve.model.spec import DeviceResource, InstanceSpec


@dataclass(eq=False, slots=True)
class InstanceRate:
    """What one instance needs and has had. ``executions`` counts what it was given resources for."""

    needs: dict[DeviceResource, int]
    #: At least 1.
    priority: int
    wake: Callable[[], None]
    executions: int = 0
    waits: bool = False
    reserved: bool = False

    @property
    def turn(self) -> int:
        """The rank among those that wait: the lowest is served first."""
        return self.executions * self.priority


class SharedResources:
    """The resources of a server and who has them; without a limit there is as much as the largest need."""

    def __init__(self, limits: Iterable[ResourceLimit]) -> None:
        self._limits = tuple(limits)
        self._instances: list[InstanceRate] = []
        self._available: dict[DeviceResource, int] = {}
        self._taken: Counter[DeviceResource] = Counter()

    def add(self, instances: Iterable[InstanceSpec], wake: Callable[[], None]) -> dict[str, InstanceRate]:
        made = {
            one.name: InstanceRate(self._needs(one), max(one.rate.priority, 1), wake) for one in instances
        }
        self._instances += made.values()
        self._count()
        return made

    def _needs(self, instance: InstanceSpec) -> dict[DeviceResource, int]:
        """What an instance needs, and never more than there is: that it needs more is told at its start."""
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
        """Give an instance what it needs to run once. False: it waits, and will be woken."""
        if not instance.reserved:
            instance.waits = True
            self._serve_waiting(asking=instance)
        if not instance.reserved:
            return False
        instance.reserved = False
        instance.executions += 1
        return True

    def release(self, instance: InstanceRate, *, unused: bool = False) -> None:
        """An instance gives back what it was given once; ``unused``: it did not run."""
        self._taken.subtract(instance.needs)
        instance.executions -= unused
        self._serve_waiting()

    def withdraw(self, instance: InstanceRate) -> None:
        """An instance has nothing to run: it does not wait any more, and what is reserved for it is free."""
        instance.waits = False
        if instance.reserved:
            instance.reserved = False
            self._taken.subtract(instance.needs)
            self._serve_waiting()

    def _serve_waiting(self, asking: InstanceRate | None = None) -> None:
        claimed: Counter[DeviceResource] = Counter()
        for instance in sorted(
            [one for one in self._instances if one.waits], key=operator.attrgetter("turn")
        ):
            if any(self._free(one) - claimed[one] < count for one, count in instance.needs.items()):
                claimed.update(instance.needs)
                continue
            self._taken.update(instance.needs)
            instance.waits, instance.reserved = False, True
            if instance is not asking:
                instance.wake()

    def _free(self, resource: DeviceResource) -> int:
        return self._available[resource] - self._taken[resource]

    def _count(self) -> None:
        most: dict[DeviceResource, int] = {}
        for instance in self._instances:
            for resource, count in instance.needs.items():
                most[resource] = max(most.get(resource, 0), count)
        limited = {resource: limit_of(resource, self._limits) for resource in most}
        self._available = {one: most[one] if limit is None else limit for one, limit in limited.items()}
