"""How long an HTTP/2 connection may take over its end, or over what was sent to it, and how much it may
still send. Pure: times and sizes come in.
"""

from __future__ import annotations

from typing import Final

from gpuserve.front.server.http1_timeouts import Watch

#: Without a byte being taken by the client's end.
SENDING_S: Final = 60.0
#: The same, after everything is said; then what was not taken will not be.
LAST_WORDS_S: Final = 1.0
#: After everything is said, for a client that takes it but does not go.
LINGER_S: Final = 30.0
#: Without a byte of the answers that its windows hold up: a client may be long at work on what it has.
WINDOW_S: Final = 300.0
#: What is read of a client that goes on after everything is said.
IGNORED_NBYTES: Final = 4 << 20


class Ending:
    """Watches one connection."""

    __slots__ = ("_held", "_ignored_nbytes", "_over", "_sending")

    def __init__(self) -> None:
        self._sending = Watch()
        self._over = Watch()
        self._held = Watch()
        self._ignored_nbytes = 0

    def is_late(self, now: float, unsent_nbytes: int, *, over: bool) -> bool:
        """Whether the connection is to be given up. ``over``: everything is said."""
        stuck_s = self._sending.unchanged_s((unsent_nbytes, over), now)
        over_s = self._over.unchanged_s(over, now)
        if over:
            return stuck_s > LAST_WORDS_S or over_s > LINGER_S
        return unsent_nbytes > 0 and stuck_s > SENDING_S

    def is_too_much(self, nbytes: int) -> bool:
        """Whether the client goes on, by so many bytes more, although everything is said."""
        self._ignored_nbytes += nbytes
        return self._ignored_nbytes > IGNORED_NBYTES

    def is_stuck(self, now: float, held_nbytes: int) -> bool:
        """Whether so many bytes of answers wait for the client's windows, and have for too long."""
        stuck_s = self._held.unchanged_s(held_nbytes, now)
        return held_nbytes > 0 and stuck_s > WINDOW_S
