"""One call to a server, how it may fail, and the protocol of a connection that makes calls. No I/O."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Failure(NamedTuple):
    """Why a call failed. ``kind`` is counted; ``text`` is what the server said, of the first such call."""

    kind: str
    text: str


TIMED_OUT = Failure("timeout", "no answer in the time that --timeout gives")
LOST = Failure("connection lost", "the connection ended before the answer")


class ProtocolBroken(Exception):
    """What the server sent cannot be read."""


class TimedCall:
    """One request and what came back, in seconds of the client's clock. Latencies count from ``due_s``, not
    ``sent_s``, so that a client or server that falls behind hides nothing. ``stream`` is 0 for HTTP/1.1.
    """

    __slots__ = ("due_s", "first_s", "last_s", "place", "request", "responses", "sent_s", "stream")

    def __init__(self, request: int, due_s: float, sent_s: float) -> None:
        self.request = request
        self.due_s = due_s
        self.sent_s = sent_s
        self.first_s = self.last_s = 0.0
        self.responses = 0
        self.stream = 0
        self.place: CallProtocol | None = None


class CallSink(Protocol):
    """Receives the responses and the ends of calls."""

    def responded(self, call: TimedCall, now: float) -> None:
        """One response of a call has come whole."""

    def ended(self, call: TimedCall, failure: Failure | None, now: float) -> None:
        """A call is over: without a ``failure`` it was answered."""


class CallProtocol(Protocol):
    """The calls of one connection; received bytes and times go in, bytes to be sent go to ``out``."""

    out: bytearray

    @property
    def room(self) -> bool:
        """Whether one more call can be begun now."""

    @property
    def usable(self) -> bool:
        """Whether calls may still be begun at all; if not, the connection is replaced when it is idle."""

    @property
    def in_flight(self) -> int:
        """The number of calls that have not ended."""

    def opened(self) -> None:
        """Take note that the connection is established."""

    def begin(self, call: TimedCall) -> None:
        """Send the request of a call; only where there is ``room``."""

    def take(self, data: bytes, now: float) -> None:
        """Take received bytes; ProtocolBroken: they cannot be read, and neither can what follows."""

    def cancel(self, call: TimedCall) -> bool:
        """Forget a call without telling the sink; False where the connection has to be closed for it."""

    def lost(self, failure: Failure, now: float) -> None:
        """End all calls, as the connection has ended."""
