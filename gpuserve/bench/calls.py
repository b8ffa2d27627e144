"""One call to a server, how it failed, and what a connection tells of its calls.

The two protocols of a connection, ``http2_calls`` and ``http1_calls``, are ``Calls``. No socket, no clock.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Failure(NamedTuple):
    """Why a call failed. ``kind`` is counted; ``text`` is what the server said, of the first such call."""

    kind: str
    text: str


TIMED_OUT = Failure("timeout", "no answer in the time that --timeout gives")
LOST = Failure("connection lost", "the connection ended before the answer")


class Call:
    """One request and what came back, with the times of the client's clock in seconds.

    ``due_s`` is when it was to be sent, ``sent_s`` when it was; all latencies count from ``due_s``, so that
    a client or a server that falls behind does not hide what its users would wait.
    """

    __slots__ = ("due_s", "first_s", "last_s", "place", "request", "responses", "sent_s")

    def __init__(self, request: int, due_s: float, sent_s: float) -> None:
        self.request = request
        self.due_s = due_s
        self.sent_s = sent_s
        self.first_s = self.last_s = 0.0
        self.responses = 0
        self.place: Calls | None = None


class Sink(Protocol):
    """Who is told what became of calls."""

    def responded(self, call: Call, now: float) -> None:
        """One response of a call has come whole."""

    def ended(self, call: Call, failure: Failure | None, now: float) -> None:
        """Nothing more will come."""


class Calls(Protocol):
    """The calls of one connection. Bytes and times go in, bytes come out of ``out``."""

    out: bytearray

    @property
    def room(self) -> bool:
        """Whether one more call can be begun now."""

    @property
    def usable(self) -> bool:
        """Whether calls may still be begun at all; if not, the connection is replaced when it is idle."""

    @property
    def in_flight(self) -> int:
        """Calls without their end."""

    def opened(self) -> None:
        """The connection is there."""

    def begin(self, call: Call) -> None:
        """Send a request."""

    def take(self, data: bytes, now: float) -> None:
        """What was received.

        Raises:
            ProtocolBroken: it cannot be read, and neither can what follows.
        """

    def cancel(self, call: Call) -> bool:
        """Forget a call without telling the sink; False where the connection has to be closed for it."""

    def lost(self, failure: Failure, now: float) -> None:
        """The connection has ended; so have its calls."""


class ProtocolBroken(Exception):
    """What the server sent cannot be read."""
