"""The load of one process: the time of each call, and counts of the results. A closed loop keeps a number of
calls in flight; an open loop sends calls at given times. Pure: the clock is an argument.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np


class LoadPhase(enum.Enum):
    """The phases of a level; every level passes through all of them in this order."""

    IDLE = "idle"
    WARMING = "warming"  #: calls are sent and not counted
    MEASURING = "measuring"
    DRAINING = "draining"  #: nothing is sent; answers to sent calls may still arrive


class ConnectionPool:
    """The connections with room for calls, used in turn."""

    def __init__(self) -> None:
        self._ready: deque[CallProtocol] = deque()
        self._known: set[CallProtocol] = set()  # the connections in ``_ready``
        #: Connections that may have something in ``out``.
        self.to_flush: set[CallProtocol] = set()

    def add(self, connection: CallProtocol) -> None:
        if connection not in self._known:
            self._known.add(connection)
            self._ready.append(connection)

    def remove(self, connection: CallProtocol) -> None:
        if connection in self._known:
            self._known.remove(connection)
            self._ready.remove(connection)

    def next_connection(self) -> CallProtocol | None:
        """Return the next connection with room, or None."""
        ready = self._ready
        while ready:
            found = ready[0]
            if found.has_room:
                ready.rotate(-1)
                return found
            self._known.remove(ready.popleft())  # the end of a call adds the connection again
        return None


class LoadGenerator:
    """The sender and counter of a process's calls, with ``requests`` distinct requests in turn."""

    def __init__(self, requests: int, timeout_s: float, max_in_flight: int) -> None:
        self.pool = ConnectionPool()
        self.samples = CallSamples()
        self.phase = LoadPhase.IDLE
        self._requests = requests
        self._next_request = 0
        self._timeout_s = timeout_s
        self._max_in_flight = max_in_flight
        self._in_flight: dict[TimedCall, None] = {}
        #: Due times of calls that wait for a connection.
        self._backlog: deque[float] = deque()
        self._due: Iterator[float] | None = None
        #: Time of the next call for ``release``; None in a closed loop.
        self.next_due_s: float | None = None
        self._measured_from_s = float("inf")

    @property
    def unanswered(self) -> int:
        """The number of calls that are due and have no answer."""
        return len(self._in_flight) + len(self._backlog)

    def start_closed(self, concurrency: int, now: float) -> None:
        """Keep ``concurrency`` calls in flight from now on."""
        self._start_level()
        for _ in range(concurrency):
            self._send(now, now)

    def start_open(self, due_times: Iterator[float], now: float) -> None:
        """Send a call at each of these times, in seconds from now."""
        self._start_level()
        self._due = (now + due_s for due_s in due_times)
        self.next_due_s = next(self._due)

    def measure(self, now: float) -> None:
        """End the warm-up: count the calls that are due from now on."""
        self.phase = LoadPhase.MEASURING
        self._measured_from_s = now
        self.samples = CallSamples()

    def drain(self) -> None:
        """Stop the schedule of calls; calls that wait for a connection still wait."""
        self.phase = LoadPhase.DRAINING
        if self._due is None:  # the calls of a closed loop have no due time of their own
            self._backlog.clear()
        self._due = self.next_due_s = None

    def finish(self, now: float) -> list[CallProtocol]:
        """Cancel unanswered calls, count how long they have waited, and return the connections to close."""
        to_close = []
        for call in list(self._in_flight):
            if call.due_s >= self._measured_from_s:
                self.samples.waited.append(now - call.due_s)
            to_close += self._cancel(call)
        for due_s in self._backlog:
            if due_s >= self._measured_from_s:
                self.samples.waited.append(now - due_s)
        self._backlog.clear()
        self._measured_from_s = float("inf")
        self.phase = LoadPhase.IDLE
        return to_close

    def release(self, now: float) -> None:
        """Send the calls that are due by now."""
        while self._due is not None and self.next_due_s is not None and self.next_due_s <= now:
            self._send(self.next_due_s, now)
            self.next_due_s = next(self._due, None)

    def expire(self, now: float) -> list[CallProtocol]:
        """Fail the calls past their time limit, and return the connections to close."""
        to_close = []
        for call in list(self._in_flight):
            if call.sent_s + self._timeout_s > now:
                break  # the dict is in the order of sending
            to_close += self._cancel(call)
            self._count_end(call, TIMED_OUT, now)
            self._send_next(now)
        return to_close

    def add_connection(self, connection: CallProtocol, now: float) -> None:
        self.pool.add(connection)
        self._send_backlog(now)

    def count_connect_failure(self, text: str) -> None:
        if self.phase is not LoadPhase.IDLE:
            self.samples.add_failure(Failure("cannot connect", text))

    def on_response(self, call: TimedCall, now: float) -> None:
        if not call.responses:
            call.first_s = now
        elif call.due_s >= self._measured_from_s:
            self.samples.gaps.append(now - call.last_s)
        call.responses += 1
        call.last_s = now
        if self.phase is LoadPhase.MEASURING:
            self.samples.responses += 1

    def on_end(self, call: TimedCall, failure: Failure | None, now: float) -> None:
        """Count the end of a call, and send the next call of a closed loop."""
        self._in_flight.pop(call, None)
        if call.connection is not None:
            self.pool.add(call.connection)
        self._count_end(call, failure, now)
        self._send_next(now)

    def _start_level(self) -> None:
        self.phase = LoadPhase.WARMING
        self._due = self.next_due_s = None
        self.samples = CallSamples()

    def _count_end(self, call: TimedCall, failure: Failure | None, now: float) -> None:
        counts = call.due_s >= self._measured_from_s
        in_time = self.phase is LoadPhase.MEASURING
        if failure is not None:
            if counts or in_time:
                self.samples.add_failure(failure)
        elif counts:
            self.samples.add_answer(call, now, in_time=in_time)
        elif in_time:  # a call of the warm-up counts in the throughput, without a latency
            self.samples.completed += 1

    def _send_next(self, now: float) -> None:
        if self._due is None and self.phase in {LoadPhase.WARMING, LoadPhase.MEASURING}:
            self._send(now, now)
        elif self._backlog:
            self._send_backlog(now)

    def _send_backlog(self, now: float) -> None:
        while self._backlog and self._start_call(self._backlog[0], now):
            self._backlog.popleft()

    def _send(self, due_s: float, now: float) -> None:
        if self._backlog or not self._start_call(due_s, now):
            self._backlog.append(due_s)
            if self._due is None:
                self._send_backlog(now)

    def _start_call(self, due_s: float, now: float) -> bool:
        if len(self._in_flight) >= self._max_in_flight:
            return False
        connection = self.pool.next_connection()
        if connection is None:
            return False
        call = TimedCall(self._next_request, due_s, now)
        call.connection = connection
        self._next_request = (self._next_request + 1) % self._requests
        self._in_flight[call] = None
        connection.start_call(call)
        self.pool.to_flush.add(connection)
        if due_s >= self._measured_from_s:
            self.samples.lags.append(now - due_s)
        return True

    def _cancel(self, call: TimedCall) -> list[CallProtocol]:
        """Cancel a call; return its connection if that must be closed."""
        del self._in_flight[call]
        connection = call.connection
        if connection is None or connection.cancel(call):
            if connection is not None:
                self.pool.to_flush.add(connection)
                self.pool.add(connection)
            return []
        return [connection]


