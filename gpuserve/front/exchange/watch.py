"""For how long something about a connection has been the same. Both protocols judge by it what takes too
long. Pure: times come in.
"""

from __future__ import annotations


class Watch:
    """Notes since when what it is shown has not changed."""

    __slots__ = ("_seen", "_since")

    def __init__(self) -> None:
        self._seen: object = None
        self._since = 0.0

    def unchanged_s(self, seen: object, now: float) -> float:
        """Seconds since what is seen was last something else."""
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since
