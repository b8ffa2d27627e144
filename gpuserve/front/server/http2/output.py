"""What one connection sends: the client's windows and settings, and whose turn it is. No frame is read."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from gpuserve.front.exchange.connection import Connection
from gpuserve.front.server.http2.frames import (
    DEFAULT_FRAME_NBYTES,
    DEFAULT_WINDOW,
    MAX_WINDOW,
    ConnectionFailed,
    ErrorCode,
    StreamFailed,
)
from gpuserve.front.server.http2.hpack import Encoder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuserve.front.server.http2.stream import Stream

#: What one stream sends before it is the next one's turn.
TURN_NBYTES: Final = 1 << 20
#: A client that has taken nothing for so long does not read.
STUCK_S: Final = 0.5
#: Up to here a part is copied, and leaves with what else is sent in the turn: a system call costs more.
_COPIED_NBYTES: Final = 1024
#: A larger frame would hold the others of a connection up.
_MOST_FRAME_NBYTES: Final = 256 << 10


class Output:
    """The sending half of a connection. ``window`` is what may still be sent on it. A stream that its own
    window holds up is in no queue: whatever a client does to its windows costs no look at the streams that
    cannot move. A window that grows by nothing, or to more than there can be, raises ``ConnectionFailed`` or
    ``StreamFailed``.
    """

    __slots__ = (
        "_ends",
        "_turns",
        "_way",
        "encoder",
        "frame_nbytes",
        "held_nbytes",
        "moved_at",
        "sent_nbytes",
        "stream_window",
        "window",
    )

    def __init__(self, way: Connection) -> None:
        self.window = DEFAULT_WINDOW
        #: What a new stream begins with.
        self.stream_window = DEFAULT_WINDOW
        self.frame_nbytes = DEFAULT_FRAME_NBYTES
        self.encoder = Encoder()
        #: What of bodies is not sent, and is, and when the last of it was.
        self.held_nbytes = 0
        self.sent_nbytes = 0
        self.moved_at = 0.0
        self._way = way
        #: Streams with a part of a body that their windows let through; the first is the next one.
        self._turns: OrderedDict[Stream, None] = OrderedDict()
        #: Streams with nothing left but their end, which needs no window.
        self._ends: OrderedDict[Stream, None] = OrderedDict()

    def flush(self, stream: Stream) -> None:
        if stream.through:
            self._ends[stream] = None
        elif stream.unsent and stream.window > 0:
            self._turns[stream] = None
        self.flush_all()

    def flush_all(self) -> None:
        """Send all that the windows let through, stream by stream."""
        while not self._way.full:
            if self._ends:
                stream, _ = self._ends.popitem(last=False)
            elif self._turns and self.window > 0:
                stream, _ = self._turns.popitem(last=False)
            else:
                return
            self._send(stream)
            if stream.unsent and stream.window > 0:
                self._turns[stream] = None

    def hold(self, nbytes: int) -> None:
        """So much more is to be sent of a stream."""
        if not self.held_nbytes:
            self.moved_at = time.monotonic()
        self._change_held(nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Whether so much more may wait for the client: always while it reads, else up to a limit of what
        waits for all clients together.
        """
        way = self._way
        if not self.held_nbytes or way.admission.held_nbytes + nbytes <= way.limits.max_unsent_nbytes:
            return True
        return time.monotonic() - self.moved_at < STUCK_S

    def _change_held(self, nbytes: int) -> None:
        self.held_nbytes += nbytes
        self._way.admission.held_nbytes += nbytes

    def drop(self, stream: Stream) -> None:
        if stream.unsent_nbytes:
            self._change_held(-stream.unsent_nbytes)
        self._turns.pop(stream, None)
        self._ends.pop(stream, None)

    def grow(self, nbytes: int) -> None:
        if not nbytes:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0")
        self.window += nbytes
        if self.window > MAX_WINDOW:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is over 2^31-1")

    def grow_stream(self, stream: Stream, nbytes: int) -> None:
        if not nbytes:
            raise StreamFailed(stream.id, ErrorCode.PROTOCOL_ERROR)
        stream.window += nbytes
        if stream.window > MAX_WINDOW:
            raise StreamFailed(stream.id, ErrorCode.FLOW_CONTROL_ERROR)
        if stream.unsent:
            self.flush(stream)

    def set_stream_window(self, nbytes: int, streams: Iterable[Stream]) -> int:
        """What streams begin with; those that are there get the difference. How many may send then."""
        difference = nbytes - self.stream_window
        n_turns = 0
        self.stream_window = nbytes
        for stream in streams:
            stream.window += difference
            if stream.window > MAX_WINDOW:
                raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "a stream's window is over 2^31-1")
            if stream.unsent and stream.window > 0:
                self._turns[stream] = None
                n_turns += 1
        return n_turns

    def set_frame_size(self, nbytes: int) -> None:
        self.frame_nbytes = min(nbytes, _MOST_FRAME_NBYTES)

    def _send(self, stream: Stream) -> None:
        before = stream.unsent_nbytes
        frames = stream.frames(min(self.window, TURN_NBYTES), self.frame_nbytes)
        nbytes = before - stream.unsent_nbytes
        if nbytes:
            self.window -= nbytes
            self._change_held(-nbytes)
            self.sent_nbytes += nbytes
            self.moved_at = time.monotonic()
        release = stream.take_release() if stream.through else None
        if nbytes > _COPIED_NBYTES:
            self._way.write_pieces(frames, release)
        else:
            if frames:
                self._way.write(b"".join(frames))
            if release is not None:
                release()
        if stream.through:
            stream.on_ended()
        stream.wake()
