"""How an HTTP/2 connection takes leave (RFC 9113, 6.8), so that no request is lost on its way, and when it is
given up. Pure: times and sizes come in.

::

             announce                      the client echoes the PING, or is late
    STAYING ──────────► ANNOUNCED ─────────────────────────────────────────────► LAST
             GOAWAY without a last stream,                GOAWAY with the last
             and a PING behind it                         stream that was opened

The client opens no stream once it has read the first GOAWAY, and it has when the PING comes back: what it
opened before is there by then.
"""

from __future__ import annotations

import enum
from typing import Final

from gpuserve.core.states import StepTable
from gpuserve.front.exchange.watch import Watch
from gpuserve.front.server.http2 import frames as h2
from gpuserve.front.server.http2.frames import ErrorCode, FrameType

#: A client that does not echo the PING is not waited for longer.
ECHO_TIMEOUT_S: Final = 1.0
#: Without a byte being taken by the client's end.
SENDING_S: Final = 60.0
#: The same, after everything is said; then what was not taken will not be.
LAST_WORDS_S: Final = 1.0
#: After everything is said, for a client that takes it but does not go.
LINGER_S: Final = 30.0
#: Without a byte of the answers that its windows hold up: a client may be long at work on what it has.
WINDOW_S: Final = 300.0
#: What is read of a client that goes on after everything is said.
IGNORED_NBYTES: Final = 4 << 20
_PAYLOAD: Final = b"last one"


class Leave(enum.Enum):
    """How far a connection is with taking leave."""

    STAYING = "streams are taken"
    ANNOUNCED = "streams are taken, and the client was told that they will not be"
    LAST = "no stream is taken"


_LEAVES: Final = StepTable(
    "an HTTP/2 connection",
    {Leave.STAYING: {Leave.ANNOUNCED}, Leave.ANNOUNCED: {Leave.LAST}, Leave.LAST: ()},
)


class Leaving:
    """The leave of one connection: the frames that it takes, in their order."""

    __slots__ = ("_promised_id", "_stage", "_watch")

    def __init__(self) -> None:
        self._stage = Leave.STAYING
        self._promised_id = h2.STREAM_MASK
        self._watch = Watch()

    @property
    def staying(self) -> bool:
        return self._stage is Leave.STAYING

    def announce(self) -> bytes:
        self._enter(Leave.ANNOUNCED)
        return h2.goaway(h2.STREAM_MASK, ErrorCode.NO_ERROR) + h2.frame(FrameType.PING, 0, 0, _PAYLOAD)

    def is_echo(self, payload: bytes) -> bool:
        """Whether an acknowledged PING says that the client has read them."""
        return self._stage is Leave.ANNOUNCED and payload == _PAYLOAD

    def is_late(self, now: float) -> bool:
        """Whether the client has had long enough to."""
        unchanged_s = self._watch.unchanged_s(self._stage, now)
        return self._stage is Leave.ANNOUNCED and unchanged_s > ECHO_TIMEOUT_S

    def promise(self, last_id: int) -> bytes:
        """The frame that says which streams are served: none after this one."""
        self._enter(Leave.LAST)
        self._promised_id = last_id
        return h2.goaway(last_id, ErrorCode.NO_ERROR)

    def last_id(self, opened_id: int) -> int:
        """The last stream to be named where the connection fails: no later one than was promised."""
        return min(opened_id, self._promised_id)

    def _enter(self, stage: Leave) -> None:
        self._stage = _LEAVES.step(self._stage, stage)


class Ending:
    """Says when one connection is to be given up: what it takes too long over, or sends too much of."""

    __slots__ = ("_held", "_ignored_nbytes", "_over", "_sending")

    def __init__(self) -> None:
        self._sending = Watch()
        self._over = Watch()
        self._held = Watch()
        self._ignored_nbytes = 0

    def is_late(self, now: float, unsent_nbytes: int, *, over: bool) -> bool:
        """Whether the connection is to be given up. ``over``: everything is said."""
        stuck_s = self._sending.unchanged_s((unsent_nbytes, over), now)
        over_s = self._over.unchanged_s(over, now)
        if over:
            return stuck_s > LAST_WORDS_S or over_s > LINGER_S
        return unsent_nbytes > 0 and stuck_s > SENDING_S

    def is_too_much(self, nbytes: int) -> bool:
        """Whether the client goes on, by so many bytes more, although everything is said."""
        self._ignored_nbytes += nbytes
        return self._ignored_nbytes > IGNORED_NBYTES

    def is_stuck(self, now: float, held_nbytes: int) -> bool:
        """Whether so many bytes of answers wait for the client's windows, and have for too long."""
        stuck_s = self._held.unchanged_s(held_nbytes, now)
        return held_nbytes > 0 and stuck_s > WINDOW_S
