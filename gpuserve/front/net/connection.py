"""One socket of the server and its share of the event loop. The first bytes decide on its protocol.

``LoopBudget`` limits how long busy connections keep the event loop in one iteration, and writes the output of
an iteration at its end. Further input waits for later iterations, so that other clients are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, cast

from gpuserve.front.net.admission import Admission, ChangeTimer, MinimumRate, source_of
from gpuserve.front.net.exchange import ConnectionEndpoints, ConnectionProtocol, Piece, Release

logger = logging.getLogger(__name__)

#: The maximum size of one read. One buffer serves all connections: input is processed during the call.
READ_NBYTES: Final = 256 << 10
#: The same while many connections wait, each of which buffers its input.
CROWDED_READ_NBYTES: Final = 16 << 10
#: The number of waiting connections that counts as many.
_CROWD: Final = 256
#: Connections without buffered input that resume reading in one iteration.
_READERS: Final = 16
#: The budget of one iteration. A small request takes 0.1 ms, and some tens of requests arrive in one read.
BUDGET_S: Final = 0.002
#: The budget while connections wait: a client with few requests then needs several iterations.
CROWDED_BUDGET_S: Final = 0.0006


class BudgetUser(Protocol):
    """A connection whose input is processed within the budget."""

    def flush(self) -> None:
        """Send the output of this iteration. Must not raise."""

    def resume(self) -> None:
        """Process buffered input within the budget, and resume reading. May defer again; must not raise."""


class LoopBudget:
    """The time for input processing in one iteration of an event loop, from the first check on. Work that
    cannot be divided, as a large header block, may exceed it; then waiting connections rest for as long.
    """

    __slots__ = (
        *("_call_later", "_call_soon", "_clock", "_crowded_buffer", "_spent_at", "_full_buffer"),
        *("_is_scheduled", "_readers", "_rests_until", "_unsent", "_waiting", "buffer"),
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
        self._spent_at: float | None = None
        self._rests_until = 0.0
        #: Whether ``_on_next_iteration`` is scheduled.
        self._is_scheduled = False
        #: Connections with output of this iteration.
        self._unsent: list[BudgetUser] = []
        self._waiting: deque[BudgetUser] = deque()
        self._readers: deque[BudgetUser] = deque()
        self._full_buffer = memoryview(bytearray(READ_NBYTES))
        self._crowded_buffer = self._full_buffer[:CROWDED_READ_NBYTES]
        #: The buffer for the next read.
        self.buffer = self._full_buffer

    def flush_later(self, listener: BudgetUser) -> None:
        """Flush a connection's output after all input of this iteration."""
        if not self._unsent:
            self._call_soon(self._flush)
        self._unsent.append(listener)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        for one in unsent:
            one.flush()

    def is_spent(self) -> bool:
        now = self._clock()
        if self._spent_at is None:
            self._spent_at = now + (CROWDED_BUDGET_S if self._waiting or self._readers else BUDGET_S)
            if not self._is_scheduled:
                self._is_scheduled = True
                self._call_soon(self._on_next_iteration)
        return now >= self._spent_at

    def defer(self, listener: BudgetUser) -> None:
        """Resume a connection with buffered input in a later iteration, after those before it."""
        self._waiting.append(listener)
        if len(self._waiting) >= _CROWD:
            self.buffer = self._crowded_buffer

    def defer_reading(self, listener: BudgetUser) -> None:
        """Resume a connection without buffered input in a later iteration, without waiting for others."""
        self._readers.append(listener)

    def _on_next_iteration(self) -> None:
        self._spent_at, self._is_scheduled = None, False
        if self._readers:
            self.is_spent()  # schedules this method for the next iteration
        for _ in range(min(len(self._readers), _READERS)):
            self._readers.popleft().resume()
        now = self._clock()
        if self._waiting and now < self._rests_until:
            self._spent_at = now
            if not self._is_scheduled:
                self._is_scheduled = True
                self._call_later(self._rests_until - now, self._on_next_iteration)
            return
        self._resume_waiting()
        if len(self._waiting) < _CROWD:
            self.buffer = self._full_buffer

    def _resume_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            if self.is_spent():
                break
            self._waiting.popleft().resume()
        now = self._clock()
        if self._spent_at is not None and now > self._spent_at:
            self._rests_until = now + (now - self._spent_at)


