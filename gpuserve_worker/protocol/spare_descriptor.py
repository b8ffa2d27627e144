"""A descriptor held in reserve, by which a process that has no other left can still accept a connection."""

from __future__ import annotations

import contextlib
import os


class SpareDescriptor:
    """The reserve of one listener, from ``hold()`` to ``release()``."""

    def __init__(self) -> None:
        self._fd = -1

    def hold(self) -> None:
        """Take a descriptor into reserve unless there is one, or none to be had."""
        if self._fd < 0:
            with contextlib.suppress(OSError):
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def release(self) -> bool:
        """Give the descriptor up for something else to use; False: there was none."""
        if self._fd < 0:
            return False
        os.close(self._fd)
        self._fd = -1
        return True
