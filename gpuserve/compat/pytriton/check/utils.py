"""``find_free_port``."""

from __future__ import annotations

import socket


def find_free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])
