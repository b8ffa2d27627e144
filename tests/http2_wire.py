"""Raw HTTP/2 connections to a real server, judged as ``http2_peer`` does."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from http2_peer import PING, Frame, Peer, frame
from sending import INFER

TIMEOUT_S = 15.0
GRPC = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", INFER),
    (":authority", "test"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)


class Wire:
    """One connection. ``buffer_nbytes``: of the socket, for a client that is to be slow."""

    def __init__(
        self, address: str, peer: Peer | None = None, buffer_nbytes: int = 0, trusted: Path | None = None
    ) -> None:
        host, _, port = address.rpartition(":")
        plain = socket.socket()
        if buffer_nbytes:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_nbytes)
        plain.settimeout(TIMEOUT_S)
        plain.connect((host, int(port)))
        self.socket = plain
        if trusted is not None:
            context = ssl.create_default_context(cafile=str(trusted))
            context.set_alpn_protocols(["h2", "http/1.1"])
            tls = context.wrap_socket(plain, server_hostname="localhost")
            assert tls.selected_alpn_protocol() == "h2"
            self.socket = tls
        self.peer = peer or Peer()
        self.send(self.peer.greeting())

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_some(self) -> list[Frame]:
        """What comes next; an ``EOFError`` at the end."""
        received = self.socket.recv(1 << 18)
        if not received:
            raise EOFError
        return self.peer.read(received)

    def read_until(self, condition: Callable[[], bool]) -> None:
        """Read until it holds."""
        while not condition():
            self.read_some()

    def read_to_the_end(self) -> None:
        """Read until the server closes."""
        try:
            while True:
                self.read_some()
        except (EOFError, ConnectionResetError):
            return

    def ping(self) -> None:
        """Wait until everything so far has been read."""
        n_pongs = len(self.peer.pongs)
        self.send(frame(PING, payload=b"whatever"))
        self.read_until(lambda: len(self.peer.pongs) > n_pongs)

    def flood(self, data: bytes, most_nbytes: int) -> int:
        """Send it again and again, without reading, until the server takes no more or has had enough; how
        many bytes it took."""
        self.socket.setblocking(False)
        n_sent = 0
        try:
            while n_sent < most_nbytes and select.select([], [self.socket], [], 0.5)[1]:
                n_sent += self.socket.send(data[n_sent % len(data) :])
        except (ConnectionError, BlockingIOError):
            pass
        self.socket.settimeout(TIMEOUT_S)
        return n_sent
