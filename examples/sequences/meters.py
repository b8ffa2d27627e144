"""The mean of what each meter has reported since its sequence began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuserve import Request


@dataclass
class Meter:
    """What is kept for one sequence."""

    total: float = 0.0
    count: int = 0


class RunningMean:
    """``reading``: float32 [1, 1] a request. Answers ``mean`` and ``count`` of its sequence up to now.

    A sequence always comes to the same instance, so a plain dictionary holds all that there is of it.
    """

    def __init__(self) -> None:
        self._meters: dict[int | str, Meter] = {}

    def __call__(self, requests: Sequence[Request]) -> list[Mapping[str, NDArray[np.generic]]]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Mapping[str, NDArray[np.generic]]:
        sequence = request.sequence
        assert sequence is not None, "the server lets no other request through"
        if sequence.start:
            self._meters[sequence.id] = Meter()
        meter = self._meters[sequence.id]
        meter.total += float(request["reading"][0, 0])
        meter.count += 1
        if sequence.end:
            del self._meters[sequence.id]
        return {
            "mean": np.array([[meter.total / meter.count]], np.float32),
            "count": np.array([[meter.count]], np.int32),
        }

    def sequence_dropped(self, sequence_id: int | str) -> None:
        """Called for a sequence whose end will not come: it was idle for too long, or its client left."""
        del self._meters[sequence_id]
