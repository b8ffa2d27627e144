"""What looks at the files of models, one after the other, say has changed. Pure; ``polling.py`` looks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias

#: What is looked at: the name of a model, which stands for all its files ("" is about all models), or one
#: file of it. Each has something that differs once it has changed.
Stamps: TypeAlias = Mapping[Any, Hashable]


class Look(NamedTuple):
    """``changed`` is that of which a change is complete; ``is_moving``: something else is being written."""

    changed: frozenset[Hashable]
    is_moving: bool


class Looks:
    """A change counts once two looks in a row show the same: nothing half written is loaded."""

    def __init__(self, first: Stamps) -> None:
        self._applied = dict(first)
        self._last = dict(first)

    def follow(self, more: Stamps) -> None:
        """Look at these too from now on; as they are they have not changed."""
        for key, stamp in more.items():
            self._applied.setdefault(key, stamp)
            self._last.setdefault(key, stamp)

    def keep(self, is_followed: Callable[[Hashable], bool]) -> None:
        """Look no more at what is not followed."""
        self._applied = {key: stamp for key, stamp in self._applied.items() if is_followed(key)}
        self._last = {key: stamp for key, stamp in self._last.items() if is_followed(key)}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._applied or key in self._last

    def look(self, now: Stamps) -> Look:
        keys = {*now, *self._last, *self._applied}
        moving = {key for key in keys if now.get(key) != self._last.get(key)}
        changed = {key for key in keys - moving if now.get(key) != self._applied.get(key)}
        self._last = dict(now)
        for key in changed:
            if key in now:
                self._applied[key] = now[key]
            else:
                self._applied.pop(key, None)
        return Look(frozenset(changed), bool(moving))
