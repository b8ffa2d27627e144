"""Accepting on a socket that listens, so many connections a turn of the loop. Who takes them, and whether
they are admitted, is not known here.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Final, TypeAlias

from gpuserve_worker.protocol.spare_descriptor import SpareDescriptor

#: As many as the kernel allows by default (net.core.somaxconn).
BACKLOG: Final = 4096
#: So many connections are accepted in one turn of the loop.
_ACCEPTED_A_TURN: Final = 64
#: Where no connection can be accepted, for want of descriptors or memory, it is tried again after so long.
_REST_S: Final = 0.5
#: A client whose machine is gone without a word is noticed after a minute or two, however quiet it was.
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
#: Has a connection from now on, and the address of its client, which is None on a unix socket.
Take: TypeAlias = Callable[[socket.socket, str | None], None]


def own_listener(fd: int) -> socket.socket:
    """A descriptor of the listener's own, whose connections notice that their client is gone."""
    listener = socket.socket(fileno=os.dup(fd))
    listener.setblocking(False)
    for option in () if listener.family == socket.AF_UNIX else _KEEPALIVE:
        listener.setsockopt(*option)  # what is accepted has them too
    return listener


class Acceptor:
    """Accepts in the running loop, from ``open`` to ``close``."""

    def __init__(self, listener: socket.socket, take: Take) -> None:
        self._listener = listener
        self._take = take
        self._spare = SpareDescriptor()
        self._loop = asyncio.get_running_loop()

    def open(self) -> None:
        self._spare.hold()
        self._listener.listen(BACKLOG)
        self._listen()

    def close(self) -> None:
        """Accept no more than those who have connected by now."""
        self._accept()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._spare.release()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_A_TURN):
            try:
                accepted, peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                if self._refuse():
                    continue
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_REST_S, self._listen)
                return
            self._take(accepted, None if accepted.family == socket.AF_UNIX else peer[0])

    def _refuse(self) -> bool:
        """Close a connection that no descriptor is left for, so that its client need not wait for a timeout;
        False: not even that can be done.
        """
        if not self._spare.release():
            self._spare.hold()
            return False
        try:
            self._listener.accept()[0].close()
        except OSError:
            return False
        finally:
            self._spare.hold()
        return True
