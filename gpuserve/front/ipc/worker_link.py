"""The link to one worker: messages in both directions on the event loop. Also the workers by device."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from gpuserve.devices.names import CPU
from gpuserve.front.ipc.worker_memory import Exports, OutputMemory
from gpuserve_worker.memory.segments import SEGMENT_NBYTES
from gpuserve_worker.protocol import datagram, wire
from gpuserve_worker.protocol.datagram import joined

logger = logging.getLogger(__name__)

#: A worker whose link ended is about to die; it is killed if it still lives after this time.
_LINGER_S: Final = 1.0
#: The most datagrams that are read before other work of the event loop runs.
_BURST: Final = 16
#: The retry period of a large message for which no descriptor is free.
_RETRY_S: Final = 0.05
#: More than a worker's socket holds.
_DRAIN_MESSAGES: Final = 4096
#: Exceptions for malformed messages. Fields are as untrusted as tags: user code runs in that process.
_NONSENSE: Final = (wire.WireError, ValueError, TypeError, LookupError)
#: Messages about the worker's output arena.
_SEGMENT_MESSAGES: Final = frozenset({wire.Segment, wire.DropSegment})


class WorkerLink:
    """The link to one worker, with its mapped output arena.

    ``on_messages`` gets the messages of one datagram, and returns whether their effects should be sent before
    the next datagram is read. ``on_down`` is called when the pidfd reports the death: memory that was lent to
    a worker is reused only when the worker cannot touch it any more.
    """

    def __init__(
        self,
        instance: str,
        slots: int,
        sock: socket.socket,
        pidfd: int,
        epoch: int,
        on_messages: Callable[[WorkerLink, Sequence[wire.Message]], bool],
        on_down: Callable[[WorkerLink, str], None],
        pid: int = 0,
        device: str = "",
    ) -> None:
        self.instance = instance
        self.device = device
        self.slots = slots
        self.pid = pid
        self.outputs = OutputMemory()
        self.exports = Exports(self)
        self._loans = itertools.count(1)
        self.attached = False
        #: Called when the link closes, for the owners of memory lent to the worker.
        self.on_close: list[Callable[[WorkerLink], None]] = []
        self._sock = sock
        self._pidfd = pidfd
        self.epoch = epoch
        self._on_messages = on_messages
        self._on_down = on_down
        #: Encoded messages for the next datagram.
        self._posted: list[bytes] = []
        self._posted_nbytes = 0
        self._is_due = False
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._buffer = datagram.receive_buffer()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        #: Nothing more is sent.
        self._broken = False
        self._ended = False
        #: The number of unanswered batches.
        self.in_flight = 0
        #: The number of messages about steps of a stepped callable.
        self.n_steps = 0
        self._reason = "its process died"

    def open(self) -> None:
        """Start reading, and attach to the worker. Messages before its answer to ``Attach`` are ignored."""
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._read)
        self._loop.add_reader(self._pidfd, self._on_died)
        self.send(wire.Attach(self.epoch))

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Send a message, or queue it while the worker's socket is full. The caller keeps the descriptors."""
        if self._posted:
            self.flush()
        self._posted.append(wire.WORKER.encode(message))
        self.flush(fds)

    def post(self, message: wire.Message) -> None:
        """Send a message with others in one datagram, at the next ``flush`` or ``send``."""
        data = wire.WORKER.encode(message)
        nbytes = self._posted_nbytes + len(data)
        if nbytes > datagram.MAX_TOGETHER_NBYTES and self._posted:
            self.flush()
            nbytes = len(data)
        self._posted.append(data)
        self._posted_nbytes = nbytes

    def post_soon(self, message: wire.Message) -> None:
        """Send a message with others in one datagram, at the latest at the end of this turn of the loop."""
        self.post(message)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_due = False
        self.flush()

    def flush(self, fds: Sequence[int] = ()) -> None:
        """Send the posted messages. Descriptors belong to the only message."""
        posted, self._posted, self._posted_nbytes = self._posted, [], 0
        if self._closed or self._broken or not posted:
            return
        data = posted[0] if len(posted) == 1 else joined(posted)
        if not self._outbox:
            try:
                datagram.send(self._sock, data, fds)
                return
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._on_writable)
            except OSError as error:
                if not self._retry_if_starved(error):
                    return
        self._outbox.append((data, [os.dup(fd) for fd in fds]))

    def shrink(self) -> None:
        """Ask the worker to release unused memory, if its arena is large or it has a device. Called
        periodically.
        """
        if self.outputs.nbytes > SEGMENT_NBYTES or self.device not in {"", CPU}:
            self.send(wire.Shrink())

    def abandon(self, reason: str, grace_s: float) -> None:
        """Stop reading and sending. A worker that still lives after the grace period is killed."""
        if not self._closed:
            self._end(reason, grace_s)

    def next_loan(self) -> int:
        """Return a number for a segment of another worker's arena that is lent to this worker."""
        return next(self._loans)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._loop.remove_reader(self._pidfd)
        for _, fds in self._outbox:
            for fd in fds:
                os.close(fd)
        self._outbox.clear()
        self._sock.close()
        os.close(self._pidfd)
        self.outputs.close()
        self.exports.close()
        for callback in tuple(self.on_close):  # a copy, since a callback may remove others
            callback(self)

    def _on_died(self) -> None:
        self.drain()  # answers sent before its death count
        if not self._closed:
            self._on_down(self, self._reason)

    def _break(self, reason: str, linger_s: float) -> None:
        """Stop sending to a worker that is about to die. Its earlier messages may still be read."""
        if not self._broken:
            self._broken = True
            self._reason = reason
            self._loop.remove_writer(self._sock.fileno())
            self._loop.call_later(linger_s, self._kill)

    def _end(self, reason: str, linger_s: float) -> None:
        self._ended = True
        self._loop.remove_reader(self._sock.fileno())
        self._break(reason, linger_s)

    def _kill(self) -> None:
        if not self._closed:
            logger.error("killed instance %s: %s", self.instance, self._reason)
            # A worker that is a thread cannot be signalled (its descriptor is no pidfd); it ends with its
            # link.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _on_writable(self) -> None:
        if self._closed or self._broken:
            return
        while self._outbox:
            data, fds = self._outbox[0]
            try:
                datagram.send(self._sock, data, fds)
            except BlockingIOError:
                return
            except OSError as error:
                self._retry_if_starved(error)
                return
            self._outbox.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self._sock.fileno())

    def _retry_if_starved(self, error: OSError) -> bool:
        """Retry later and return True if only a descriptor is missing, else break the link."""
        if datagram.is_starved(error):
            self._loop.remove_writer(self._sock.fileno())
            self._loop.call_later(_RETRY_S, self._on_writable)
            return True
        self._break(f"it cannot be sent to: {error}", _LINGER_S)
        return False

    def drain(self) -> None:
        """Process all messages that the worker has sent until now."""
        for _ in range(_DRAIN_MESSAGES):
            messages = self._receive()
            if messages is None:
                return
            self._deliver(messages)

    def _read(self) -> None:
        for _ in range(_BURST):
            messages = self._receive()
            if messages is None or self._deliver(messages):
                return

    def _deliver(self, messages: list[wire.Message]) -> bool:
        """Process messages. The end of a batch is processed together with others that have arrived."""
        try:
            while messages and type(messages[-1]) is wire.Done and self.in_flight > len(messages):
                more = self._receive()
                if not more:
                    break
                messages += more
        finally:
            is_urgent = False
            try:
                is_urgent = bool(messages) and self._on_messages(self, messages)
            except _NONSENSE as error:
                self._break_off(error)
        return is_urgent

    def _receive(self) -> list[wire.Message] | None:
        """Return a datagram's messages for others, or None. Raises OSError without a free descriptor."""
        if self._closed or self._ended:
            return None
        try:
            data, fds = datagram.receive(self._sock, self._buffer)
        except BlockingIOError:
            return None
        except OSError as error:
            if datagram.is_starved(error):
                raise  # the worker is healthy, but its message is lost, and only the worker could repeat it
            data, fds = b"", []
        if not data:
            datagram.close_all(fds)
            self._end("its link ended", _LINGER_S)
            return None
        try:
            messages: list[wire.Message] = wire.WORKER.decode_all(data)
            while messages and (not self.attached or type(messages[0]) in _SEGMENT_MESSAGES):
                self._process(messages.pop(0), fds)
            return messages
        except _NONSENSE as error:
            self._break_off(error)
            return None
        finally:
            for fd in fds:
                os.close(fd)

    def _break_off(self, error: Exception) -> None:
        logger.error("instance %s broke the protocol", self.instance, exc_info=error)
        self._end(f"it broke the protocol: {error}", 0.0)

    def _process(self, message: wire.Message, fds: list[int]) -> None:
        """Process a message that concerns only this link and its memory."""
        if not self.attached:
            # Earlier messages were for the previous front, and concern nobody now.
            self.attached = isinstance(message, wire.Attached) and message.epoch == self.epoch
        elif isinstance(message, wire.Segment):
            self.outputs.attach(message.segment, fds[0], message.nbytes)
        elif isinstance(message, wire.DropSegment):
            self.outputs.detach(message.segment)


class DeviceLinks:
    """The links of the workers that are up, by device."""

    def __init__(self) -> None:
        self._links: dict[str, list[WorkerLink]] = {}

    def add(self, device: str, link: WorkerLink) -> None:
        links = self._links.setdefault(device, [])
        links.append(link)
        link.on_close.append(links.remove)

    def on(self, device: str) -> list[WorkerLink]:
        """Return the workers on a device, the longest there first."""
        return self._links.get(device, [])


def reject_message(link: WorkerLink, message: wire.Message) -> None:
    """Raise ``WireError`` for a message that no worker may send."""
    raise wire.WireError(f"{type(message).__name__} from instance {link.instance}")
