"""For how long something about a connection has been the same, or whether it moves fast enough. Pure."""

from __future__ import annotations


class Watch:
    """Notes since when what it is shown has not changed."""

    __slots__ = ("_seen", "_since")

    def __init__(self) -> None:
        self._seen: object = None
        self._since = 0.0

    def unchanged_s(self, seen: object, now: float) -> float:
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since


class Pace:
    """Judges whether what is waited for comes at a least rate, over one grace after the other."""

    __slots__ = ("_moved", "_since")

    def __init__(self) -> None:
        self._since: float | None = None
        self._moved = 0

    def is_slow(self, now: float, moved: int | None, grace_s: float, rate: float) -> bool:
        """Whether less than ``rate`` a second of the sum ``moved`` (None: idle) came since a grace ago."""
        since = self._since
        if moved is not None and since is not None and now - since < grace_s:
            return False
        slow = moved is not None and since is not None and moved - self._moved < rate * (now - since)
        self._since, self._moved = (None, 0) if moved is None else (now, moved)
        return slow
