"""Counts primes: work for a whole core, so several instances are several times as fast on several cores."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from gpuserve.decorators import batch


@batch
def count_primes(limit: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """``limit``: int64 [rows, 1]. Answers ``primes``, how many are below, and ``instance``, a pid."""
    counts = [[_primes_below(int(one))] for (one,) in limit]
    return {"primes": np.array(counts), "instance": np.full_like(limit, os.getpid())}


def _primes_below(limit: int) -> int:
    sieve = np.ones(max(limit, 2), dtype=bool)
    sieve[:2] = False
    for number in range(2, int(limit**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = False
    return int(sieve.sum())
