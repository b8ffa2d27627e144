"""How long an HTTP/1 connection may take over what. Pure: times come in."""

from __future__ import annotations

from typing import Final

#: From the first byte of a head to its last.
HEAD_S: Final = 30.0
#: Between requests.
IDLE_S: Final = 120.0
#: Without a byte of a body that is not complete.
BODY_S: Final = 60.0
#: For the rest of a request that was answered before its end.
DRAIN_S: Final = 30.0
#: A client that sends nothing for so long after its last answer has read it, or never will.
QUIET_S: Final = 2.0
#: Without a byte of the answers being taken.
SENDING_S: Final = 60.0


class Watch:
    """For how long something has been the same."""

    __slots__ = ("_seen", "_since")

    def __init__(self) -> None:
        self._seen: object = None
        self._since = 0.0

    def unchanged_s(self, seen: object, now: float) -> float:
        """Since when it was last seen to be another."""
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since
