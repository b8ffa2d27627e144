"""What looks at the files of models, one after the other, say has changed. Pure; ``polling.py`` looks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeAlias

#: By model, something that differs once any file of it has changed; under "" it is about all of them.
Stamps: TypeAlias = Mapping[str, Hashable]


class Look(NamedTuple):
    """``changed`` are the models of which a change is complete; ``is_moving``: others are being written."""

    changed: frozenset[str]
    is_moving: bool


class Looks:
    """A change counts once two looks in a row show the same: nothing half written is loaded."""

    def __init__(self, first: Stamps) -> None:
        self._applied = dict(first)
        self._last = dict(first)

    def look(self, now: Stamps) -> Look:
        names = {*now, *self._last, *self._applied}
        moving = {name for name in names if now.get(name) != self._last.get(name)}
        changed = {name for name in names - moving if now.get(name) != self._applied.get(name)}
        self._last = dict(now)
        for name in changed:
            if name in now:
                self._applied[name] = now[name]
            else:
                self._applied.pop(name, None)
        return Look(frozenset(changed), bool(moving))
