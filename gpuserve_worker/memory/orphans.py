"""Memory whose owner was deleted before the owner gave the memory back.

An owner of memory that must be given back by a call (a block of an arena, a lease of a worker's outputs, a
share of the intake) reports itself here in ``__del__``. An owner that Python deletes has no reference left,
so nobody else can use the memory or give it back. ``__del__`` may run in any thread and in the middle of any
other call, so it only notes the owner; the event loop gives the memory back later, by ``Orphans.reclaim``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Final, Protocol


class Owner(Protocol):
    """An object that holds memory. ``memory_kind`` is a label of the metric of reclaimed memory."""

    @property
    def memory_kind(self) -> str: ...

    def reclaim(self) -> None:
        """Give the memory back."""


#: All kinds that there are, as users see them.
ARENA_BLOCK: Final = "arena_block"
LENT_BLOCK: Final = "lent_block"
OUTPUT_LEASE: Final = "output_lease"
INTAKE_SHARE: Final = "intake_share"
KINDS: Final = (ARENA_BLOCK, LENT_BLOCK, OUTPUT_LEASE, INTAKE_SHARE)


class Orphans:
    """The deleted owners of this process, and how many of each kind have been reclaimed."""

    def __init__(self) -> None:
        self._found: deque[Owner] = deque()
        self._reclaimed: Counter[str] = Counter(dict.fromkeys(KINDS, 0))

    def add(self, owner: Owner) -> None:
        """Note an owner that is being deleted. Safe in any thread, and in ``__del__``."""
        self._found.append(owner)

    def reclaim(self) -> Mapping[str, int]:
        """Give the memory of all noted owners back, in the event loop's thread; return their counts."""
        counted: Counter[str] = Counter()
        while self._found:
            owner = self._found.popleft()
            counted[owner.memory_kind] += 1
            self._reclaimed[owner.memory_kind] += 1
            owner.reclaim()
        return counted

    @property
    def reclaimed(self) -> Mapping[str, int]:
        """How many owners of each kind have been reclaimed since the process began."""
        return self._reclaimed


#: One for the process: an owner is deleted wherever its last reference was.
ORPHANS: Final = Orphans()
