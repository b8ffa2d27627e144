"""Callables whose requests end in every way: the first element of ``x`` says how."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpuserve import current_model
from gpuserve.decorators import batch

ECHOED, RAISES, DIES, MISFITS, KEPT, SLOW, ASKS = range(7)
_kept: list[Any] = []


@batch
def act(x: Any) -> Any:
    how = int(x.flat[0])
    if how == RAISES:
        raise ValueError("as it was asked to")
    if how == DIES:
        os._exit(1)
    if how == MISFITS:
        return {"z": x}
    if how == KEPT:  # until the next call
        _kept.append(x)
    else:
        _kept.clear()
    if how == SLOW:
        time.sleep(0.05)
    if how == ASKS:
        return {"y": current_model().infer("other", {"x": x * 0})["y"]}
    return {"y": x}


def many(requests: Any) -> Iterator[Any]:
    """Eight responses as large as the request."""
    for n in range(8):
        if int(requests[0]["x"].flat[0]) == RAISES and n == 3:
            raise ValueError("as it was asked to")
        yield [{"y": np.full_like(one["x"], n)} for one in requests]
