"""One socket of the endpoint's server: bytes in and out of the protocol that the client speaks. Which one is
told by the first bytes. Nothing of either protocol is here but HTTP/2's preface.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, cast

from gpuserve.front.exchange.exchange import Ends, Piece, Release, Spoken
from gpuserve.front.exchange.limits import Admission, source_of
from gpuserve.front.exchange.turn import Listener, Turn
from gpuserve.front.exchange.watch import Pace, Watch

logger = logging.getLogger(__name__)

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: Below this, what was read becomes ``bytes``: cheaper to take apart than a view.
_SMALL_NBYTES: Final = 32 << 10
#: After a read of so much the clock is looked at. Less than that was all that there was.
_TIMED_NBYTES: Final = 4 << 10
#: So much waits to be sent before a protocol is told to make no more.
HIGH_WATER_NBYTES: Final = 256 << 10
#: So many small writes do not wait for the end of the turn.
_MANY_WRITES: Final = 1024
#: A connection that has said nothing is closed.
GREETING_TIMEOUT_S: Final = 30.0
#: What a connection has when its age is over may take so long; then it is closed nevertheless.
AGE_GRACE_S: Final = 3600.0

Speak: TypeAlias = "Callable[[Connection], Spoken]"


class Connection(asyncio.BufferedProtocol):
    """A connection and its protocol, as asyncio, the protocol and the server each see it. ``members`` are all
    that are open, this one while it is; all have one ``turn``. After ``age_s`` seconds it takes no more
    requests. ``admission`` says whether it is taken, and what it may take; ``leave`` gives a place back
    that it has already. It is one object because the three sides share what is to be written, and every small
    request crosses it.
    """

    def __init__(
        self,
        http1: Speak,
        http2: Speak,
        turn: Turn,
        members: set[Connection],
        loop: asyncio.AbstractEventLoop,
        age_s: float = math.inf,
        admission: Admission | None = None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self.admission = admission or Admission()
        self.limits = self.admission.limits
        self.ends = Ends(None, ("", None), tls=False)
        #: So much waits to be sent that no more should be made; ``Spoken.drained`` ends it.
        self.full = False
        #: What waits until the client reads, and for how long that has not moved, as of the last ``check``.
        self.backlog_nbytes = 0
        self.stuck_s = 0.0
        #: How many requests have not come whole, long heads counted as several, as of then.
        self.n_half = 0
        self._stuck_watch = Watch()
        self._answer_pace = Pace()
        self._http1 = http1
        self._http2 = http2
        self._turn = turn
        self._members = members
        self._leave = leave
        self._loop = loop
        self._spoken: Spoken | None = None
        self._greeting = b""
        self._opened_at = loop.time()
        self._retires_at = self._opened_at + age_s
        #: Whether the protocol wants more, whether the rest of what was read waits, and what comes of it.
        self._wanted = True
        self._waits = False
        self._reading = True
        self._retiring = False
        self._announced = False
        self._leaving = False
        #: Nothing more is written: the client was told so, or is gone.
        self._mute = False
        self._lost = False
        #: What is to be written in this turn of the loop.
        self._out: list[bytes] = []
        self._releases: list[Release] = []
        self._transport = cast("asyncio.Transport", None)

    # ---- the loop's side ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(HIGH_WATER_NBYTES, 0)
        self.ends = _ends(transport)
        address = self.ends.client and self.ends.client[0]
        if self._leave is None and self.admission.admit(address, transport.get_extra_info("socket").fileno()):
            self._leave = partial(self.admission.leave, address)
        if self._leave is None:
            self.abort()
        else:
            self._members.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._turn.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data: Piece = self._turn.buffer[:nbytes]
        if nbytes < _SMALL_NBYTES:
            data = bytes(data)
        try:
            if self._spoken is None:
                self._greet(bytes(data))
            else:
                self._spoken.feed(data)
            if len(self._out) > _MANY_WRITES:
                self.flush()  # a socket may be read many times in one turn
            if nbytes >= _TIMED_NBYTES and not self._waits and self._turn.is_over():
                self._wait(self._turn.stop_reading)  # which would go on up to 32 times
        except Exception:
            self._break_down()

    def go_on(self) -> None:
        """The turn has come in which what was put off is heard."""
        self._waits = False
        if self._spoken is not None:
            try:
                self._spoken.go_on()
            except Exception:
                self._break_down()
        self._part()
        self._steer_reading()

    def eof_received(self) -> bool:
        return False  # the client sends no more: it is gone

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._members:
            self._members.remove(self)
            if self._leave is not None:
                self._leave()
        self._mute = self._lost = True
        self._release()
        if self._spoken is not None:
            self._spoken.lost()
        self._part()

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self._releases:
            self._release()
            self._transport.set_write_buffer_limits(HIGH_WATER_NBYTES, 0)
        if self._spoken is not None:
            self._spoken.drained()

    # ---- the protocol's side --------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send; what is written in one turn of the loop leaves with one system call."""
        out = self._out
        if not out:
            self._turn.flush_soon(self)
        out.append(data)

    def flush(self) -> None:
        """Give the kernel what was written."""
        out = self._out
        if out:
            self._out = []
            try:
                # The client may have gone in this very turn.
                if not (self._mute or self._transport.is_closing()):
                    self._transport.write(out[0] if len(out) == 1 else b"".join(out))
            except Exception:  # it must not hit who is flushed after it
                self._break_down()

    def write_pieces(self, pieces: Sequence[Piece], release: Release | None) -> None:
        """Send pieces, large ones uncopied; ``release`` is called once the kernel has all, perhaps now."""
        transport, out = self._transport, self._out
        if out and pieces:  # with one system call
            self._out, pieces = [], (*out, *pieces)
        else:
            self.flush()
        if pieces and not self._mute:
            if self.ends.tls:
                transport.write(b"".join(pieces))
            else:
                transport.writelines(pieces)
        if release is None:
            return
        if self._lost or self.ends.tls or not transport.get_write_buffer_size():
            release()
        else:
            self._releases.append(release)
            # Told when nothing waits any more, not when little does.
            transport.set_write_buffer_limits(0, 0)

    def puts_off(self) -> bool:
        """Whether what is left of what was read is for another turn; then ``go_on`` follows."""
        if not self._turn.is_over():
            return False
        if not self._waits:
            self._wait(self._turn.put_off)
        return True

    def _wait(self, for_turn: Callable[[Listener], None]) -> None:
        self._waits = True
        for_turn(self)
        self._steer_reading()

    def pause_reading(self) -> None:
        """Read no more until ``resume_reading``; both may be called any number of times."""
        self._wanted = False
        self._steer_reading()

    def resume_reading(self) -> None:
        self._wanted = True
        self._steer_reading()

    def _steer_reading(self) -> None:
        reading = self._wanted and not self._waits
        if reading is not self._reading and not self._transport.is_closing():
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    @property
    def unsent_nbytes(self) -> int:
        """How much of what was written is not with the kernel yet."""
        if self._lost:
            return 0
        return self._transport.get_write_buffer_size() + sum(map(len, self._out))

    def end_writing(self) -> None:
        """Write nothing more; the client is told once all is sent, but over TLS, which cannot yet."""
        self.flush()
        if not self._mute and self._transport.can_write_eof() and not self._transport.is_closing():
            self._mute = True
            with contextlib.suppress(OSError):  # the client has gone in this very turn
                self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._mute = True
        self._transport.close()

    # ---- the server's side ----------------------------------------------------------------

    def announce(self) -> None:
        """Have the client told that no more requests are taken; what comes until it has heard of it, is."""
        self._retiring = True
        if self._spoken is not None and not self._announced:
            self._announced = True
            self._spoken.announce()

    @property
    def aware(self) -> bool:
        """Whether the client has heard of it as far as can be known, or is about to by its answer."""
        return not self._announced or (self._spoken is not None and self._spoken.aware)

    @property
    def held(self) -> Sequence[str]:
        """The paths of the requests that it has, where its client was told that it takes no more."""
        return self._spoken.unanswered if self._announced and self._spoken is not None else ()

    def shut_down(self) -> None:
        """Finish what is there and close. Called until it is closed: the first bytes may be on their way."""
        again, self._leaving = self._leaving, True
        if self._spoken is not None:
            self._spoken.shut_down()
        elif again:
            self.close()

    def abort(self) -> None:
        self._transport.abort()

    def check(self, now: float) -> None:
        """Close what takes too long, or is too old."""
        if now >= self._retires_at:
            self.announce()
            if now >= self._retires_at + AGE_GRACE_S:
                self.abort()
        if self._spoken is not None:
            self._spoken.check(now)
            self._check_answers(self._spoken, now)
        elif now - self._opened_at > (self.limits.head_timeout_s if self._greeting else GREETING_TIMEOUT_S):
            self.count_late("head" if self._greeting else "idle")
            self.close()

    def _check_answers(self, spoken: Spoken, now: float) -> None:
        """Close what reads its answers so slowly that they are held for nothing."""
        sent_nbytes, backlog_nbytes = spoken.sent
        self.backlog_nbytes = backlog_nbytes
        self.stuck_s = self._stuck_watch.unchanged_s((sent_nbytes, backlog_nbytes > 0), now)
        awaited = sent_nbytes if backlog_nbytes else None
        limits = self.limits
        if self._answer_pace.is_slow(now, awaited, limits.answer_grace_s, limits.min_answer_rate):
            self.count_late("answer")
            self.abort()

    def count_late(self, reason: str) -> None:
        """Note that the client took too long over this, for which it is left."""
        self.admission.count_late(reason, self.ends.client)

    def _greet(self, data: bytes) -> None:
        data = self._greeting + data
        start = data[: len(PREFACE)]
        if start == PREFACE[: len(start)] and len(start) < len(PREFACE):
            self._greeting = data
            return
        is_http2 = start == PREFACE
        self._spoken = (self._http2 if is_http2 else self._http1)(self)
        self._greeting = b""
        if self._retiring and not is_http2:  # its first answer can say it
            self.announce()
        self._spoken.feed(data[len(PREFACE) :] if is_http2 else data)

    def _part(self) -> None:
        """Leave no cycle to the garbage collector: the protocol refers to this connection."""
        if self._lost and not self._waits:
            self._spoken = None

    def _break_down(self) -> None:
        logger.exception("defect of the server; the connection is closed")
        self._transport.abort()

    def _release(self) -> None:
        releases, self._releases = self._releases, []
        for release in releases:
            release()


def _ends(transport: asyncio.BaseTransport) -> Ends:
    tls = transport.get_extra_info("ssl_object") is not None
    sock = transport.get_extra_info("socket")
    peer: Any = transport.get_extra_info("peername")
    name: Any = transport.get_extra_info("sockname")
    if sock is not None and sock.family == socket.AF_UNIX:
        return Ends(None, (str(name), None), tls, sock)
    client = peer and (peer[0], peer[1])
    return Ends(client, (name[0], name[1]), tls, sock, source_of(client and client[0]))
