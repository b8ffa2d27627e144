"""Pages that are prefaulted before the first write."""

from __future__ import annotations

import ctypes
import mmap
import os

from gpuserve_worker.memory.segments import touch

NBYTES = 9 << 20


def mapped(fd: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(fd, NBYTES)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_all_pages_are_there() -> None:
    fd = os.memfd_create("touched")
    os.ftruncate(fd, NBYTES)
    memory, address = mapped(fd)
    touch(address, NBYTES)
    assert os.fstat(fd).st_blocks * 512 >= NBYTES
    memory.close()
    os.close(fd)


def test_what_has_no_memory_behind_it_is_left_as_it_is() -> None:
    """A store there would end the process."""
    fd = os.memfd_create("touched")
    os.ftruncate(fd, NBYTES)
    memory, address = mapped(fd)
    os.ftruncate(fd, mmap.PAGESIZE)
    touch(address, NBYTES)
    assert os.fstat(fd).st_blocks * 512 <= 2 << 20
    memory.close()
    os.close(fd)
