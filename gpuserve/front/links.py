"""The front's end of one worker's link: messages out and in on the event loop. No scheduling here."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from gpuserve_worker import datagram, wire
from gpuserve_worker.memory import Mapping

#: As many messages are read in one go before other work of the loop gets its turn.
_BURST: Final = 16


class WorkerLink:
    """One worker, as the front knows it: its link, and the mapping of its output arena.

    ``on_message`` is given every message of this epoch; ``on_down`` is called once when the worker
    is gone, told by its pidfd or by the end of the link, whichever is first.
    """

    def __init__(
        self,
        instance: str,
        sock: socket.socket,
        pidfd: int,
        epoch: int,
        on_message: Callable[[WorkerLink, wire.Message], None],
        on_down: Callable[[WorkerLink, str], None],
    ) -> None:
        self.instance = instance
        self.outputs = Mapping()
        self.attached = False
        self._sock = sock
        self._pidfd = pidfd
        self._epoch = epoch
        self._on_message = on_message
        self._on_down = on_down
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._buffer = memoryview(bytearray(datagram.MAX_DATAGRAM_NBYTES))
        self._loop = asyncio.get_running_loop()
        self._closed = False

    def open(self) -> None:
        """Take the link over: nothing but the answer to this ``Attach`` is listened to first."""
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._read)
        self._loop.add_reader(self._pidfd, self._down, "its process died")
        self.send(wire.Attach(self._epoch))

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Send, or queue while the worker's socket is full. Descriptors stay the caller's."""
        if self._closed:
            return
        data = wire.encode(message)
        if not self._outbox:
            try:
                datagram.send(self._sock, data, fds)
                return
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._flush)
            except OSError:
                return  # the pidfd tells
        self._outbox.append((data, [os.dup(fd) for fd in fds]))

    def close(self) -> None:
        """Let go of the link and of the worker's memory."""
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

    def _down(self, reason: str) -> None:
        if not self._closed:
            self._on_down(self, reason)

    def _flush(self) -> None:
        while self._outbox:
            data, fds = self._outbox[0]
            try:
                datagram.send(self._sock, data, fds)
            except BlockingIOError:
                return
            except OSError:
                break
            self._outbox.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        for _ in range(_BURST):
            if self._closed:
                return
            try:
                data, fds = datagram.receive(self._sock, self._buffer)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._down("its link ended")
                return
            try:
                self._heard(wire.decode(data), fds)
            except (wire.WireError, ValueError) as error:
                self._down(f"it broke the protocol: {error}")
                return
            finally:
                for fd in fds:
                    os.close(fd)

    def _heard(self, message: wire.Message, fds: list[int]) -> None:
        if not self.attached:
            # What a worker still had to say to the front before this one concerns nobody now.
            self.attached = isinstance(message, wire.Attached) and message.epoch == self._epoch
            if not self.attached:
                return
        if isinstance(message, wire.Segment):
            self.outputs.attach(message.segment, fds[0], message.nbytes)
        elif isinstance(message, wire.DropSegment):
            self.outputs.detach(message.segment)
        else:
            self._on_message(self, message)
