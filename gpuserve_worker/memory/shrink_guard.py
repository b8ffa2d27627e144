"""What keeps a process alive when a file that it has mapped is shrunk by somebody else.

A load or store beyond the end of a mapped file raises SIGBUS. Here a signal action puts zeros in the place of
such a mapping and notes that it did; the access goes on, and whoever watches the mapping asks
``MappingWatch.broken`` afterwards. A SIGBUS anywhere else does what it did before; nothing is changed until
a mapping is watched: until the last array over it dies, not longer, since its addresses may be anybody's
then. The signal is raised in the thread that touches the memory, where no lock is held but the
interpreter's, which ctypes takes or has.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SA_SIGINFO: Final = 4
_SA_RESTART: Final = 0x10000000
_SIGSET_NBYTES: Final = 128
#: ``si_addr`` in ``siginfo_t``, on every 64-bit Linux.
_SI_ADDR_OFFSET: Final = 16
_MAP_FIXED: Final = 0x10

_Action: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _SigAction(ctypes.Structure):
    """``struct sigaction`` of the C library, on every 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * _SIGSET_NBYTES),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class MappingWatch:
    """A mapping that the guard keeps from ending the process. ``broken`` turns true when it had to."""

    __slots__ = ("address", "broken", "life", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.broken = False
        #: Ends the watch with the array that it is over.
        self.life: weakref.ref[Any] | None = None


class ShrinkGuard:
    """The guard of this process. There is one, because there is one signal action."""

    def __init__(self) -> None:
        # Every step on it is one atomic operation, since a watch ends wherever an array happens to die, and
        # since the thread that a signal interrupts may be in the middle of any line here.
        self._watches: dict[int, MappingWatch] = {}
        self._lock = threading.Lock()
        self._previous: _SigAction | None = None
        # Referred to for as long as the process lives: C calls it.
        self._action = _Action(self._on_signal)
        self._libc: Any = None

    def watch(self, memory: NDArray[np.uint8]) -> MappingWatch:
        """Guard a mapping from its first page on, for as long as the array over it lives, of which every view
        is made.
        """
        pages = -(-memory.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        watch = MappingWatch(memory.ctypes.data, pages)
        key = id(watch)
        watch.life = weakref.ref(memory, lambda _: self._watches.pop(key, None))
        self.stand_by()
        self._watches[key] = watch
        return watch

    def stand_by(self) -> None:
        """Take the signal over, unless it is. After a SIGBUS elsewhere that somebody survived, it is not."""
        if self._previous is None:
            with self._lock:
                if self._previous is None:
                    self._install()

    def _install(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        )
        handler = ctypes.cast(self._action, ctypes.c_void_p).value
        wanted = _SigAction(handler=handler, flags=_SA_SIGINFO | _SA_RESTART)
        previous = _SigAction()
        if self._libc.sigaction(signal.SIGBUS, ctypes.byref(wanted), ctypes.byref(previous)) != 0:
            raise OSError(ctypes.get_errno(), "no action for SIGBUS can be set")
        self._previous = previous

    def _on_signal(self, number: int, info: int, context: int) -> None:
        address = ctypes.c_size_t.from_address(info + _SI_ADDR_OFFSET).value
        for watch in list(self._watches.values()):
            if watch.address <= address < watch.address + watch.nbytes:
                watch.broken = True
                if self._put_zeros(watch):
                    return
        # Not ours: the instruction is tried again, under the action that was there before.
        previous, self._previous = self._previous, None
        if previous is not None:  # else another thread has come here meanwhile
            self._libc.sigaction(number, ctypes.byref(previous), None)

    def _put_zeros(self, watch: MappingWatch) -> bool:
        """Replace the mapping by memory of the process's own."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        placed = self._libc.mmap(watch.address, watch.nbytes, protection, flags, -1, 0)
        return bool(placed == watch.address)


#: Made with the module, installed with the first mapping that is watched.
GUARD: Final = ShrinkGuard()
