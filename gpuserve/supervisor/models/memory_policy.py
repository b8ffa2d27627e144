"""The policy of memory budgets: which resident models are evicted for a model that is to start. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

#: Bytes by device; those of the host have the name of the CPU.
Nbytes: TypeAlias = Mapping[str, int]


class Use(enum.Enum):
    """The use of a resident model. Only IDLE models are evicted. HELD: the model starts, or is in use."""

    IDLE = "IDLE"
    HELD = "HELD"
    LEAVING = "LEAVING"


class Resident(NamedTuple):
    """A model whose instances take memory. ``used_at`` is the time of its latest request."""

    key: int
    nbytes: Nbytes
    used_at: float
    use: Use


class Plan(NamedTuple):
    """The plan for a model that is to start: whether it starts now, and the models to evict first."""

    starts: bool
    evicted: tuple[int, ...] = ()


_WAIT: Final = Plan(False)


def plan_start(wanted: Nbytes, free: Nbytes, residents: Iterable[Resident]) -> Plan:
    """Return the plan for a model that takes ``wanted`` bytes while ``free`` are not taken.

    The least recently used idle models are evicted, as few as suffice. While even all of them would not
    suffice, none is evicted, unless no other model is left to wait for: then the model is too large, and
    starts beside the models that never go.
    """
    residents = sorted(residents, key=lambda one: one.used_at)
    short = {device: wanted.get(device, 0) - nbytes for device, nbytes in free.items()}
    if _suffices(short):
        return Plan(True)
    holders = [one for one in residents if _helps(one, short)]
    leaving = [one for one in holders if one.use is Use.LEAVING]
    for one in leaving:
        _subtract(short, one.nbytes)
    evicted: list[int] = []
    for one in holders:
        if _suffices(short):
            break
        if one.use is Use.IDLE and _helps(one, short):
            _subtract(short, one.nbytes)
            evicted.append(one.key)
    if not _suffices(short) and any(one.use is Use.HELD for one in holders):
        return _WAIT
    return Plan(not evicted and not leaving, tuple(evicted))


def _helps(resident: Resident, short: Nbytes) -> bool:
    return any(nbytes and short.get(device, 0) > 0 for device, nbytes in resident.nbytes.items())


def _suffices(short: Nbytes) -> bool:
    return all(nbytes <= 0 for nbytes in short.values())


def _subtract(short: dict[str, int], nbytes: Nbytes) -> None:
    for device in short:
        short[device] -= nbytes.get(device, 0)
