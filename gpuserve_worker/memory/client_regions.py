"""Clients' regions of shared memory, as a worker uses them: mapped at the first use, read and written in
place.

The client owns the file of a region and may write to it or shrink it at any time. That may spoil the client's
own requests, and nothing else: ``ShrinkGuard`` handles the SIGBUS of an access beyond the end of a shrunk
file. The front registers regions and checks permissions. The worker's device path, a ``DeviceRegionOpener``,
opens regions of device memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import numpy as np

from gpuserve_worker.memory.arena import PageLocks
from gpuserve_worker.protocol.payloads import Place

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: A copy in steps of this size takes a sixth to a quarter less time than one copy of many MiB, measured with
#: and without the data in the caches.
COPY_STEP_NBYTES: Final = 512 << 10
_LARGE_COPY_NBYTES: Final = 4 * COPY_STEP_NBYTES


def copy(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copy an array of numbers onto another of the same shape and dtype. The arrays may overlap."""
    if (
        source.nbytes < _LARGE_COPY_NBYTES
        or not (source.flags.c_contiguous and target.flags.c_contiguous)
        or np.may_share_memory(target, source)
    ):
        np.copyto(target, source)
        return
    into, out_of = target.reshape(-1).view(np.uint8), source.reshape(-1).view(np.uint8)
    for start in range(0, source.nbytes, COPY_STEP_NBYTES):
        end = start + COPY_STEP_NBYTES
        np.copyto(into[start:end], out_of[start:end])


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes to memory of the same length. The ranges may overlap."""
    if len(source) < _LARGE_COPY_NBYTES:
        target[:] = source
    else:
        copy(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


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
    """A watched mapping; ``broken`` once the file was shrunk and the mapping replaced."""

    __slots__ = ("address", "broken", "life", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.broken = False
        #: A weak reference to the array over the mapping; its callback ends the watch.
        self.life: weakref.ref[Any] | None = None


class ShrinkGuard:
    """The SIGBUS handler of this process, which survives access to a mapped file that another process has
    shrunk.

    An access beyond the end of a mapped file raises SIGBUS. The handler replaces a watched mapping with zeros
    and sets ``MappingWatch.broken``; the access then continues, and the user of the mapping checks ``broken``
    afterwards. A SIGBUS anywhere else has its previous effect. The handler is installed when the first
    mapping is watched. A watch ends with the last array over the mapping, because its addresses may be reused
    then. The signal is raised in the thread that accesses the memory, where no lock is held but the GIL,
    which ctypes acquires or has. There is one instance, because there is one signal action.
    """

    def __init__(self) -> None:
        # Every operation on the dict is atomic, because a watch ends in any thread that deletes an array, and
        # a signal may interrupt any line of this class.
        self._watches: dict[int, MappingWatch] = {}
        self._lock = threading.Lock()
        self._previous: _SigAction | None = None
        # Kept alive for the life of the process, because C code calls it.
        self._action = _Action(self._on_signal)
        self._libc: Any = None

    def watch(self, memory: NDArray[np.uint8]) -> MappingWatch:
        """Watch a mapping while the array from its first page lives, of which all views must be made."""
        pages = -(-memory.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        watch = MappingWatch(memory.ctypes.data, pages)
        key = id(watch)
        watch.life = weakref.ref(memory, lambda _: self._watches.pop(key, None))
        self.ensure_installed()
        self._watches[key] = watch
        return watch

    def ensure_installed(self) -> None:
        """Install the signal action unless it is installed. A survived SIGBUS elsewhere uninstalls it."""
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
                # Replace the mapping with private zeroed memory.
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
                protection = mmap.PROT_READ | mmap.PROT_WRITE
                if watch.address == self._libc.mmap(watch.address, watch.nbytes, protection, flags, -1, 0):
                    return
        # Not a watched mapping: the instruction runs again under the previous signal action.
        previous, self._previous = self._previous, None
        if previous is not None:  # otherwise another thread has restored it
            self._libc.sigaction(number, ctypes.byref(previous), None)


#: Created at import, installed when the first mapping is watched.
GUARD: Final = ShrinkGuard()


_NO_DEVICE: Final = (
    "the server has no cupy that can use this device, which it needs to open device memory: expected "
    "gpuserve[cuda12] or gpuserve[cuda13] installed"
)
NOT_THERE: Final = "a region of CUDA memory is not there"
#: Alignment of file offsets for a mapping.
_GRANULARITY: Final = mmap.ALLOCATIONGRANULARITY


class RegionError(Exception):
    """A client's region does not match its registration. The text is one sentence for the client; ``code`` is
    a name of ``errors.Code``.
    """

    code = "INVALID_ARGUMENT"


class RegionMemory(Protocol):
    """Access to a region of system or device memory; each method raises ``RegionError`` if it fails."""

    def read(self, place: Place, target: memoryview) -> None:
        """Copy the bytes of a place to host memory of the same length."""

    def start_read(self, place: Place, target: memoryview) -> bool:
        """Start a read; True if its bytes are complete only after ``wait_reads``, shared by many reads."""

    def write(self, place: Place, put: Callable[[memoryview], None]) -> None:
        """Fill the bytes of a place by calling ``put`` with a buffer."""

    def check(self, place: Place) -> None:
        """Raise ``RegionError`` unless the place exists and existed during its use."""

    def close(self) -> None: ...


class DeviceRegionOpener(Protocol):
    """An opener of clients' regions of device memory."""

    def open_region(self, nbytes: int, raw_handle: bytes, told: Callable[[str], None]) -> RegionMemory:
        """Return the region of ``nbytes`` behind a handle of another process, and open the handle in another
        thread. ``told`` is called in any thread with "" when the region can be used, or with the reason why
        not. Earlier uses block until then.
        """

    def wait_reads(self) -> None:
        """Wait for all started reads. Raise ``RegionError`` if one failed."""


