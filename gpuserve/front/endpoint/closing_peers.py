"""Which TCP peers have closed their end, as the kernel's connection table says.

h2corn reads nothing from an HTTP/1.1 connection while its request waits for an answer, so it cannot
tell that the client went away (HTTP/2 tells by RST_STREAM). The kernel knows: the connection is in
CLOSE_WAIT. Read only while such requests have waited for a while.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

#: The address and port of a client, and the port of ours that it is connected to.
Peer: TypeAlias = tuple[str, int, int]

_TABLES: Final = ("proc/self/net/tcp", "proc/self/net/tcp6")
_CLOSE_WAIT: Final = "08"
_V4_IN_V6: Final = b"\0" * 10 + b"\xff\xff"


def closing_peers(root: Path = Path("/")) -> set[Peer]:
    """Every peer that will send nothing more."""
    found: set[Peer] = set()
    for table in _TABLES:
        try:
            lines = (root / table).read_text().splitlines()
        except OSError:
            continue
        found.update(_closing(lines[1:]))
    return found


def _closing(lines: Iterable[str]) -> Iterator[Peer]:
    for line in lines:
        _, local, remote, state, *_ = line.split(None, 4)
        if state == _CLOSE_WAIT:
            address, _, port = remote.partition(":")
            yield _readable(bytes.fromhex(address)), int(port, 16), int(local.partition(":")[2], 16)


def _readable(words: bytes) -> str:
    """An address out of 32-bit words that are in the byte order of the machine."""
    packed = b"".join(struct.pack(">I", word) for (word,) in struct.iter_unpack("=I", words))
    if len(packed) == 16 and packed.startswith(_V4_IN_V6):
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
