"""Three models that read a receipt in turn: text to lines, lines to amounts, amounts to a sum."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuserve.decorators import batch, sample

_AMOUNT = re.compile(rb"(\d+)[.,](\d\d)\s*$")
#: What a model of this kind would take for each step.
_WORK_S = 0.02


@sample
def split(text: NDArray[np.object_]) -> dict[str, NDArray[np.object_]]:
    """``text``: bytes [1]. Answers ``lines``: bytes [n], those that are not empty."""
    time.sleep(_WORK_S)
    lines = [line.strip() for line in text[0].splitlines() if line.strip()]
    return {"lines": np.array(lines, dtype=object)}


@sample
def amounts(lines: NDArray[np.object_]) -> dict[str, NDArray[np.int64]]:
    """``lines``: bytes [n]. Answers ``cents``: int64 [m], of the lines that end with an amount."""
    time.sleep(_WORK_S)
    found = [match for match in map(_AMOUNT.search, lines) if match]
    return {"cents": np.array([int(one[1]) * 100 + int(one[2]) for one in found], np.int64)}


@batch
def total(cents: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """``cents``: int64 [rows, n]. Answers ``total``: bytes [rows, 1]."""
    time.sleep(_WORK_S)
    sums = cents.sum(axis=1)
    return {"total": np.array([[f"{one // 100}.{one % 100:02}"] for one in sums])}
