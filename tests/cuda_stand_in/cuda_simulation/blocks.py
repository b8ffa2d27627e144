"""How small allocations lie in blocks of 2 MiB, as CUDA has them: many share one, and a handle of one shows
the block. Its memory is what was there before, and comes back when nothing is in it any more. Pure.
"""

from __future__ import annotations

from typing import Final

BLOCK_NBYTES: Final = 2 << 20
#: CUDA aligns what it gives to this.
ALIGNMENT: Final = 512


def rounded(nbytes: int, step: int = ALIGNMENT) -> int:
    """So many bytes, up to the next step."""
    return -(-nbytes // step) * step


class Layout:
    """Which parts of a block of ``nbytes`` are given."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        #: Offset -> size of what is given.
        self._given: dict[int, int] = {}

    @property
    def is_empty(self) -> bool:
        return not self._given

    def take(self, nbytes: int) -> int | None:
        """The first offset at which so many bytes are free, which are given now; None: there is none."""
        size, start = rounded(nbytes), 0
        for offset, given in sorted(self._given.items()):
            if start + size <= offset:
                break
            start = offset + given
        if start + size > self._nbytes:
            return None
        self._given[start] = size
        return start

    def give_back(self, offset: int) -> None:
        """What was given there is free again."""
        del self._given[offset]
