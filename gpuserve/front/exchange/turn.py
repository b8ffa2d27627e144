"""What connections do in one turn of the loop: how much of it those clients may take, all together, that have
much to say, and that what is written leaves at its end. What is left of what clients said waits for the turns
that follow, one connection after the other; meanwhile others are heard.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

#: What one read takes at most. One buffer serves every connection, since what is read is used up in the call.
READ_NBYTES: Final = 256 << 10
#: And while many wait, each of which keeps what was read.
CROWDED_READ_NBYTES: Final = 16 << 10
#: So many are many.
_CROWD: Final = 256
#: So many of those that were only stopped in reading read on in one turn.
_READERS: Final = 16
#: A small request takes a tenth of a millisecond, and some tens of them come in one read.
TURN_S: Final = 0.004
#: While somebody waits turns are shorter: who asks for little then needs several of them.
PRESSED_TURN_S: Final = 0.001


class Listener(Protocol):
    """A connection that is heard in turns."""

    def flush(self) -> None:
        """Send what was written in this turn. Must not raise."""

    def go_on(self) -> None:
        """Take what is kept, up to the end of the turn, and read on. It may wait again. Must not raise."""


class Turn:
    """One for each loop, whose ``call_soon`` and ``call_later`` it has. It begins when it is first asked for.
    What cannot be parted, as a large header block, may take longer; then who waits rests for as long.
    """

    __slots__ = (
        *("_call_later", "_call_soon", "_clock", "_crowded_buffer", "_ends_at", "_full_buffer"),
        *("_is_due", "_readers", "_rests_until", "_unsent", "_waiting", "buffer"),
    )

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        call_later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call_soon = call_soon
        self._call_later = call_later
        self._clock = clock
        self._ends_at: float | None = None
        self._rests_until = 0.0
        #: Whether the next turn will be told.
        self._is_due = False
        #: Who has written something.
        self._unsent: list[Listener] = []
        self._waiting: deque[Listener] = deque()
        self._readers: deque[Listener] = deque()
        self._full_buffer = memoryview(bytearray(READ_NBYTES))
        self._crowded_buffer = self._full_buffer[:CROWDED_READ_NBYTES]
        #: What the next read goes to.
        self.buffer = self._full_buffer

    def flush_soon(self, listener: Listener) -> None:
        """Have what it writes leave when all who are heard in this turn have been: one callback for all."""
        if not self._unsent:
            self._call_soon(self._flush)
        self._unsent.append(listener)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        for one in unsent:
            one.flush()

    def is_over(self) -> bool:
        now = self._clock()
        if self._ends_at is None:
            self._ends_at = now + (PRESSED_TURN_S if self._waiting or self._readers else TURN_S)
            if not self._is_due:
                self._is_due = True
                self._call_soon(self._on_next)
        return now >= self._ends_at

    def put_off(self, listener: Listener) -> None:
        """Have it go on with what it keeps in a later turn, after those before it. The turn is over."""
        self._waiting.append(listener)
        if len(self._waiting) >= _CROWD:
            self.buffer = self._crowded_buffer

    def stop_reading(self, listener: Listener) -> None:
        """The same for one that keeps nothing: it does not wait for those who take long. The turn is over."""
        self._readers.append(listener)

    def _on_next(self) -> None:
        """Another turn has begun: as many go on as there is time for, and at least one."""
        self._ends_at, self._is_due = None, False
        if self._readers:
            self.is_over()  # which has this called again
        for _ in range(min(len(self._readers), _READERS)):
            self._readers.popleft().go_on()
        now = self._clock()
        if self._waiting and now < self._rests_until:
            self._ends_at = now
            if not self._is_due:
                self._is_due = True
                self._call_later(self._rests_until - now, self._on_next)
            return
        self._hear_waiting()
        if len(self._waiting) < _CROWD:
            self.buffer = self._full_buffer

    def _hear_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            if self.is_over():
                break
            self._waiting.popleft().go_on()
        now = self._clock()
        if self._ends_at is not None and now > self._ends_at:
            self._rests_until = now + (now - self._ends_at)
