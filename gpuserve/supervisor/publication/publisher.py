"""The ZeroMQ socket that events are published on, driven by the reactor. The kernel says which user a
subscriber is. One that is slow loses what it has no room for, and holds nobody up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gpuserve.control.reactor import Reactor
from gpuserve.journal.topics import Subscriptions

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

#: So many messages wait for one subscriber, each at most as large as a sample. What comes then is lost to it.
MAX_WAITING: Final = 500
#: How long the end of a server waits until subscribers have its last events.
_LINGER_MS: Final = 100
#: More than a context with one socket opens.
_DESCRIPTORS: Final = 24


class Publisher:
    """A publishing socket, from ``open()`` to ``close()``. ``address`` is "" before. ``on_change`` is called
    when subscriptions are others.
    """

    def __init__(self, reactor: Reactor, on_change: Callable[[], None]) -> None:
        self.address = ""
        self.subscriptions = Subscriptions()
        self._reactor = reactor
        self._on_change = on_change
        self._socket: zmq.Socket[bytes] | None = None

    def open(self) -> None:
        """Take subscribers. Raises OSError where there is no descriptor or no name left."""
        import zmq

        _check_descriptors()
        try:
            self._socket = socket = zmq.Context().socket(zmq.XPUB)
            self._set_up(socket)
            self.address = _bound(socket)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, error.strerror) from None
        self._reactor.watch(socket.fileno(), self._take_subscriptions)
        self._take_subscriptions()

    def publish(self, topic: bytes, data: bytes) -> None:
        """Send to those that want it and have room for it."""
        import zmq

        if self._socket is not None:
            self._socket.send_multipart((topic, data), zmq.NOBLOCK, copy=True)
            # Its descriptor tells once of what has come, and sending may take note of that.
            self._take_subscriptions()

    def close(self) -> None:
        if self._socket is None:
            return
        socket, self._socket = self._socket, None
        self._reactor.unwatch(socket.fileno())
        context = socket.context
        socket.close(_LINGER_MS)
        context.term()

    def _set_up(self, socket: zmq.Socket[bytes]) -> None:
        import zmq

        socket.set(zmq.SNDHWM, MAX_WAITING)
        socket.set(zmq.LINGER, _LINGER_MS)
        for uid in {0, os.geteuid()}:
            socket.set(zmq.IPC_FILTER_UID, uid)

    def _take_subscriptions(self) -> None:
        import zmq

        if self._socket is None:
            return
        changed = False
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            hello = self.subscriptions.hear(self._socket.recv(zmq.NOBLOCK))
            if hello:
                self._socket.send_multipart((hello, b"{}"), zmq.NOBLOCK)
            changed = True
        if changed:
            self._on_change()


def _check_descriptors() -> None:
    """Raise OSError unless ZeroMQ finds enough descriptors: libzmq aborts the process where it lacks one."""
    with contextlib.ExitStack() as opened:
        for _ in range(_DESCRIPTORS):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _bound(socket: zmq.Socket[bytes]) -> str:
    """Bind to the name of this process, or to a random one if that is taken, and return the name. The first
    may belong to another server of this process, to a server of a container with the same network, or to
    another user, who cannot take a random name beforehand.
    """
    import zmq

    name = f"ipc://@gpuserve/{os.geteuid()}/events/{os.getpid()}"
    try:
        socket.bind(name)
    except zmq.ZMQError as error:
        if error.errno != zmq.EADDRINUSE:
            raise
        name += f".{secrets.token_hex(8)}"
        socket.bind(name)
    return name
