"""Where a text ends before its end: at the first of its stop sequences. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """A text that comes in pieces. What could be the beginning of a stop sequence is held back until that is
    known; it does not matter how the text is cut into pieces. ``found``: a sequence came, and nothing of it
    or after it leaves.
    """

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """What may leave, now that this piece has come."""
        if not self._stops:
            return text
        held = self._held + text
        # The sequence that is complete first; of those that end together the longest.
        ends = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            return held[: min(ends)[1]]
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """What is still held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a sequence, without being all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
