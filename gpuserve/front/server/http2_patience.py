"""How much of what costs a server more than its client, one connection may do. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from gpuserve.front.server.http2_frames import ConnectionFailed, ErrorCode

#: As many as a connection has streams: a client may give all of them up at once.
BURST: Final = 4096
#: A client whose deadlines pass all the time resets this many streams a second.
PER_S: Final = 1000.0


class Patience:
    """Counts resets, errors, and frames without a use: rapid resets and floods end a connection here."""

    __slots__ = ("_clock", "_left", "_since")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: float = BURST
        self._since = clock()

    def spend(self, n: float = 1) -> None:
        """So many more of them.

        Raises:
            ConnectionFailed: they are too many.
        """
        self._left -= n
        if self._left < 0:
            now = self._clock()
            self._left = min(BURST, self._left + (now - self._since) * PER_S)
            self._since = now
            if self._left < 0:
                raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many resets or useless frames")
