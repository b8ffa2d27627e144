"""A small event loop, which runs beside asyncio in a user's program, and channels to child processes."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import select
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

from gpuserve.core.turn_limit import report_turn, turn_limit_s
from gpuserve_worker.protocol import datagram
from gpuserve_worker.protocol.wire import MessageCodec

Callback: TypeAlias = Callable[[], object]
#: Receives an unexpected exception of a callback. If it raises the exception again, ``run()`` ends with it.
OnError: TypeAlias = Callable[[Exception], None]

#: A descriptor whose callback failed is not watched for this time, because it may stay readable.
REST_S: Final = 1.0
#: No client waits for a turn of this loop, which may start several processes.
_TURN_LIMIT_FACTOR: Final = 3
#: The longest timeout of one ``select``; epoll refuses 25 days.
_LONGEST_S: Final = 3600.0


class Reactor:
    """An event loop. Only ``call_soon_threadsafe`` may be called from other threads and signal handlers."""

    def __init__(self, on_error: OnError | None = None) -> None:
        self._on_error = on_error
        self._turn_limit_s = _TURN_LIMIT_FACTOR * (turn_limit_s() or math.inf)
        #: Descriptors that are not watched for a moment because their callbacks failed.
        self._resting: dict[int, Callback] = {}
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callback]] = []
        self._order = itertools.count()
        self._calls: deque[Callback] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._read_wake_fd)
        self._stopped = False
        # Reentrant, because a signal handler may interrupt the call that holds it.
        self._wake_lock = threading.RLock()

    def watch(self, fd: int, callback: Callback) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)
        self._resting.pop(fd, None)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor; an unknown descriptor is ignored."""
        self._resting.pop(fd, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def call_later(self, delay_s: float, callback: Callback) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), callback))

    def call_soon_threadsafe(self, callback: Callback) -> bool:
        """Call back in the reactor's thread as soon as possible. Return False if the reactor is closed."""
        # Without the lock close() could free the number for another file between the test and the write.
        with self._wake_lock:
            if self._wake_fd < 0:
                return False
            self._calls.append(callback)
            os.eventfd_write(self._wake_fd, 1)
            return True

    def run(self) -> None:
        with self._woken_by_signals():
            while not self._stopped:
                while self._calls and not self._stopped:
                    self._has_run(self._calls.popleft())
                now = time.monotonic()
                while self._timers and self._timers[0][0] <= now and not self._stopped:
                    self._has_run(heapq.heappop(self._timers)[2])
                for key, _ in self._selector.select(self._timeout_s()):
                    # An earlier callback of this round may have unwatched the descriptor.
                    is_watched = not self._stopped and self._selector.get_map().get(key.fd) == key
                    if is_watched and not self._has_run(key.data):
                        self._rest(key)

    @contextlib.contextmanager
    def _woken_by_signals(self) -> Iterator[None]:
        """Wake the loop by signals. Otherwise a signal that comes after the last instruction, before
        ``select`` sleeps, would wait for the next event: Python runs signal handlers between instructions.
        """
        if threading.current_thread() is not threading.main_thread():  # only the main thread runs handlers
            yield
            return
        readable, writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.watch(readable, lambda: os.read(readable, 4096))
        before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            self.unwatch(readable)
            os.close(readable)
            os.close(writable)

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        """Close the reactor's descriptors, and make the calls that other threads have requested."""
        with self._wake_lock:
            self._selector.close()
            os.close(self._wake_fd)
            self._wake_fd = -1
        while self._calls:
            self._calls.popleft()()

    def _timeout_s(self) -> float | None:
        if self._calls or self._stopped:
            return 0.0
        if not self._timers:
            return None
        return min(_LONGEST_S, max(0.0, self._timers[0][0] - time.monotonic()))

    def _has_run(self, callback: Callback) -> bool:
        """Run a callback. Return False if it raised and ``on_error`` lets the loop go on."""
        began_s = time.thread_time()
        try:
            callback()
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)
            return False
        if (took_s := time.thread_time() - began_s) > self._turn_limit_s:
            report_turn(took_s, self._turn_limit_s, repr(callback))
        return True

    def _rest(self, key: selectors.SelectorKey) -> None:
        """Watch a descriptor again after a moment, unless its owner has unwatched it meanwhile."""
        if self._selector.get_map().get(key.fd) != key:
            return
        self.unwatch(key.fd)
        self._resting[key.fd] = key.data

        def watch_again() -> None:
            callback = self._resting.get(key.fd)
            if callback is not None and callback is key.data:
                self.watch(key.fd, callback)

        self.call_later(REST_S, watch_again)

    def _read_wake_fd(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)


#: A live child that does not read for this time, while its socket is full, counts as broken.
SEND_TIMEOUT_S: Final = 10.0


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets. They have no name, so nothing else can connect to them."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end of a SEQPACKET pair. Sending to a dead peer is no error: its pidfd reports its death."""

    def __init__(
        self, sock: socket.socket, vocabulary: MessageCodec, send_timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        self._sock = sock
        self._vocabulary = vocabulary
        self._buffer = datagram.receive_buffer()
        sock.settimeout(send_timeout_s)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message; the caller keeps the descriptors. Raise ``TimeoutError`` if the peer hangs."""
        try:
            datagram.send(self._sock, self._vocabulary.encode(message), fds)
        except BlockingIOError:  # with a timeout of 0
            raise TimeoutError("the peer does not read") from None
        except ConnectionError:
            pass

    def offer(self, message: Any) -> bool:
        """Send a message if there is room for it at this moment. Return whether it was sent."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        if not poll.poll(0):
            return False
        self.send(message)
        return True

    def pending(self) -> bool:
        poll = select.poll()  # select() cannot watch descriptors from 1024 on
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def receive(self) -> Any | None:
        """Return the next message, None at the end. Raise ``WireError`` or ``OSError`` if it is malformed."""
        received = self.receive_with_fds()
        if received is None:
            return None
        message, fds = received
        datagram.close_all(fds)
        return message

    def receive_with_fds(self) -> tuple[Any, list[int]] | None:
        """Receive a message with its descriptors, which the caller owns; otherwise like ``receive``."""
        try:
            data, fds = datagram.receive(self._sock, self._buffer)
        except ConnectionError:
            return None
        try:
            if data:
                return self._vocabulary.decode(data), fds
        except BaseException:
            datagram.close_all(fds)
            raise
        datagram.close_all(fds)
        return None

    def close(self) -> None:
        self._sock.close()
