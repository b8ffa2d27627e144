"""The policy of memory budgets: which resident models are evicted for a model that is to start. Pure.

An evicted model ends, or goes to sleep: its process then keeps the weights on the host and frees its GPU. Of
two models the least recently used goes first, whichever way.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

from gpuserve.devices.names import CPU

#: Bytes by device; those of the host have the name of the CPU.
Nbytes: TypeAlias = Mapping[str, int]


class Use(enum.Enum):
    """The use of a resident model. Only IDLE and ASLEEP models are evicted. HELD: the model starts, or is in
    use. LEAVING: its bytes get free soon.
    """

    IDLE = "IDLE"
    ASLEEP = "ASLEEP"
    HELD = "HELD"
    LEAVING = "LEAVING"


class Resident(NamedTuple):
    """A model whose instances take memory. ``used_at`` is the time of its latest request. ``asleep`` are the
    bytes that it would take asleep; None if it cannot sleep.
    """

    key: int
    nbytes: Nbytes
    used_at: float
    use: Use
    asleep: Nbytes | None = None


class Plan(NamedTuple):
    """The plan for a model that is to start: whether it starts now, which models end or go to sleep first,
    and whether there will be enough memory then.
    """

    starts: bool
    evicted: tuple[int, ...] = ()
    asleep: tuple[int, ...] = ()
    suffices: bool = True


_WAIT: Final = Plan(False, suffices=False)


def plan_start(wanted: Nbytes, free: Nbytes, residents: Iterable[Resident]) -> Plan:
    """Return the plan for a model that takes ``wanted`` bytes while ``free`` are not taken.

    The least recently used idle models are evicted, as few as suffice. While even all of them would not
    suffice, none is evicted, unless no other model is left to wait for: then the model is too large, and
    starts beside the models that never go. A model goes to sleep if the host has room for its weights, or
    gets room by the end of models that have slept for longer. Models that sleep already end for others only
    if the host is short, or if all idle ones do not suffice.
    """
    draft = _Draft(wanted, free, sorted(residents, key=lambda one: one.used_at))
    if draft.suffices:
        return Plan(True)
    draft.evict()
    if not draft.suffices and draft.is_held:
        return _WAIT
    starts = not (draft.ended or draft.asleep or draft.is_leaving)
    return Plan(starts, tuple(draft.ended), tuple(draft.asleep))


class _Draft:
    """A plan in the making. ``short`` are the bytes that are still missing, by device, after all that is
    planned.
    """

    def __init__(self, wanted: Nbytes, free: Nbytes, residents: list[Resident]) -> None:
        self.short = {device: wanted.get(device, 0) - nbytes for device, nbytes in free.items()}
        self.ended: list[int] = []
        self.asleep: list[int] = []
        self.is_leaving = False
        #: The bytes of the host that are free now, beside the model that is to start.
        self._host_free = -self.short.get(CPU, -math.inf)
        #: The bytes that the plan frees already, by model.
        self._freed: dict[int, Nbytes] = {}
        self._residents = residents
        self._holders = [one for one in residents if self._helps(one.nbytes)]
        self.is_held = any(one.use is Use.HELD for one in self._holders)

    @property
    def suffices(self) -> bool:
        return all(nbytes <= 0 for nbytes in self.short.values())

    def evict(self) -> None:
        for one in self._holders:
            if one.use is Use.LEAVING:
                self.is_leaving = True
                self._free(one, one.nbytes)
        for one in self._holders:
            # A process that sleeps has little memory on a GPU, and its weights are in use on the host.
            if one.use is Use.IDLE or (one.use is Use.ASLEEP and self.short.get(CPU, 0) > 0):
                self._evict(one)
        for one in self._holders:
            if one.use in {Use.IDLE, Use.ASLEEP} and not self.suffices:
                self._end(one)

    def _evict(self, one: Resident) -> None:
        if self.suffices or not self._helps(one.nbytes):
            return
        if one.asleep is not None:
            freed = {device: nbytes - one.asleep.get(device, 0) for device, nbytes in one.nbytes.items()}
            if self._helps(freed) and self._makes_room(one, -freed.get(CPU, 0)):
                self._free(one, freed)
                return
        self._end(one)

    def _end(self, one: Resident) -> None:
        if one.key in self.ended or not self._helps(one.nbytes):
            return
        if one.key in self.asleep:
            self.asleep.remove(one.key)
        self.ended.append(one.key)
        self._free(one, one.nbytes)

    def _makes_room(self, one: Resident, nbytes: int) -> bool:
        """Plan that a model goes to sleep, for which the host needs ``nbytes``: now, or when models that have
        slept for longer have ended. Return False if the host will have no room.
        """
        older = [
            each
            for each in self._residents
            if each.use is Use.ASLEEP and each.used_at < one.used_at and each.key not in self.ended
        ]
        leaving = [each for each in self._residents if each.use is Use.LEAVING]
        if nbytes <= self._host_free:
            self._host_free -= nbytes
            self.asleep.append(one.key)
            return True
        room = self._host_free + sum(each.nbytes.get(CPU, 0) for each in [*leaving, *older])
        if nbytes > room:
            return False
        self.is_leaving = True
        self._host_free += sum(each.nbytes.get(CPU, 0) for each in leaving)
        while nbytes > self._host_free:
            gone = older.pop(0)
            self._host_free += gone.nbytes.get(CPU, 0)
            self.ended.append(gone.key)
            self._free(gone, gone.nbytes)
        self._host_free -= nbytes
        return True

    def _helps(self, nbytes: Nbytes) -> bool:
        return any(count > 0 and self.short.get(device, 0) > 0 for device, count in nbytes.items())

    def _free(self, one: Resident, nbytes: Nbytes) -> None:
        before, self._freed[one.key] = self._freed.get(one.key, {}), nbytes
        for device in self.short:
            self.short[device] -= nbytes.get(device, 0) - before.get(device, 0)