class RegionLocks(PageLocks, Protocol):
    """A page locker that locks clients' memory up to a limit."""

    def lock_lent(self, memory: memoryview) -> bool:
        """Schedule the locking of a client's memory. Return False if that would exceed the limit."""

    def is_locked(self, memory: memoryview) -> bool: ...


def check_inside(place: Place, nbytes: int) -> None:
    """Raise ``ValueError`` unless a place lies in a region of ``nbytes``."""
    if place.offset < 0 or place.nbytes < 0 or place.offset + place.nbytes > nbytes:
        raise ValueError(f"no {place.nbytes} bytes at {place.offset} of region {place.region}")


class SystemRegion:
    """A region in a file of system shared memory. ``close()`` leaves the mapping to the last array over it.
    If there are ``locks``, the pages are locked once all are populated and the device has used the region
    before.
    """

    def __init__(self, fd: int, offset: int, nbytes: int, locks: RegionLocks | None = None) -> None:
        self._fd = os.dup(fd)
        self._start = offset
        self._nbytes = nbytes
        self._view: memoryview | None = None
        self._watch: MappingWatch | None = None
        self._locks = locks
        #: The whole mapping, once its pages are to be locked.
        self._pages: memoryview | None = None
        self._device_uses = 0

    def view(self, place: Place) -> memoryview:
        check_inside(place, self._nbytes)
        self.check(place)
        try:
            view = self._mapped()
        except (ValueError, OSError):  # the file was shrunk after the check
            raise self._shrunk(place) from None
        return view[place.offset : place.offset + place.nbytes]

    def read(self, place: Place, target: memoryview) -> None:
        copy_bytes(target, self.view(place))
        self.check(place)

    def start_read(self, place: Place, target: memoryview) -> bool:
        self.read(place, target)
        return False

    def write(self, place: Place, put: Callable[[memoryview], None]) -> None:
        put(self.view(place))
        self.check(place)

    def check(self, place: Place) -> None:
        whole = self._watch is None or not self._watch.broken
        # Seeking to the end gives the file size at a quarter of the cost of ``fstat``. Nothing uses the file
        # position.
        if whole and os.lseek(self._fd, 0, os.SEEK_END) >= self._start + place.offset + place.nbytes:
            return
        raise self._shrunk(place)

    def _shrunk(self, place: Place) -> RegionError:
        return RegionError(
            "a region of shared memory that the request names has shrunk since it was registered, or there "
            f"is no memory behind it: expected {place.nbytes} bytes at offset {place.offset} of it"
        )

    def is_locked(self) -> bool:
        """Return whether the device can copy from and to the region directly. Called before each such copy.
        The pages of a region in repeated use are locked for later copies, if all are populated: locking
        unpopulated pages would populate them.
        """
        if self._locks is None:
            return False
        if self._pages is not None:
            return self._locks.is_locked(self._pages)
        self._device_uses += 1
        # Checking a large region takes a while: done after 1, 2, 4, 8, … uses.
        if not self._device_uses & (self._device_uses - 1) and self._is_there():
            self._lock_pages(self._locks)
        return False

    def close(self) -> None:
        """Close the file, and the mapping unless an array is over it."""
        os.close(self._fd)
        if self._locks is not None and self._pages is not None:
            self._locks.unlock(self._pages)
        self._view = self._pages = None

    def _is_there(self) -> bool:
        """Return whether all pages of the region have been written."""
        try:
            return os.lseek(self._fd, self._start, os.SEEK_HOLE) >= self._start + self._nbytes
        except OSError:  # the file ends before the region
            return False

    def _lock_pages(self, locks: RegionLocks) -> None:
        if self._start % _GRANULARITY:
            return
        with suppress(ValueError, OSError):  # it has been shrunk
            pages = self._mapped()
            if locks.lock_lent(pages):
                self._pages = pages

    def _mapped(self) -> memoryview:
        if self._view is None:
            # A mapping starts at a page boundary; bytes before the region are not accessed.
            before = self._start % _GRANULARITY
            mapped = mmap.mmap(self._fd, before + self._nbytes, offset=self._start - before)
            whole = np.frombuffer(mapped, np.uint8)
            self._watch = GUARD.watch(whole)
            self._view = whole.data[before:]
        GUARD.ensure_installed()
        return self._view


