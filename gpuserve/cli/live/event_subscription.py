"""A subscriber to the events of one server over ZeroMQ."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from gpuserve.core.errors import ControlError
from gpuserve.core.event_log import HELLO

#: Time limit of the server's confirmation; a healthy server answers sooner.
_HELLO_TIMEOUT_S: Final = 10.0
#: Events queued here for a slow program; the server queues as many. Further events are lost.
_MAX_QUEUED: Final = 1000


class Subscription:
    """A confirmed subscription to a server's events; ``is_over`` at its end. May raise ControlError."""

    def __init__(self, address: str, topics: Iterable[bytes]) -> None:
        self.is_over = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, _MAX_QUEUED)
        self._socket.set(zmq.RECONNECT_IVL, -1)  # another server may take over the address
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(address)
            for name in topics:
                self._socket.subscribe(name)
            self._confirm()
        except BaseException:
            self.close()
            raise

    def descriptors(self) -> tuple[int, int]:
        """Return descriptors that become readable once for each arrival, or at the server's end."""
        return self._socket.fileno(), self._monitor.fileno()

    def receive(self) -> bytes | None:
        """Return the next event, or None if none has arrived."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)[-1]
        except zmq.Again:
            if self._monitor.poll(0):
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self.is_over = True
                if self._socket.poll(0):  # an event that arrived right before the end
                    return self._socket.recv_multipart(zmq.NOBLOCK)[-1]
            return None

    def wait(self, timeout_s: float) -> None:
        """Wait for an event or the server's end, ``timeout_s`` at most."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.poll(None if math.isinf(timeout_s) else math.ceil(timeout_s * 1000))

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()

    def _confirm(self) -> None:
        """Wait for the server's answer to a greeting: by then the server knows all subscriptions."""
        hello = HELLO + os.urandom(8).hex().encode()
        self._socket.subscribe(hello)
        deadline = time.monotonic() + _HELLO_TIMEOUT_S
        while True:
            left_s = deadline - time.monotonic()
            if self.is_over or left_s <= 0:
                raise ControlError("the server does not accept subscribers to its events")
            self.wait(left_s)
            if self._has_answer(hello):
                self._socket.unsubscribe(hello)
                return

    def _has_answer(self, hello: bytes) -> bool:
        """Return whether the answer has arrived. Earlier events are dropped; they are among the past ones."""
        while self._socket.poll(0):
            if self._socket.recv_multipart(zmq.NOBLOCK)[0] == hello:
                return True
        if self._monitor.poll(0):
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
            self.is_over = True
        return False