class Failure(NamedTuple):
    """The reason of a failed call, counted by ``kind``; ``text`` is the server's message for the first."""

    kind: str
    text: str


TIMED_OUT = Failure("timeout", "no answer in the time that --timeout gives")
CONNECTION_LOST = Failure("connection lost", "the connection ended before the answer")


class ProtocolError(Exception):
    """The server sent bytes that cannot be parsed."""


class TimedCall:
    """A request and its answer, in seconds of the client's clock. Latencies count from ``due_s``, not
    ``sent_s``, so that a slow client or server hides no delay. ``stream`` is 0 for HTTP/1.1.
    """

    __slots__ = ("connection", "due_s", "first_s", "last_s", "request", "responses", "sent_s", "stream")

    def __init__(self, request: int, due_s: float, sent_s: float) -> None:
        self.request = request
        self.due_s = due_s
        self.sent_s = sent_s
        self.first_s = self.last_s = 0.0
        self.responses = 0
        self.stream = 0
        self.connection: CallProtocol | None = None


class CallSink(Protocol):
    """A receiver of responses and ends of calls."""

    def on_response(self, call: TimedCall, now: float) -> None:
        """Handle a complete response of a call."""

    def on_end(self, call: TimedCall, failure: Failure | None, now: float) -> None:
        """Handle the end of a call, which succeeded if ``failure`` is None."""