class _NoRegion:
    """A region that could not be opened. Every use raises ``RegionError`` with ``problem``."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def _refuse(self, place: Place, *_: object) -> NoReturn:
        raise RegionError(self._problem)

    read = start_read = write = check = _refuse

    def close(self) -> None:
        pass


class ClientRegions:
    """The regions that the front has announced to this worker, by number."""

    def __init__(self, locks: RegionLocks | None = None) -> None:
        self._locks = locks
        self._regions: dict[int, RegionMemory] = {}
        self._opener: DeviceRegionOpener | None = None

    def __len__(self) -> int:
        return len(self._regions)

    def attach(self, number: int, fd: int, offset: int, nbytes: int) -> None:
        """Add a region of system memory; the caller keeps ``fd``."""
        self._regions[number] = SystemRegion(fd, offset, nbytes, self._locks)

    def attach_on_device(
        self,
        number: int,
        nbytes: int,
        raw_handle: bytes,
        opener: DeviceRegionOpener | None,
        told: Callable[[str], None],
    ) -> None:
        """Add a region of the worker's device memory. ``told`` is that of ``DeviceRegionOpener``."""
        if opener is None:
            self._regions[number] = _NoRegion(f"{NOT_THERE}: {_NO_DEVICE}")
            told(_NO_DEVICE)
        else:
            self._opener = opener
            self._regions[number] = opener.open_region(nbytes, raw_handle, told)

    def get(self, number: int) -> RegionMemory | None:
        return self._regions.get(number)

    def detach(self, number: int) -> None:
        self._regions.pop(number).close()

    def view(self, place: Place) -> memoryview:
        """Return the bytes of a place in system memory. Raise as ``SystemRegion.view``, or ``KeyError``."""
        region = self._regions[place.region]
        if not isinstance(region, SystemRegion):
            raise ValueError(f"region {place.region} is not of system memory")
        return region.view(place)

    def is_locked(self, number: int) -> bool:
        """Return whether a region is system memory that the device can copy from and to directly."""
        region = self._regions.get(number)
        return isinstance(region, SystemRegion) and region.is_locked()

    def __getitem__(self, number: int) -> RegionMemory:
        return self._regions[number]

    def wait_reads(self) -> None:
        if self._opener is not None:
            self._opener.wait_reads()

    def check(self, place: Place) -> None:
        """Check a place after a view of it was used. Do nothing for a region of a front that is gone."""
        region = self._regions.get(place.region)
        if region is not None:
            region.check(place)

    def close(self) -> None:
        for number in list(self._regions):
            self.detach(number)
