"""Stepped callables. INT32 in and out: a request says how many numbers it wants, and gets 1, 2, 3, …

With ``record`` the callable appends a line to this file for each admission, release and poison, with the
process id, so that a test sees what happened in processes that are dead.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from gpuserve import Last, Later, ModelCallError, Tensor, current_model
from gpuserve.typed import Int32, Shape, sample

#: Numbers with another meaning: ``step`` raises, kills its worker, or does not return.
RAISES, KILLS, HANGS = 1001, 1002, 1003
#: ``admit`` raises.
REFUSED = 1004
#: The third response of ``Buffered`` has a dtype that cannot be cast.
WIDE_AT = 1005


@sample
def twice(n: Annotated[Int32, Shape(1)]) -> Annotated[Int32, Shape(1)]:
    return 2 * n


class Count:
    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.done = self.place = self.number = 0


class Counting:
    """A callable that counts for each of its requests. ``whole``: only the last number is sent."""

    inputs = (Tensor(name="n", dtype=np.int32, shape=(1,)),)
    outputs = (Tensor(name="value", dtype=np.int32, shape=(-1,)),)
    max_active = 4

    def __init__(
        self, step_s: float = 0.001, room: int = 64, record: str = "", width: int = 1, whole: bool = False
    ) -> None:
        self._step_s = step_s
        self._room = room
        self._path = record
        self._width = width
        self._whole = whole
        self._active = 0

    def admit(self, request: Any) -> Count:
        wanted = int(request["n"][0])
        if wanted == REFUSED:
            raise ModelCallError("INVALID_ARGUMENT", "not this number")
        if self._active >= self._room:
            raise Later
        self._active += 1
        self._record("admit", wanted)
        return Count(wanted)

    def step(self, active: Sequence[Count]) -> list[Any]:
        time.sleep(self._step_s)
        wanted = {one.wanted for one in active}
        for cause in (RAISES, KILLS, HANGS):
            if cause in wanted:
                self._poison(cause)
        return [self._next(one) for one in active]

    def release(self, state: Count) -> None:
        self._active -= 1
        self._record("release", state.wanted)

    def _next(self, state: Count) -> Any:
        state.done += 1
        is_last = state.done >= state.wanted
        if self._whole and not is_last:
            return None
        response = {"value": np.full(self._width, state.done, np.int32)}
        return Last(response) if is_last else response

    def _poison(self, cause: int) -> None:
        self._record("poison", cause)
        if cause == KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        if cause == HANGS:
            time.sleep(3600)
        raise ValueError("poison")

    def _record(self, what: str, wanted: int) -> None:
        if self._path:
            with open(self._path, "a") as file:
                file.write(f"{what} {wanted} {os.getpid()}\n")


class Awaiting(Counting):
    """The same as coroutines, with a call of the model ``counter`` in ``admit``."""

    async def admit(self, request: Any) -> Count:  # type: ignore[override]
        for model, count in (("counter", 1), ("chained-counter", 2)):
            given = current_model().stream_async(model, {"n": np.array([1], np.int32)})
            assert len([one async for one in given]) == count
        return super().admit(request)

    async def step(self, active: Sequence[Count]) -> list[Any]:  # type: ignore[override]
        return super().step(active)


class Buffered(Counting):
    """The same with one buffer for all responses, which each step overwrites. A request for ``WIDE_AT`` gets
    a wrong array as its third response.
    """

    max_active = 64

    def __init__(self, busy_s: float = 0.0, step_s: float = 0.005) -> None:
        super().__init__(step_s)
        self._busy_s = busy_s
        self._buffer = np.zeros(64, np.int32)

    def step(self, active: Sequence[Count]) -> list[Any]:
        self._buffer[:] = -1
        ends_at = time.monotonic() + self._busy_s
        while time.monotonic() < ends_at:  # keeps the interpreter's lock
            pass
        return super().step(active)

    def _next(self, state: Count) -> Any:
        state.done += 1
        place = self._buffer[state.place : state.place + 1]
        place[:] = state.done
        response = {"value": np.zeros(1) if (state.wanted, state.done) == (WIDE_AT, 3) else place}
        return Last(response) if state.done >= state.wanted else response

    def admit(self, request: Any) -> Count:
        count = super().admit(request)
        count.place = self._active - 1
        return count


class Numbered(Counting):
    """The same; the record has the number of each request in its worker in place of the wanted count."""

    max_active = 32

    def admit(self, request: Any) -> Count:
        path, self._path = self._path, ""
        count = super().admit(request)
        self._path = path
        self._admitted = count.number = getattr(self, "_admitted", 0) + 1
        self._record("admit", count.number)
        return count

    def release(self, state: Count) -> None:
        self._active -= 1
        self._record("release", state.number)
