"""How an HTTP/2 connection takes leave (RFC 9113, 6.8), so that no request is lost on its way. Pure.

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

from gpuserve.front.server import http2_frames as h2
from gpuserve.front.server.http1_timeouts import Watch
from gpuserve.front.server.http2_frames import ErrorCode, FrameType

#: A client that does not echo the PING is not waited for longer.
ECHO_TIMEOUT_S: Final = 1.0
_PAYLOAD: Final = b"last one"


class Stage(enum.Enum):
    """How far the leave is."""

    STAYING = "streams are taken"
    ANNOUNCED = "streams are taken, and the client was told that they will not be"
    LAST = "no stream is taken"


TRANSITIONS: Final[dict[Stage, frozenset[Stage]]] = {
    Stage.STAYING: frozenset({Stage.ANNOUNCED}),
    Stage.ANNOUNCED: frozenset({Stage.LAST}),
    Stage.LAST: frozenset(),
}


class Leaving:
    """The leave of one connection: the frames that it takes, in their order."""

    __slots__ = ("_promised_id", "_stage", "_watch")

    def __init__(self) -> None:
        self._stage = Stage.STAYING
        self._promised_id = h2.STREAM_MASK
        self._watch = Watch()

    @property
    def staying(self) -> bool:
        """Whether it has not begun."""
        return self._stage is Stage.STAYING

    def announce(self) -> bytes:
        """The frames that begin it."""
        self._enter(Stage.ANNOUNCED)
        return h2.goaway(h2.STREAM_MASK, ErrorCode.NO_ERROR) + h2.frame(FrameType.PING, 0, 0, _PAYLOAD)

    def is_echo(self, payload: bytes) -> bool:
        """Whether an acknowledged PING says that the client has read them."""
        return self._stage is Stage.ANNOUNCED and payload == _PAYLOAD

    def is_late(self, now: float) -> bool:
        """Whether the client has had long enough to."""
        unchanged_s = self._watch.unchanged_s(self._stage, now)
        return self._stage is Stage.ANNOUNCED and unchanged_s > ECHO_TIMEOUT_S

    def promise(self, last_id: int) -> bytes:
        """The frame that says which streams are served: none after this one."""
        self._enter(Stage.LAST)
        self._promised_id = last_id
        return h2.goaway(last_id, ErrorCode.NO_ERROR)

    def last_id(self, opened_id: int) -> int:
        """The last stream to be named where the connection fails: no later one than was promised."""
        return min(opened_id, self._promised_id)

    def _enter(self, stage: Stage) -> None:
        if stage not in TRANSITIONS[self._stage]:
            raise RuntimeError(f"an HTTP/2 connection that is {self._stage.name} cannot be {stage.name}")
        self._stage = stage
