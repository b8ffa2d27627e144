"""What the pods serve: a model that batches, and one that streams. A release that is broken does not load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

#: Responses of a stream.
N_PARTS = 4


class Double:
    """``y`` is twice ``x``, both FP32 [rows, 1]."""

    def __init__(self, release: int, broken: bool) -> None:
        if broken:
            raise RuntimeError(f"release {release} cannot load")

    def __call__(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{"y": request["x"] * 2} for request in requests]


class Count:
    """``y`` is ``x``, 2 ``x``, … up to ``N_PARTS`` times it, FP32 [1], with ``pause_s`` before each."""

    def __init__(self, release: int) -> None:
        self.release = release

    async def __call__(self, requests: Sequence[Mapping[str, Any]]) -> AsyncIterator[list[dict[str, Any]]]:
        x, pause_s = requests[0]["x"], float(requests[0]["pause_s"][0])
        for times in range(1, N_PARTS + 1):
            await asyncio.sleep(pause_s)
            yield [{"y": np.asarray(x * times, np.float32)}]
