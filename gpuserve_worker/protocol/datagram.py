"""Encoding and transport of messages: msgpack arrays in SOCK_SEQPACKET datagrams, with file descriptors
beside them.

A message larger than the socket's send buffer is sent in a sealed memfd. The datagram is then the byte
``SPILLED``, which msgpack never uses, and the memfd is its first descriptor. A sender keeps its descriptors.
The caller of ``receive`` owns the received descriptors; after an error they are closed.

The module uses ``_socket``, which ``socket`` wraps, because the enums of ``socket`` take a thirtieth of a
worker's start time and half a MiB of its memory.
"""

from __future__ import annotations

import _socket
import array
import contextlib
import errno
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgpack

from gpuserve_worker.protocol.sealed_memory import seal

#: Larger messages are sent in a memfd. The limit is half of a socket's default send buffer
#: (net.core.wmem_default, 208 KiB).
MAX_DATAGRAM_NBYTES: Final = 96 * 1024
#: Limit of several messages in one datagram together, without the head of their array.
MAX_TOGETHER_NBYTES: Final = MAX_DATAGRAM_NBYTES - 3
#: Limit of descriptors in a datagram: those of one message, and the memfd of a spilled message.
MAX_FDS: Final = 8
SPILLED: Final = 0xC1
_FD_NBYTES: Final = array.array("i").itemsize
_ANCILLARY_NBYTES: Final = _socket.CMSG_SPACE(MAX_FDS * _FD_NBYTES)
#: A plain number: enum members would cost nearly a microsecond a message.
_CUT_OFF: Final = int(_socket.MSG_TRUNC | _socket.MSG_CTRUNC)
_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
_CLOEXEC: Final = int(_socket.MSG_CMSG_CLOEXEC)


def send(sock: _socket.socket, data: bytes, fds: Sequence[int] = (), flags: int = 0) -> None:
    """Send one message. ``flags`` are those of ``sendmsg``. The descriptors stay the caller's."""
    if len(data) <= MAX_DATAGRAM_NBYTES:
        if fds:
            _send_with(sock, data, fds, flags)
        else:
            sock.send(data, flags)
        return
    spill = seal([data], "gpuserve-message")
    try:
        _send_with(sock, bytes([SPILLED]), [spill.fd, *fds], flags)
    finally:
        spill.close()


def receive_buffer() -> memoryview:
    """Return a buffer for ``receive``; each socket end has its own. The buffer is mapped memory and not a
    ``bytearray``, which would be cleared: only pages that a message has reached take memory, and a server of
    many models has two ends for each instance.
    """
    return memoryview(mmap.mmap(-1, MAX_DATAGRAM_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def receive(sock: _socket.socket, buffer: memoryview) -> tuple[memoryview | bytes, list[int]]:
    """Receive one message into a ``receive_buffer()``; the message is empty if the peer has closed the
    socket. The caller closes the descriptors. Raise ``OSError`` also for a datagram that is too large or has
    no memfd, and with ``EMFILE`` if this process had no descriptor left, in which case the message is lost.
    """
    try:
        nbytes, ancillary, flags, _ = sock.recvmsg_into([buffer], _ANCILLARY_NBYTES, _CLOEXEC)
    except ConnectionResetError:  # raised once if the peer closed with unread data; its messages follow
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
    """Return whether an error says that this process or the machine has no descriptor left."""
    return isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR


def read_spill(fd: int) -> bytes:
    """Return a spilled message, read from its memfd, as a peer could remove mapped pages."""
    try:
        with open(fd, "rb", closefd=False) as spilled:
            spilled.seek(0)
            return spilled.read()
    finally:
        os.close(fd)


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


#: First byte of a msgpack array of up to 15 elements, and of up to 65,535 elements.
_FEW: Final = 0x90
_MANY: Final = 0xDC
_MOST_FEW: Final = 15


class WireError(Exception):
    """Data from the peer that are not a message of this protocol."""


class MessageCodec:
    """The encoder and decoder of one channel's messages. ``classes`` maps tags to message classes; other
    classes are refused.
    """

    def __init__(self, classes: dict[int, Any]) -> None:
        self._classes = classes
        self._tags = {cls: tag for tag, cls in classes.items()}
        #: Packers that are not in use. Another thread, or a finalizer, may encode at the same time.
        self._packers: list[msgpack.Packer] = []

    def encode(self, message: Any) -> bytes:
        fields = (self._tags[type(message)], *message)
        try:
            packer = self._packers.pop()
        except IndexError:
            packer = msgpack.Packer()
        packed: bytes
        try:
            packed = packer.pack(fields)
        except UnicodeEncodeError:  # half a surrogate pair, for example in a file name that is not UTF-8
            return bytes(msgpack.packb(fields, unicode_errors="backslashreplace"))
        self._packers.append(packer)
        return packed

    def decode(self, data: bytes | memoryview) -> Any:
        """Return the only message in a datagram. Raise ``WireError`` for any other number of messages."""
        messages = self.decode_all(data)
        if len(messages) != 1:
            raise WireError(f"{len(messages)} messages where one should be")
        return messages[0]

    def decode_all(self, data: bytes | memoryview) -> list[Any]:
        """Return the messages in a datagram. Raise ``WireError`` if the data are malformed. Nested tuples
        arrive as plain tuples; ``tensors()``, ``requests()`` and ``responses()`` restore their field names.
        """
        try:
            found = msgpack.unpackb(data, use_list=False, strict_map_key=False)
            if type(found[0]) is tuple:
                return [self._classes[tag](*fields) for tag, *fields in found]
            tag, *fields = found
            return [self._classes[tag](*fields)]
        except (ValueError, LookupError, TypeError, msgpack.UnpackException) as error:
            raise WireError(f"not a message of this channel: {error}") from error


def joined(encoded: Sequence[bytes]) -> bytes:
    """Return one datagram with these encoded messages. At least one message is required."""
    n = len(encoded)
    if n == 1:
        return encoded[0]
    head = bytes((_FEW | n,)) if n <= _MOST_FEW else bytes((_MANY, n >> 8, n & 255))
    return b"".join((head, *encoded))


class SpareDescriptor:
    """A listener's reserved descriptor, so that it can accept a connection when none is free."""

    def __init__(self) -> None:
        self._fd = -1

    def hold(self) -> None:
        """Reserve a descriptor, unless one is reserved already or none is free."""
        if self._fd < 0:
            with contextlib.suppress(OSError):
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def release(self) -> bool:
        """Close the reserved descriptor for another use; False if none was reserved."""
        if self._fd < 0:
            return False
        os.close(self._fd)
        self._fd = -1
        return True
