"""The floor of everything that moves a tensor: one copy of it inside one process, on one core."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.load import LoadResult

NAME = "memcpy"
TITLE = "memcpy"


def copy(nbytes: int, seconds: float) -> LoadResult:
    """Copy so many bytes again and again for this long, at least once, between two arrays that are mapped."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    times_s: list[float] = []
    now = began_at = time.perf_counter()
    while not times_s or now < began_at + seconds:
        np.copyto(target, source)
        ended_at = time.perf_counter()
        times_s.append(ended_at - now)
        now = ended_at
    return LoadResult.of_times(len(times_s), len(times_s) / (now - began_at), times_s)