class CallProtocol(Protocol):
    """The calls of one connection: received bytes and times go in, bytes to send go to ``out``."""

    out: bytearray

    @property
    def has_room(self) -> bool:
        """True if the connection has room for another call."""

    @property
    def is_usable(self) -> bool:
        """False if the connection takes no more calls and is replaced when it is idle."""

    @property
    def in_flight(self) -> int:
        """The number of calls that have not ended."""

    def on_connected(self) -> None:
        """Prepare the first bytes of an established connection."""

    def start_call(self, call: TimedCall) -> None:
        """Send the request of a call; requires ``has_room``."""

    def receive(self, data: bytes, now: float) -> None:
        """Process received bytes; raise ProtocolError if they and all later bytes cannot be parsed."""

    def cancel(self, call: TimedCall) -> bool:
        """Drop a call without calling the sink; return False if the connection must be closed."""

    def fail_all(self, failure: Failure, now: float) -> None:
        """End all calls, because the connection has ended."""


#: Distinct durations in nanoseconds, and how often each occurred.
CountedDurations = tuple[list[int], list[int]]
NO_DURATIONS: CountedDurations = ([], [])


@dataclass(frozen=True)
class CallCounts:
    """The counts of one process over an interval, in which ``completed`` calls and ``responses`` arrived.

    The durations are of answered calls, whenever these were sent: ``latencies`` from the due time to the end
    of a call, ``first`` to its first response, ``gaps`` between two responses, ``lags`` from the due time to
    the sending. ``waited``: calls without an answer at the end of the measurement.
    """

    duration_s: float
    cpu_s: float
    sent: int
    completed: int
    responses: int
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    latencies: CountedDurations = NO_DURATIONS
    first: CountedDurations = NO_DURATIONS
    gaps: CountedDurations = NO_DURATIONS
    lags: CountedDurations = NO_DURATIONS
    waited: CountedDurations = NO_DURATIONS


@dataclass
class CallSamples:
    """The samples of calls until ``pop_counts``. Each sent call has a lag."""

    completed: int = 0
    responses: int = 0
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def add_answer(self, call: TimedCall, now: float, *, in_time: bool) -> None:
        """Count a successful call; ``in_time`` means before the end of the measurement."""
        self.completed += in_time
        self.latencies.append(now - call.due_s)
        if call.responses:
            self.first.append(call.first_s - call.due_s)

    def add_failure(self, failure: Failure) -> None:
        count, text = self.failures.get(failure.kind, (0, failure.text))
        self.failures[failure.kind] = count + 1, text

    def pop_counts(self, duration_s: float, cpu_s: float) -> CallCounts:
        """Return the counts since the last call of this method, and reset them."""
        durations = map(count_durations, (self.latencies, self.first, self.gaps, self.lags, self.waited))
        arrived = self.completed, self.responses, self.failures
        counts = CallCounts(duration_s, cpu_s, len(self.lags), *arrived, *durations)
        vars(self).update(vars(CallSamples()))
        return counts


def count_durations(durations_s: Sequence[float]) -> CountedDurations:
    """Return the distinct durations rounded to three digits, and how often each occurs."""
    if not durations_s:
        return NO_DURATIONS
    ns = np.maximum(np.asarray(durations_s) * 1e9, 1.0)
    unit = 10.0 ** np.maximum(np.floor(np.log10(ns)) - 3, 0)
    values, counts = np.unique((np.rint(ns / unit) * unit).astype(np.int64), return_counts=True)
    return values.tolist(), counts.tolist()
