"""Which call is sent when: a closed loop keeps so many in flight, an open loop sends at given times. Pure:
the clock is an argument, and the caller sends what the protocols of connections have in ``out``.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator

from gpuserve.bench.calls.call import TIMED_OUT, CallProtocol, Failure, TimedCall
from gpuserve.bench.calls.samples import Samples


class LoadPhase(enum.Enum):
    """The phase of a level; every level goes through all of them, in this order."""

    IDLE = "idle"
    WARMING = "warming"  #: calls are sent and not counted
    MEASURING = "measuring"
    DRAINING = "draining"  #: nothing is sent; what was sent may still be answered


class Pool:
    """The connections that have room for calls, taken in turn."""

    def __init__(self) -> None:
        self._ready: deque[CallProtocol] = deque()
        self._known: set[CallProtocol] = set()  # those in ``_ready``
        #: Connections that may have something in ``out``.
        self.touched: set[CallProtocol] = set()

    def add(self, connection: CallProtocol) -> None:
        if connection not in self._known:
            self._known.add(connection)
            self._ready.append(connection)

    def remove(self, connection: CallProtocol) -> None:
        """Take a connection out, if it is here."""
        if connection in self._known:
            self._known.remove(connection)
            self._ready.remove(connection)

    def place(self) -> CallProtocol | None:
        """The next connection with room; None where there is none."""
        ready = self._ready
        while ready:
            found = ready[0]
            if found.room:
                ready.rotate(-1)
                return found
            self._known.remove(ready.popleft())  # it comes back when a call of it ends
        return None


class LoadGenerator:
    """Begins and counts the calls of one process. ``requests`` different ones are sent in turn."""

    def __init__(self, requests: int, timeout_s: float, max_in_flight: int) -> None:
        self.pool = Pool()
        self.samples = Samples()
        self.phase = LoadPhase.IDLE
        self._requests = requests
        self._next_request = 0
        self._timeout_s = timeout_s
        self._max_in_flight = max_in_flight
        self._in_flight: dict[TimedCall, None] = {}
        #: Due times of calls that wait for a connection.
        self._backlog: deque[float] = deque()
        self._due: Iterator[float] | None = None
        #: When ``release`` has something to do; None in a closed loop.
        self.next_due_s: float | None = None
        self._measured_from_s = float("inf")

    @property
    def unanswered(self) -> int:
        """The number of calls that are due and have no answer."""
        return len(self._in_flight) + len(self._backlog)

    def start_closed(self, concurrency: int, now: float) -> None:
        """Keep ``concurrency`` calls in flight from now on."""
        self._begin_level()
        for _ in range(concurrency):
            self._send(now, now)

    def start_open(self, due_times: Iterator[float], now: float) -> None:
        """Send a call at each of these times, in seconds from now."""
        self._begin_level()
        self._due = (now + due_s for due_s in due_times)
        self.next_due_s = next(self._due)

    def measure(self, now: float) -> None:
        """End the warm-up: calls that are due from now on count."""
        self.phase = LoadPhase.MEASURING
        self._measured_from_s = now
        self.samples = Samples()

    def drain(self) -> None:
        """Make no more calls due; those that wait for a connection still wait."""
        self.phase = LoadPhase.DRAINING
        if self._due is None:  # nobody was to send these at a time of their own
            self._backlog.clear()
        self._due = self.next_due_s = None

    def finish(self, now: float) -> list[CallProtocol]:
        """Give up what is not answered, and count how long it has waited; returns as ``sweep`` does."""
        to_close = []
        for call in list(self._in_flight):
            if call.due_s >= self._measured_from_s:
                self.samples.waited(now - call.due_s)
            to_close += self._give_up(call)
        for due_s in self._backlog:
            if due_s >= self._measured_from_s:
                self.samples.waited(now - due_s)
        self._backlog.clear()
        self._measured_from_s = float("inf")
        self.phase = LoadPhase.IDLE
        return to_close

    def release(self, now: float) -> None:
        """Send the calls that are due by now."""
        while self._due is not None and self.next_due_s is not None and self.next_due_s <= now:
            self._send(self.next_due_s, now)
            self.next_due_s = next(self._due, None)

    def sweep(self, now: float) -> list[CallProtocol]:
        """End the calls whose time is over; returns the connections that have to be closed for it."""
        to_close = []
        for call in list(self._in_flight):
            if call.sent_s + self._timeout_s > now:
                break  # they stand in the order in which they were sent
            to_close += self._give_up(call)
            self._count_end(call, TIMED_OUT, now)
            self._follow(now)
        return to_close

    def connected(self, connection: CallProtocol, now: float) -> None:
        self.pool.add(connection)
        self._send_backlog(now)

    def cannot_connect(self, text: str) -> None:
        if self.phase is not LoadPhase.IDLE:
            self.samples.failed(Failure("cannot connect", text))

    def responded(self, call: TimedCall, now: float) -> None:
        if not call.responses:
            call.first_s = now
        elif call.due_s >= self._measured_from_s:
            self.samples.gap(now - call.last_s)
        call.responses += 1
        call.last_s = now
        if self.phase is LoadPhase.MEASURING:
            self.samples.responded()

    def ended(self, call: TimedCall, failure: Failure | None, now: float) -> None:
        """Count the end of a call; the next one of a closed loop is sent at once."""
        self._in_flight.pop(call, None)
        if call.place is not None:
            self.pool.add(call.place)
        self._count_end(call, failure, now)
        self._follow(now)

    def _begin_level(self) -> None:
        self.phase = LoadPhase.WARMING
        self._due = self.next_due_s = None
        self.samples = Samples()

    def _count_end(self, call: TimedCall, failure: Failure | None, now: float) -> None:
        counts = call.due_s >= self._measured_from_s
        in_time = self.phase is LoadPhase.MEASURING
        if failure is not None:
            if counts or in_time:
                self.samples.failed(failure)
        elif counts:
            self.samples.answered(call, now, in_time=in_time)
        elif in_time:
            self.samples.completed_earlier()

    def _follow(self, now: float) -> None:
        """Send what a call that has ended makes room for."""
        if self._due is None and self.phase in {LoadPhase.WARMING, LoadPhase.MEASURING}:
            self._send(now, now)
        elif self._backlog:
            self._send_backlog(now)

    def _send_backlog(self, now: float) -> None:
        while self._backlog and self._begin(self._backlog[0], now):
            self._backlog.popleft()

    def _send(self, due_s: float, now: float) -> None:
        if self._backlog or not self._begin(due_s, now):
            self._backlog.append(due_s)
            if self._due is None:
                self._send_backlog(now)

    def _begin(self, due_s: float, now: float) -> bool:
        """Returns whether there was a connection for it."""
        if len(self._in_flight) >= self._max_in_flight:
            return False
        place = self.pool.place()
        if place is None:
            return False
        call = TimedCall(self._next_request, due_s, now)
        call.place = place
        self._next_request = (self._next_request + 1) % self._requests
        self._in_flight[call] = None
        place.begin(call)
        self.pool.touched.add(place)
        if due_s >= self._measured_from_s:
            self.samples.sent(now - due_s)
        return True

    def _give_up(self, call: TimedCall) -> list[CallProtocol]:
        """Returns the connection where it has to be closed for that."""
        del self._in_flight[call]
        place = call.place
        if place is None or place.cancel(call):
            if place is not None:
                self.pool.touched.add(place)
                self.pool.add(place)
            return []
        return [place]