# ---- the connection ------------------------------------------------------------------------------

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: Below this size input is copied to ``bytes``, which are cheaper to parse than a view.
_SMALL_NBYTES: Final = 32 << 10
#: After a read of this size the budget is checked. A shorter read has emptied the socket.
_TIMED_NBYTES: Final = 4 << 10
#: Unsent bytes above which a protocol stops producing output.
HIGH_WATER_NBYTES: Final = 256 << 10
#: The most bytes that are encrypted in one iteration: some milliseconds.
_ENCRYPTED_NBYTES: Final = 256 << 10
#: The number of small writes that triggers a flush before the end of the iteration.
_MANY_WRITES: Final = 1024
#: The time limit for a connection without any input.
FIRST_BYTES_TIMEOUT_S: Final = 30.0
#: Seconds in which the first bytes of a new connection are waited for while the server stops.
FRESH_S: Final = 0.5
#: The time limit for requests in flight when a connection has reached its maximum age.
AGE_GRACE_S: Final = 3600.0

#: The endpoints of a connection before its transport is known.
_NO_ENDPOINTS: Final = ConnectionEndpoints(None, ("", None), tls=False)

ProtocolFactory: TypeAlias = "Callable[[Connection], ConnectionProtocol]"


class Connection(asyncio.BufferedProtocol):
    """A connection and its protocol, as asyncio, the protocol and the server each use it.
    Args:
        http1: Makes the HTTP/1 protocol of the connection.
        http2: Makes the HTTP/2 protocol of the connection.
        budget: The loop budget that all connections of a loop share.
        members: All open connections, this one included while open.
        loop: The event loop.
        age_s: Seconds after which the connection accepts no more requests.
        admission: Decides whether the connection is accepted, and has its limits.
        release_place: Counts the end of a connection that was admitted already.
    """

    def __init__(
        self,
        http1: ProtocolFactory,
        http2: ProtocolFactory,
        budget: LoopBudget,
        members: set[Connection],
        loop: asyncio.AbstractEventLoop,
        age_s: float = math.inf,
        admission: Admission | None = None,
        release_place: Callable[[], None] | None = None,
    ) -> None:
        self.admission = admission or Admission()
        self.limits = self.admission.limits
        self.endpoints = _NO_ENDPOINTS
        #: Whether output should pause because much is unsent; ``ConnectionProtocol.drained`` ends the pause.
        self.full = False
        #: The bytes that the client has not read, and for how long they have not moved, as of the last check.
        self.backlog_nbytes = 0
        self.stuck_s = 0.0
        #: The incomplete requests as of the last ``check``; one with a long head counts as several.
        self.n_incomplete = 0
        #: The timers of ``check``, made by the first check: many connections end before.
        self._timers: tuple[ChangeTimer, MinimumRate] | None = None
        self._http1 = http1
        self._http2 = http2
        self._budget = budget
        self._members = members
        self._release_place = release_place
        self._loop = loop
        self._protocol: ConnectionProtocol | None = None
        self._first_bytes = b""
        self._opened_at = loop.time()
        self._retires_at = self._opened_at + age_s
        #: Whether the protocol wants input, whether buffered input is deferred, and whether the socket is
        #: read as a result.
        self._wants_input = True
        self._deferred = False
        self._reading = True
        self._retiring = False
        self._announced = False
        self._shutting_down = False
        #: Whether nothing more is written: the write side is closed, or the client is gone.
        self._write_closed = False
        #: Whether the client's kernel had all output of a closed TLS connection at the last look.
        self._is_delivered = False
        self._lost = False
        #: Output of this iteration of the loop.
        self._out: list[bytes] = []
        self._releases: list[Release] = []
        #: Output that waits to be encrypted, and whether ``_encrypt`` is scheduled.
        self._unencrypted: deque[Piece] = deque()
        self._is_encrypting = False
        self._is_writable = True
        self._transport = cast("asyncio.Transport", None)

    # ---- for asyncio --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(HIGH_WATER_NBYTES, 0)
        self.endpoints = _endpoints_of(transport)
        address = self.endpoints.client and self.endpoints.client[0]
        fd = transport.get_extra_info("socket").fileno()
        if self._release_place is None and self.admission.admit(address, fd):
            self._release_place = partial(self.admission.release, address)
        if self._release_place is None:
            self.abort()
        else:
            self._members.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._budget.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data: Piece = self._budget.buffer[:nbytes]
        if nbytes < _SMALL_NBYTES:
            data = bytes(data)
        try:
            if self._protocol is None:
                self._detect_protocol(bytes(data))
            else:
                self._protocol.feed(data)
            if len(self._out) > _MANY_WRITES:
                self.flush()  # a socket may be read many times in one iteration
            if nbytes >= _TIMED_NBYTES and not self._deferred and self._budget.is_spent():
                self._wait(self._budget.defer_reading)  # uvloop would read up to 32 times
        except Exception:
            self._abort_on_defect()

    def resume(self) -> None:
        """Continue with deferred input."""
        self._deferred = False
        if self._protocol is not None:
            try:
                self._protocol.resume()
            except Exception:
                self._abort_on_defect()
        self._drop_protocol_if_lost()
        self._steer_reading()

    def eof_received(self) -> bool:
        return False  # a client that closes its write side counts as gone

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._members:
            self._members.remove(self)
            if self._release_place is not None:
                self._release_place()
        self._write_closed = self._lost = True
        self._unencrypted.clear()
        self._call_releases()
        if self._protocol is not None:
            self._protocol.lost()
        self._drop_protocol_if_lost()

    def pause_writing(self) -> None:
        self.full, self._is_writable = True, False

    def resume_writing(self) -> None:
        self._is_writable = True
        if self._unencrypted:
            self._encrypt_soon()
            return
        self.full = False
        if self._releases:
            self._call_releases()
            self._transport.set_write_buffer_limits(HIGH_WATER_NBYTES, 0)
        if self._protocol is not None:
            self._protocol.drained()

    # ---- for the protocol ---------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send data. All writes of one loop iteration leave with one system call."""
        out = self._out
        if not out:
            self._budget.flush_later(self)
        out.append(data)

    def flush(self) -> None:
        """Pass the output of this iteration to the kernel."""
        out = self._out
        if out:
            self._out = []
            try:
                # The client may have gone in this iteration.
                if not (self._write_closed or self._transport.is_closing()):
                    if self._unencrypted:
                        self._unencrypted.extend(out)
                    else:
                        self._transport.write(out[0] if len(out) == 1 else b"".join(out))
            except Exception:  # must not affect the connections flushed next
                self._abort_on_defect()

    def write_pieces(self, pieces: Sequence[Piece], release: Release | None) -> None:
        """Send pieces, large ones uncopied. ``release`` is called, perhaps now, once the kernel has these and
        all earlier pieces.
        """
        transport, out = self._transport, self._out
        if out and pieces:  # joined into one system call
            self._out, pieces = [], (*out, *pieces)
        if pieces and not self._write_closed:
            if self.endpoints.tls:
                is_next = not self._unencrypted
                self._unencrypted.extend(pieces)
                if is_next:
                    self._encrypt()
            else:
                transport.writelines(pieces)
        if release is None:
            return
        if self._unencrypted:
            self._releases.append(release)
        elif self._lost or self.endpoints.tls or not transport.get_write_buffer_size():
            release()
        else:
            self._releases.append(release)
            # With a low-water mark of 0 ``resume_writing`` is called when nothing is unsent any more.
            transport.set_write_buffer_limits(0, 0)

    def _encrypt(self) -> None:
        """Encrypt one part of the output. The next part follows later, once the client has read enough."""
        unencrypted, part, room_nbytes = self._unencrypted, [], _ENCRYPTED_NBYTES
        while unencrypted and room_nbytes:
            piece = unencrypted.popleft()
            if len(piece) > room_nbytes:
                unencrypted.appendleft(memoryview(piece)[room_nbytes:])
                piece = memoryview(piece)[:room_nbytes]
            part.append(piece)
            room_nbytes -= len(piece)
        self._transport.write(b"".join(part))
        if unencrypted:
            self.full = True
            if self._is_writable:
                self._encrypt_soon()

    def _encrypt_soon(self) -> None:
        if not self._is_encrypting:
            self._is_encrypting = True
            self._loop.call_soon(self._encrypt_more)

    def _encrypt_more(self) -> None:
        self._is_encrypting = False
        if not self._unencrypted:  # the client has gone
            return
        try:
            self._encrypt()
            if self._unencrypted:
                return
            if self._write_closed:
                self._transport.close()
            if self._is_writable:
                self.resume_writing()
        except Exception:
            self._abort_on_defect()

    def defers(self) -> bool:
        """Return whether the rest of the input is to be buffered until ``resume`` is called."""
        if not self._budget.is_spent():
            return False
        if not self._deferred:
            self._wait(self._budget.defer)
        return True

    def _wait(self, for_turn: Callable[[BudgetUser], None]) -> None:
        self._deferred = True
        for_turn(self)
        self._steer_reading()

    def pause_reading(self) -> None:
        """Stop reading until ``resume_reading``. Both may be called repeatedly."""
        self._wants_input = False
        self._steer_reading()

    def resume_reading(self) -> None:
        self._wants_input = True
        self._steer_reading()

    def _steer_reading(self) -> None:
        reading = self._wants_input and not self._deferred
        if reading is not self._reading and not self._transport.is_closing():
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    @property
    def unsent_nbytes(self) -> int:
        """The written bytes that the kernel does not have yet."""
        if self._lost:
            return 0
        return self._transport.get_write_buffer_size() + sum(map(len, (*self._out, *self._unencrypted)))

    def end_writing(self) -> None:
        """Write nothing more, and close the write side once all is sent. TLS cannot do that in asyncio."""
        self.flush()
        if not self._write_closed and self._transport.can_write_eof() and not self._transport.is_closing():
            self._write_closed = True
            with contextlib.suppress(OSError):  # the client has gone in this iteration
                self._transport.write_eof()

    def close(self) -> None:
        """Close the connection once all is sent."""
        self.flush()
        self._write_closed = True
        if self._unencrypted:  # the transport is closed after the last part
            self.pause_reading()
        else:
            self._transport.close()

    def _n_unacknowledged(self) -> int:
        """Return the number of sent bytes that the client's kernel has not acknowledged."""
        sock = self._transport.get_extra_info("socket")  # None: the client has gone in this iteration
        with contextlib.suppress(OSError):
            if sock is not None:
                return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return 0

    # ---- for the server -----------------------------------------------------------------------

    def announce(self) -> None:
        """Ask the client to send no more requests. Requests in flight are served."""
        self._retiring = True
        if self._protocol is not None and not self._announced:
            self._announced = True
            self._protocol.announce()

    @property
    def aware(self) -> bool:
        """True if the client has read the announcement, or will with its next response."""
        return not self._retiring or (self._protocol is not None and self._protocol.aware)

    @property
    def held(self) -> Sequence[str]:
        """The paths of the requests in flight of a client that was asked to send no more."""
        return self._protocol.unanswered if self._announced and self._protocol is not None else ()

    def shut_down(self) -> None:
        """Finish the requests in flight and close. Called until closed: first bytes may be in flight."""
        again, self._shutting_down = self._shutting_down, True
        if self._protocol is not None:
            self._protocol.shut_down()
        elif again and self._loop.time() - self._opened_at > FRESH_S:
            self.close()

    def abort(self) -> None:
        self._transport.abort()

    def check(self, now: float) -> None:
        """Close the connection if something is overdue, or the connection is too old."""
        if self.endpoints.tls and self._transport.is_closing():
            # The client need not answer our close_notify, and an idle one does not read it. Two checks must
            # agree, because the transport may have had more until the event loop turned.
            was_delivered, self._is_delivered = self._is_delivered, not self._n_unacknowledged()
            if was_delivered and self._is_delivered:
                self.abort()
                return
        if now >= self._retires_at:
            self.announce()
            if now >= self._retires_at + AGE_GRACE_S:
                self.abort()
        if self._protocol is not None:
            self._protocol.check(now)
            self._check_answers(self._protocol, now)
        elif now - self._opened_at > (
            self.limits.head_timeout_s if self._first_bytes else FIRST_BYTES_TIMEOUT_S
        ):
            self.count_late("head" if self._first_bytes else "idle")
            self.close()

    def _check_answers(self, protocol: ConnectionProtocol, now: float) -> None:
        """Close a connection whose client reads its responses too slowly."""
        sent_nbytes, backlog_nbytes = protocol.sent
        self.backlog_nbytes = backlog_nbytes
        stuck_timer, answer_rate = self._timers = self._timers or (ChangeTimer(), MinimumRate())
        self.stuck_s = stuck_timer.unchanged_s((sent_nbytes, backlog_nbytes > 0), now)
        awaited = sent_nbytes if backlog_nbytes else None
        limits = self.limits
        if answer_rate.is_slow(now, awaited, limits.answer_grace_s, limits.min_answer_rate):
            self.count_late("answer")
            self.abort()

    def count_late(self, reason: str) -> None:
        """Count the client as ended by a timeout, for this reason."""
        self.admission.count_late(reason, self.endpoints.client)

    def _detect_protocol(self, data: bytes) -> None:
        data = self._first_bytes + data
        start = data[: len(PREFACE)]
        if start == PREFACE[: len(start)] and len(start) < len(PREFACE):
            self._first_bytes = data
            return
        is_http2 = start == PREFACE
        self._protocol = (self._http2 if is_http2 else self._http1)(self)
        self._first_bytes = b""
        if self._retiring and not is_http2:  # the first response can announce the shutdown
            self.announce()
        self._protocol.feed(data[len(PREFACE) :] if is_http2 else data)
        if self._retiring and is_http2:  # after the server's first frame, which must be SETTINGS
            self.announce()

    def _drop_protocol_if_lost(self) -> None:
        """Break the reference cycle with the protocol, which refers to this connection."""
        if self._lost and not self._deferred:
            self._protocol = None

    def _abort_on_defect(self) -> None:
        logger.exception("closed a connection because of a defect of the server")
        self._transport.abort()

    def _call_releases(self) -> None:
        releases, self._releases = self._releases, []
        for release in releases:
            release()


def _endpoints_of(transport: asyncio.BaseTransport) -> ConnectionEndpoints:
    tls = transport.get_extra_info("ssl_object") is not None
    sock = transport.get_extra_info("socket")
    peer: Any = transport.get_extra_info("peername")
    name: Any = transport.get_extra_info("sockname")
    if not isinstance(name, tuple):  # a unix socket
        return ConnectionEndpoints(None, (str(name), None), tls, sock)
    client = peer and (peer[0], peer[1])
    return ConnectionEndpoints(client, (name[0], name[1]), tls, sock, source_of(client and client[0]))
