"""Which instances of all models may run now, where a server limits rates: each needs resources while it runs,
and there is only so much of them. Pure; ``limited.py`` asks it for one model.

An instance that asks is given what it needs at once, if that is free and nobody waits for any of it.
Otherwise it waits; whenever resources come free, those that wait are looked through, the one with the lowest
``executions x max(priority, 1)`` first. One whose resources are free has them *reserved* and is woken. One
whose resources are not free keeps all that it needs from those behind it: what needs much is not starved by
what needs little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from gpuserve.rate_spec import Resource, ResourceLimit, limit_of
from gpuserve.spec import InstanceSpec


class InstanceRate:
    """What one instance needs and has had. ``executions`` counts what it was given resources for."""

    __slots__ = ("executions", "needs", "priority", "reserved", "waits", "wake")

    def __init__(self, needs: dict[Resource, int], priority: int, wake: Callable[[], None]) -> None:
        self.needs = needs
        self.priority = max(priority, 1)
        self.executions = 0
        self.waits = False
        self.reserved = False
        self.wake = wake

    @property
    def turn(self) -> int:
        """The lower, the sooner."""
        return self.executions * self.priority


class RateLimiter:
    """The resources of a server and who has them. ``limits`` are the operator's; without one there is as
    much of a resource as the instance needs that needs the most.
    """

    def __init__(self, limits: Iterable[ResourceLimit]) -> None:
        self._limits = tuple(limits)
        self._instances: list[InstanceRate] = []
        self._available: dict[Resource, int] = {}
        self._taken: Counter[Resource] = Counter()

    def add(self, instances: Iterable[InstanceSpec], wake: Callable[[], None]) -> dict[str, InstanceRate]:
        """Instances of a model take part from now on, by name; ``wake`` is called when one may run."""
        made = {}
        for one in instances:
            made[one.name] = InstanceRate(self._needs(one), one.rate.priority, wake)
        self._instances += made.values()
        self._count()
        return made

    def _needs(self, instance: InstanceSpec) -> dict[Resource, int]:
        """What an instance needs, and never more than there is: that it needs more is told at its start."""
        needs = instance.rate.needs(instance.device)
        for resource, count in needs.items():
            limit = limit_of(resource, self._limits)
            needs[resource] = count if limit is None else min(count, limit)
        return needs

    def remove(self, instances: Iterable[InstanceRate]) -> None:
        """Instances that are no more; they have given back what they had."""
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
        claimed: Counter[Resource] = Counter()
        for instance in sorted([one for one in self._instances if one.waits], key=_turn):
            if any(self._free(one) - claimed[one] < count for one, count in instance.needs.items()):
                claimed.update(instance.needs)
                continue
            self._taken.update(instance.needs)
            instance.waits, instance.reserved = False, True
            if instance is not asking:
                instance.wake()

    def _free(self, resource: Resource) -> int:
        return self._available[resource] - self._taken[resource]

    def _count(self) -> None:
        """How much there is of each resource, after instances have come or gone."""
        most: dict[Resource, int] = {}
        for instance in self._instances:
            for resource, count in instance.needs.items():
                most[resource] = max(most.get(resource, 0), count)
        limited = {resource: limit_of(resource, self._limits) for resource in most}
        self._available = {one: most[one] if limit is None else limit for one, limit in limited.items()}


def _turn(instance: InstanceRate) -> int:
    return instance.turn
