"""Sealed memory: a memfd that nobody can change any more, so it is safe to map a sender's."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from typing import Final, TypeAlias

Buffer: TypeAlias = bytes | memoryview
#: (offset, length) of each part of sealed memory. The first part of an object is its pickle.
Ranges: TypeAlias = tuple[tuple[int, int], ...]

#: Buffers start at multiples of this, so that vector instructions can read them.
ALIGNMENT_NBYTES: Final = 64
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SealedMemory:
    """A descriptor of sealed memory. The memory exists while a descriptor or a mapping of it does. The
    constructor takes over ``fd``. It raises ``ValueError`` if the memory is not sealed, and closes ``fd``.
    """

    __slots__ = ("fd", "nbytes")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        try:
            is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:  # no memfd
            is_sealed = False
        if not is_sealed:
            self.close()
            raise ValueError("the memory is not sealed")
        self.nbytes = os.fstat(fd).st_size

    def __del__(self) -> None:
        self.close()

    def map_private(self) -> memoryview:
        """Return the memory, mapped copy-on-write: a page that the caller writes becomes a page of its own.
        The mapping lives as long as any array over it.
        """
        return memoryview(mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_PRIVATE))

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class ExportedMemory:
    """A descriptor of device memory that CUDA exported. The memory exists while a descriptor or a mapping of
    it does. ``uuid`` is that of the device. The object owns ``fd``.
    """

    __slots__ = ("fd", "nbytes", "uuid")

    def __init__(self, fd: int, nbytes: int, uuid: str) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.uuid = uuid

    def __del__(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def seal(buffers: Iterable[Buffer], name: str) -> SealedMemory:
    """Return sealed memory with these contiguous buffers, each at the next multiple of ``ALIGNMENT_NBYTES``.
    Raise ``OSError`` if the kernel has no memory or descriptor left.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        offset = 0
        for buffer in buffers:
            offset = aligned(offset)
            os.lseek(fd, offset, os.SEEK_SET)
            view = memoryview(buffer)
            offset += view.nbytes
            while view:  # one ``write`` writes at most 2 GiB
                view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return SealedMemory(fd)


def aligned(offset: int) -> int:
    """Return the next multiple of ``ALIGNMENT_NBYTES`` from ``offset`` on."""
    return -(-offset // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def split(memory: memoryview, ranges: Ranges) -> list[memoryview]:
    """Return the parts of mapped memory."""
    return [memory[offset : offset + nbytes] for offset, nbytes in ranges]
