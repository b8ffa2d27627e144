"""Pages that are there before anybody writes to them. Whose memory it is, and whether it may be touched, is
not known here.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

#: MADV_POPULATE_WRITE, from Linux 5.14 on.
_POPULATE_WRITE: Final = 23
#: So much at a time: whoever maps or unmaps something else waits meanwhile.
_STEP_NBYTES: Final = 4 << 20


def touch(address: int, nbytes: int) -> None:
    """Have all pages from ``address``, where one begins, be there and mapped. Where the kernel cannot, or has
    no memory for them, they come when they are written to. Other threads run meanwhile, as they do not while
    ``mmap.madvise`` does the same.
    """
    for start in range(0, nbytes, _STEP_NBYTES):
        length = min(_STEP_NBYTES, nbytes - start)
        if _madvise()(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _POPULATE_WRITE):
            return


@functools.cache
def _madvise() -> Any:
    return ctypes.CDLL(None).madvise
