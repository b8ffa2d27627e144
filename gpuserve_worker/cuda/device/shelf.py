"""Memory that is kept to be used again, by size: which of it is given to whom, and what there is too much of.
Pure bookkeeping: what memory it is, of the device or of the host, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

_Item = TypeVar("_Item")

#: Below this all is one size.
_SMALLEST_NBYTES: Final = 64 << 10


class Shelf(Generic[_Item]):
    """What is free, with its size, the longest unused first. Not thread-safe. Up to ``limit_nbytes`` of it
    are kept; nothing is given to who wants less than a part in ``slack`` of it.
    """

    def __init__(self, limit_nbytes: int, slack: int = 4) -> None:
        self.limit_nbytes = limit_nbytes
        self._slack = slack
        self._entries: list[tuple[int, _Item]] = []
        self.nbytes = 0

    def put(self, nbytes: int, item: _Item) -> None:
        self._entries.append((nbytes, item))
        self.nbytes += nbytes

    def take(self, nbytes: int, is_ready: Callable[[_Item], bool]) -> _Item | None:
        """The smallest that is large enough and ready, the longest unused first; None where none fits."""
        most = max(nbytes, 1) * self._slack
        fitting = [one for one in self._entries if nbytes <= one[0] <= most]
        fitting.sort(key=lambda one: one[0])
        for entry in fitting:  # CUDA is asked about no more of them than have to be
            if is_ready(entry[1]):
                self._entries.remove(entry)
                self.nbytes -= entry[0]
                return entry[1]
        return None

    def surplus(self) -> list[_Item]:
        return self._drop(self.limit_nbytes)

    def empty(self) -> list[_Item]:
        return self._drop(0)

    def _drop(self, limit_nbytes: int) -> list[_Item]:
        dropped = []
        while self.nbytes > limit_nbytes and self._entries:
            nbytes, item = self._entries.pop(0)
            self.nbytes -= nbytes
            dropped.append(item)
        return dropped


def size_class(nbytes: int) -> int:
    """The size to ask for: at most an eighth more, so that batches of similar sizes share memory."""
    if nbytes <= _SMALLEST_NBYTES:
        return _SMALLEST_NBYTES
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step
