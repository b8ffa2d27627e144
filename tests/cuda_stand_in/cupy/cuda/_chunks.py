"""How cupy's pool cuts what it has: a freed piece is joined with free neighbours and given again, whole or in
part, and what it is a part of goes back to the device only when none of it is in use. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Device and stream: what was freed on a stream is given to the same one, behind whose work it is free.
Arena = tuple[int, int]


@dataclass(eq=False)
class Chunk:
    """``size`` bytes at an offset of memory from the device, beside other pieces of that."""

    memory: Any
    offset: int
    size: int
    arena: Arena
    before: Chunk | None = None
    behind: Chunk | None = None

    @property
    def is_whole(self) -> bool:
        return self.before is None and self.behind is None

    def cut(self, size: int) -> Chunk | None:
        """Leave so many bytes here; the rest of them, if any are left."""
        if size == self.size:
            return None
        rest = Chunk(self.memory, self.offset + size, self.size - size, self.arena, self, self.behind)
        if self.behind:
            self.behind.before = rest
        self.behind, self.size = rest, size
        return rest

    def join(self) -> None:
        """Take in the next one, which is free."""
        taken = self.behind
        assert taken is not None, "there is a next one"
        self.size += taken.size
        self.behind = taken.behind
        if self.behind:
            self.behind.before = self


class Chunks:
    """The free ones of a pool."""

    def __init__(self) -> None:
        self._free: list[Chunk] = []

    @property
    def nbytes(self) -> int:
        return sum(one.size for one in self._free)

    def __len__(self) -> int:
        return len(self._free)

    def take(self, size: int, arena: Arena) -> Chunk | None:
        """The smallest one that is large enough, cut to this size; None: there is none."""
        fitting = [one for one in self._free if one.arena == arena and one.size >= size]
        if not fitting:
            return None
        found = min(fitting, key=lambda one: one.size)
        self._free.remove(found)
        rest = found.cut(size)
        if rest:
            self._free.append(rest)
        return found

    def give_back(self, chunk: Chunk) -> None:
        """It is free again, as one with its neighbours that are."""
        if chunk.behind in self._free:
            self._free.remove(chunk.behind)
            chunk.join()
        if chunk.before in self._free:
            chunk.before.join()
        else:
            self._free.append(chunk)

    def drop_whole(self, stream: int | None) -> list[Chunk]:
        """Forget those of which no part is in use, of one stream or of all."""
        dropped = [one for one in self._free if one.is_whole and stream in {None, one.arena[1]}]
        self._free = [one for one in self._free if one not in dropped]
        return dropped
