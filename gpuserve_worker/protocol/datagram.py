"""Messages as SOCK_SEQPACKET datagrams, with descriptors beside them. Stateless. A message larger than the
socket's send buffer travels in a sealed memfd instead: the datagram is the byte ``SPILLED``, which
msgpack never uses, and the memfd its first descriptor.

A sender keeps its descriptors; what ``receive`` returns is the caller's; on an error what came is closed.

``_socket`` is what ``socket`` wraps, without its enums: a thirtieth of a worker's start and half a MiB of it.
"""

from __future__ import annotations

import _socket
import array
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Final

#: Larger messages spill. Half of what a socket takes by default (net.core.wmem_default, 208 KiB).
MAX_DATAGRAM_NBYTES: Final = 96 * 1024
#: Several messages in one datagram are no more than this together, their array's head aside.
MAX_TOGETHER_NBYTES: Final = MAX_DATAGRAM_NBYTES - 3
#: As many descriptors as one message may carry, plus the spilled message itself.
MAX_FDS: Final = 8
SPILLED: Final = 0xC1
_FD_NBYTES: Final = array.array("i").itemsize
_ANCILLARY_NBYTES: Final = _socket.CMSG_SPACE(MAX_FDS * _FD_NBYTES)
#: As a plain number: with the members of the enum, every message costs nearly a microsecond more.
_CUT_OFF: Final = int(_socket.MSG_TRUNC | _socket.MSG_CTRUNC)
_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
_CLOEXEC: Final = int(_socket.MSG_CMSG_CLOEXEC)
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def send(sock: _socket.socket, data: bytes, fds: Sequence[int] = (), flags: int = 0) -> None:
    """Send one message. The descriptors stay the caller's. ``flags`` are those of ``sendmsg``."""
    if len(data) <= MAX_DATAGRAM_NBYTES:
        if fds:
            _send_with(sock, data, fds, flags)
        else:
            sock.send(data, flags)
        return
    spill = _spill(data)
    try:
        _send_with(sock, bytes([SPILLED]), [spill, *fds], flags)
    finally:
        os.close(spill)


def receive_buffer() -> memoryview:
    """What ``receive`` reads into, one for each end. Mapped, not a ``bytearray``, which is cleared: only
    pages that a message has reached take memory, and a server of many models has two ends for each instance.
    """
    return memoryview(mmap.mmap(-1, MAX_DATAGRAM_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def receive(sock: _socket.socket, buffer: memoryview) -> tuple[memoryview | bytes, list[int]]:
    """Receive one message into a ``receive_buffer()``; empty: the peer closed. The descriptors are the
    caller's to close. Raises ``OSError``, also for a datagram that is too large or lacks its memfd, and with
    ``EMFILE`` where this process had no descriptor left for what came: then the message is lost.
    """
    try:
        nbytes, ancillary, flags, _ = sock.recvmsg_into([buffer], _ANCILLARY_NBYTES, _CLOEXEC)
    except ConnectionResetError:  # told once, of a peer that left something unread; what it sent comes now
        nbytes, ancillary, flags, _ = sock.recvmsg_into([buffer], _ANCILLARY_NBYTES, _CLOEXEC)
    fds = _descriptors(ancillary) if ancillary else []
    try:
        if flags & _CUT_OFF:
            if flags & _socket.MSG_CTRUNC and len(fds) < MAX_FDS:
                raise OSError(errno.EMFILE, "a message came, and there was no descriptor left for its memory")
            raise OSError(errno.EMSGSIZE, f"over {len(buffer)} bytes or {MAX_FDS} descriptors")
        if nbytes == 1 and buffer[0] == SPILLED:
            if not fds:
                raise OSError(errno.EPROTO, "a spilled message came without its memory")
            return read_spill(fds.pop(0)), fds
    except BaseException:
        close_all(fds)
        raise
    return buffer[:nbytes], fds


def is_starved(error: object) -> bool:
    """Whether an error says that this process, or the machine, has no descriptor left."""
    return isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR


def read_spill(fd: int) -> bytes:
    """The whole of a spilled message: read and not mapped, so no peer can take the pages away meanwhile."""
    try:
        with open(fd, "rb", closefd=False) as spilled:
            spilled.seek(0)
            return spilled.read()
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write everything: one ``write`` takes at most 2 GiB."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _send_with(sock: _socket.socket, data: bytes, fds: Sequence[int], flags: int) -> None:
    rights = array.array("i", fds)
    sock.sendmsg((data,), ((_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights),), flags)


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % _FD_NBYTES])
    return list(fds)


def _spill(data: bytes) -> int:
    fd = os.memfd_create("gpuserve-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        write_all(fd, data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
