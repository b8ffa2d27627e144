"""The time between two fronts, as a door sees it: requests wait for the next front, and are refused when none
has come for as long as a model without instances lets its requests wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from gpuserve.core.errors import RequestError, Unavailable

#: The same as the time that requests wait for a model whose instances are all gone.
PATIENCE_S: Final = 5.0


class _Held(NamedTuple):
    resume: Callable[[], None]
    refuse: Callable[[RequestError], None]


class FrontAbsence:
    """Whether a front is there, and what waits until one is. ``is_now`` is False before the first front,
    whose first message nothing precedes.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.is_now = False
        self._patience_s = patience_s
        self._held: list[_Held] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_long = False
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        """Hold requests from now on: the front has ended."""
        self.is_now = True
        self._timer = self._loop.call_later(self._patience_s, self._on_long)

    def hold(self, resume: Callable[[], None], refuse: Callable[[RequestError], None]) -> None:
        """Call ``resume`` when a front is there, or ``refuse`` with the reason; never before this returns."""
        if self._is_long:
            self._loop.call_soon(refuse, _none_comes())
        else:
            self._held.append(_Held(resume, refuse))

    def end(self) -> None:
        """Resume what waits, in the order in which it came, because a front is there."""
        if self._timer is not None:
            self._timer.cancel()
        self.is_now = self._is_long = False
        held, self._held = self._held, []
        for one in held:
            one.resume()

    def _on_long(self) -> None:
        self._is_long = True
        held, self._held = self._held, []
        for one in held:
            one.refuse(_none_comes())


def front_died() -> RequestError:
    """The answer to a request that was in a front that died."""
    return Unavailable("the front process of the server died while it had this request, which may have run")


def _none_comes() -> RequestError:
    return Unavailable("the front process of the server is down, and no other has come in time")
