"""Models that are asked: which language a text is in, and what mood, if one knows the language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuserve.decorators import batch

_GERMAN = {b"das", b"ist", b"ich", b"und", b"der", b"die"}


@batch
def language(text: NDArray[np.object_]) -> dict[str, NDArray[np.object_]]:
    """``text``: bytes [rows, 1]. Answers ``language``: bytes [rows, 1], ``de`` or ``en``."""
    found = [[b"de" if _GERMAN & set(one.lower().split()) else b"en"] for (one,) in text.tolist()]
    return {"language": np.array(found, dtype=object)}


class Mood:
    """Counts the words of one language that tell a mood."""

    def __init__(self, good: Sequence[str], bad: Sequence[str]) -> None:
        self._good = {word.encode() for word in good}
        self._bad = {word.encode() for word in bad}

    @batch
    def __call__(self, text: NDArray[np.object_]) -> dict[str, NDArray[Any]]:
        """``text``: bytes [rows, 1]. Answers ``mood``: int32 [rows, 1]."""
        words = [one.lower().split() for (one,) in text.tolist()]
        moods = [[sum((word in self._good) - (word in self._bad) for word in one)] for one in words]
        return {"mood": np.array(moods, np.int32)}
