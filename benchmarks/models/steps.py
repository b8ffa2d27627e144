"""Steps of 2 ms and 20 µs a row that take no CPU: stepped, and as a generator of static batches.

The stepped model writes what it has seen into the file ``$STEPS_RECORD`` when its worker ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpuserve import Last

STEP_S, ROW_S = 2e-3, 20e-6
#: The environment variable with the path of the record.
RECORD = "STEPS_RECORD"
_PR_SET_TIMERSLACK = 29


def take_step(rows: int) -> None:
    """Sleep as long as a step of so many rows takes."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # else each sleep is 50 µs longer
    time.sleep(STEP_S + ROW_S * rows)


class State:
    def __init__(self, length: int, sent: float) -> None:
        self.left, self.sent, self.is_new = length, sent, True

    def next(self) -> Any:
        self.left -= 1
        response = {"left": np.array([self.left], np.int32)}
        return response if self.left > 0 else Last(response)


class Stepped:
    """A request gets ``n`` responses. ``sent`` is the client's monotonic clock at that time."""

    def __init__(self) -> None:
        #: Start, end, active requests and new requests of each step.
        self._steps: list[tuple[float, float, int, int]] = []
        #: Of requests with ``sent``: that time, the start of their first step, and their release.
        self._joins: list[tuple[float, float]] = []
        self._releases: list[tuple[float, float]] = []

    def admit(self, request: Any) -> State:
        sent = request.get("sent")
        return State(int(request["n"][0]), 0.0 if sent is None else float(sent[0]))

    def step(self, active: Sequence[State]) -> list[Any]:
        start, new = time.monotonic(), 0
        for one in active:
            if one.is_new:
                one.is_new, new = False, new + 1
                if one.sent:
                    self._joins.append((one.sent, start))
        take_step(len(active))
        results = [one.next() for one in active]
        self._steps.append((start, time.monotonic(), len(active), new))
        return results

    def release(self, state: State) -> None:
        if state.sent:
            self._releases.append((state.sent, time.monotonic()))

    def close(self) -> None:
        record = {"steps": self._steps, "joins": self._joins, "releases": self._releases}
        if path := os.environ.get(RECORD):
            Path(path).write_text(json.dumps(record))


def static(requests: Sequence[Any]) -> Iterator[list[Any]]:
    """The same for a batch, which ends with its longest request."""
    states = [State(int(one["n"][0, 0]), 0.0) for one in requests]
    while any(one.left > 0 for one in states):
        take_step(len(states))
        yield [_row(one) if one.left > 0 else None for one in states]


def _row(state: State) -> dict[str, Any]:
    state.left -= 1
    return {"left": np.array([[state.left]], np.int32)}


def bare_loop(lengths: Sequence[int], active: int, seconds: float) -> float:
    """Return the responses a second of the same steps without a server; requests follow at once."""
    waiting = iter(list(lengths) * 1000)
    states = [State(next(waiting), 0.0) for _ in range(active)]
    began, responses = time.monotonic(), 0
    while (took := time.monotonic() - began) < seconds:
        take_step(len(states))
        results = [one.next() for one in states]
        responses += len(results)
        states = [
            State(next(waiting), 0.0) if type(result) is Last else one
            for one, result in zip(states, results, strict=True)
        ]
    return responses / took
