"""How an operation reads its source: not at one moment, but over the time that it takes, as a GPU does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Read:
    """A source that is looked at when the operation begins and when it ends. Where it has changed between,
    which nobody may rely on, the value is half of what it was and half of what it is.
    """

    def __init__(self, look: Callable[[], Array | None]) -> None:
        """``look`` gives the source as it is; None where it is gone."""
        self._look = look
        self._first: Array | None = None

    def begin(self) -> None:
        """The operation begins."""
        found = self._look()
        self._first = None if found is None else found.copy("C")

    def end(self) -> Array | None:
        """What the operation has read; None of a source that was not there when it began."""
        first, last = self._first, self._look()
        if first is None or last is None or np.array_equal(first, last):
            return first
        mixed = first.copy()
        half = mixed.size // 2
        mixed.reshape(-1)[half:] = last.reshape(-1)[half:]
        return mixed
