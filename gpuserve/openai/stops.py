"""Stop sequences: a text ends before the first of them. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence


class Stops:
    """The stop sequences of a request as one automaton (Aho and Corasick, 1975), which every answer of the
    request shares. A state is the longest end of the text that begins a sequence.
    """

    __slots__ = ("_depths", "_fallbacks", "_first", "_found", "_next")

    def __init__(self, sequences: Sequence[str]) -> None:
        #: By state: the state after each character, the characters of the state, the state of its longest
        #: shorter end, and the length of the longest sequence with which it ends.
        self._next: list[dict[str, int]] = [{}]
        self._depths, self._fallbacks, self._found = [0], [0], [0]
        for sequence in sequences:
            self._add(sequence)
        self._fall_back()
        #: What a sequence begins with. The state is 0 until one of these comes.
        self._first = re.compile("[" + re.escape("".join(self._next[0])) + "]") if sequences else None

    def search(self, text: str, start: int, state: int) -> tuple[int, int]:
        """Go on at ``start`` in this state. Return where the sequence begins that is complete first, of those
        that end together the longest, or -1; and the state then.
        """
        if self._first is None:
            return -1, 0
        at, end = start, len(text)
        while at < end:
            if not state:
                match = self._first.search(text, at)
                if match is None:
                    break
                at = match.start()
            character = text[at]
            while state and character not in self._next[state]:
                state = self._fallbacks[state]
            state = self._next[state].get(character, 0)
            at += 1
            if self._found[state]:
                return at - self._found[state], state
        return -1, state

    def begun_in(self, state: int) -> int:
        """Return how many characters at the end of the text may begin a sequence."""
        return self._depths[state]

    def _add(self, sequence: str) -> None:
        state = 0
        for depth, character in enumerate(sequence, start=1):
            state = self._next[state].setdefault(character, len(self._next))
            if state == len(self._next):
                self._next.append({})
                self._depths.append(depth)
                self._fallbacks.append(0)
                self._found.append(0)
        self._found[state] = len(sequence)

    def _fall_back(self) -> None:
        """Find the fallback of each state, shorter states first."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            self._found[state] = self._found[state] or self._found[self._fallbacks[state]]
            for character, after in self._next[state].items():
                fallback = self._fallbacks[state]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fallbacks[fallback]
                self._fallbacks[after] = self._next[fallback].get(character, 0)
                waiting.append(after)


class StopText:
    """A text that comes in pieces. What could be the beginning of a stop sequence is held back until that is
    known; it does not matter how the text is cut into pieces. ``found``: a sequence came, and nothing of it
    or after it leaves. The time is linear in the text.
    """

    __slots__ = ("_held", "_state", "_stops", "found")

    def __init__(self, stops: Stops) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Return what may leave, now that this piece has come."""
        held = self._held
        text = held + text
        begin, self._state = self._stops.search(text, len(held), self._state)
        if begin >= 0:
            self.found = True
            self._held = ""
            return text[:begin]
        kept = len(text) - self._stops.begun_in(self._state)
        self._held = text[kept:]
        return text[:kept]

    def rest(self) -> str:
        """Return what is still held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
