"""A subscription to the events of one server: the sockets, and what comes by them. It imports ZeroMQ."""

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

#: A server that lives answers sooner.
_HELLO_TIMEOUT_S: Final = 10.0
#: What waits here for a program that is slow; the server keeps as much for it. What comes then is lost.
_MAX_WAITING: Final = 1000


class Subscription:
    """From the moment when the server knows of it, to ``close()``. ``is_over``: the server has ended, or has
    let this subscriber go. Raises ControlError: it does not answer.
    """

    def __init__(self, address: str, topics: Iterable[bytes]) -> None:
        self.is_over = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, _MAX_WAITING)
        self._socket.set(zmq.RECONNECT_IVL, -1)  # who is another server by that name was not meant
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(address)
            for topic in topics:
                self._socket.subscribe(topic)
            self._greet()
        except BaseException:
            self.close()
            raise

    def descriptors(self) -> tuple[int, int]:
        """Return what becomes readable when it may be worth to ``take``; told once of what comes."""
        return self._socket.fileno(), self._monitor.fileno()

    def take(self) -> bytes | None:
        """Return the next event, None where there is none at this moment."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)[-1]
        except zmq.Again:
            if self._monitor.poll(0):
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self.is_over = True
                return self._last()
            return None

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be something, but no longer than that."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.poll(None if math.isinf(timeout_s) else math.ceil(timeout_s * 1000))

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()

    def _last(self) -> bytes | None:
        """Look once more: an event may have come right before the end."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)[-1]
        except zmq.Again:
            return None

    def _greet(self) -> None:
        """Wait until the server answers, by when it knows all subscriptions."""
        hello = HELLO + os.urandom(8).hex().encode()
        self._socket.subscribe(hello)
        deadline = time.monotonic() + _HELLO_TIMEOUT_S
        while True:
            left_s = deadline - time.monotonic()
            if self.is_over or left_s <= 0:
                raise ControlError("the server does not take subscribers of its events")
            self.wait(left_s)
            if self._heard(hello):
                self._socket.unsubscribe(hello)
                return

    def _heard(self, hello: bytes) -> bool:
        """Whether the answer has come. Events that came before it are told as past ones."""
        while self._socket.poll(0):
            if self._socket.recv_multipart(zmq.NOBLOCK)[0] == hello:
                return True
        if self._monitor.poll(0):
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
            self.is_over = True
        return False
