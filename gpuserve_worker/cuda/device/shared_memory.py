"""Device memory that several processes map: CUDA's virtual memory management, with file descriptors as
handles. The memory exists while any process has a descriptor or a mapping of it, so the supervisor keeps the
memory of a worker that has ended without using CUDA.

The addresses of a process stay the same while its model sleeps and no memory is mapped into them, so every
tensor over them is valid again afterwards.

``python -m gpuserve_worker.cuda.device.shared_memory`` tries this on the first device, and prints why not.
"""

from __future__ import annotations

import ctypes
import sys
import uuid
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from typing import Any, Final

from gpuserve_worker.cuda.device.runtime import (
    DEFAULT_STREAM,
    DRIVER,
    Copy,
    CudaError,
    CudaUnavailable,
    Runtime,
    load_runtime,
)
from gpuserve_worker.memory.device_copies import Source
from gpuserve_worker.protocol.sealed_memory import ExportedMemory

#: ``CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`` and
#: ``CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED``, with what they stand for.
_ATTRIBUTES: Final = {102: "virtual memory management", 103: "memory handles that are file descriptors"}
#: ``CU_MEM_ALLOCATION_TYPE_PINNED``, ``CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`` and
#: ``CU_MEM_LOCATION_TYPE_DEVICE``.
_PINNED, _DESCRIPTOR, _DEVICE = 1, 1, 1
#: ``CU_MEM_ACCESS_FLAGS_PROT_READ`` and ``…_PROT_READWRITE``.
_READ, _READ_WRITE = 1, 3
#: ``CUDA_ERROR_INVALID_VALUE`` and ``CUDA_ERROR_NOT_SUPPORTED``: of a driver that maps no memory for reading
#: alone.
_NOT_SUPPORTED: Final = (1, 801)


class _Property(ctypes.Structure):
    """The struct ``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location_type", ctypes.c_int),
        ("location", ctypes.c_int), ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """The struct ``CUmemAccessDesc``."""

    _fields_ = (("location_type", ctypes.c_int), ("location", ctypes.c_int), ("flags", ctypes.c_int))


class SharedDeviceMemory:
    """The memory of one device that this process shares with others; implements ``DeviceSpace``. Raise
    ``CudaError`` if the device, its driver or the container does not permit sharing.
    """

    def __init__(self, runtime: Runtime, number: int) -> None:
        self._runtime = runtime
        self._number = number
        self._driver = ctypes.CDLL(DRIVER)
        device = ctypes.c_int()
        with self._on_device():
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
            for attribute, name in _ATTRIBUTES.items():
                value = ctypes.c_int()
                self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
                if not value.value:
                    raise CudaError(801, f"the device or its driver does not support {name}")
            identity = (ctypes.c_ubyte * 16)()
            self._call("cuDeviceGetUuid_v2", ctypes.byref(identity), device)
            #: The device's UUID, which is the same in every process, unlike the device's number.
            self.uuid = str(uuid.UUID(bytes=bytes(identity)))
            self._property = _Property(_PINNED, _DESCRIPTOR, _DEVICE, device.value)
            granularity = ctypes.c_size_t()
            self._call(
                "cuMemGetAllocationGranularity",
                ctypes.byref(granularity),
                ctypes.byref(self._property),
                ctypes.c_int(0),
            )
            self._granularity = granularity.value
            self._try_out()

    def _try_out(self) -> None:
        """Share the least possible memory with this process itself, because only a call shows what a
        container permits.
        """
        with self._created(self._granularity) as handle:
            memory = self._exported(handle, self._granularity)
        address = self.map(memory)
        self.unmap(address, memory.nbytes)
        self.free(address, memory.nbytes)

    def lay(self, sources: Iterable[Source], nbytes: int, address: int = 0) -> tuple[int, ExportedMemory]:
        """Copy ``sources`` into new memory of at least ``nbytes``. Return its address and its descriptor."""
        size = -(-nbytes // self._granularity) * self._granularity
        with self._on_device():
            self._runtime.synchronize()  # another stream may still write to a source
            with self._created(size) as handle:
                memory = self._exported(handle, size)
                address = self._mapped(handle, size, address, _READ_WRITE)
            try:
                for one in sources:
                    kind = Copy.DEVICE_TO_DEVICE if one.is_on_device else Copy.HOST_TO_DEVICE
                    self._runtime.copy(address + one.offset, one.address, one.nbytes, kind, DEFAULT_STREAM)
                self._runtime.synchronize()
                self._protect(address, size)
            except BaseException:
                with suppress(CudaError):
                    self.unmap(address, size)
                raise
        return address, memory

    def map(self, memory: ExportedMemory, address: int = 0) -> int:
        """Map the memory of a descriptor at ``address``, or at new addresses if ``address`` is 0. Return the
        address.
        """
        handle = ctypes.c_uint64()
        with self._on_device():
            self._call(
                "cuMemImportFromShareableHandle",
                ctypes.byref(handle),
                ctypes.c_void_p(memory.fd),
                ctypes.c_int(_DESCRIPTOR),
            )
            try:
                return self._mapped(handle, memory.nbytes, address, _READ)
            finally:
                self._call("cuMemRelease", handle)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap memory when the device has finished its work. The addresses stay reserved."""
        with self._on_device():
            self._runtime.synchronize()
            self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        self._runtime.count(address, 0)

    def free(self, address: int, nbytes: int) -> None:
        """Give back addresses into which nothing is mapped."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    @contextmanager
    def _on_device(self) -> Any:
        """Select this device in the calling thread."""
        before = self._runtime.current_device()
        self._runtime.use_device(self._number)
        try:
            yield
        finally:
            if before != self._number:
                self._runtime.use_device(before)

    @contextmanager
    def _created(self, nbytes: int) -> Any:
        """Allocate memory, whose handle is released at the end."""
        self._runtime.check_limit(nbytes)
        handle = ctypes.c_uint64()
        self._call(
            "cuMemCreate",
            ctypes.byref(handle),
            ctypes.c_size_t(nbytes),
            ctypes.byref(self._property),
            ctypes.c_ulonglong(0),
        )
        try:
            yield handle
        finally:
            self._call("cuMemRelease", handle)

    def _exported(self, handle: ctypes.c_uint64, nbytes: int) -> ExportedMemory:
        fd = ctypes.c_int(-1)
        self._call(
            "cuMemExportToShareableHandle",
            ctypes.byref(fd),
            handle,
            ctypes.c_int(_DESCRIPTOR),
            ctypes.c_ulonglong(0),
        )
        return ExportedMemory(fd.value, nbytes, self.uuid)

    def _mapped(self, handle: ctypes.c_uint64, nbytes: int, address: int, access: int) -> int:
        """Map the memory of a handle at ``address``, or at new addresses if that is 0."""
        self._runtime.check_limit(nbytes)
        place = ctypes.c_uint64(address)
        size, zero = ctypes.c_size_t(nbytes), ctypes.c_ulonglong(0)
        if not address:
            where = ctypes.byref(place)
            self._call("cuMemAddressReserve", where, size, ctypes.c_size_t(0), ctypes.c_uint64(0), zero)
        try:
            self._call("cuMemMap", place, size, ctypes.c_size_t(0), handle, zero)
            try:
                if access == _READ:
                    self._protect(place.value, nbytes)
                else:
                    self._allow(place.value, nbytes, access)
            except CudaError:
                self._call("cuMemUnmap", place, size)
                raise
        except CudaError:
            if not address:
                self.free(place.value, nbytes)
            raise
        self._runtime.count(place.value, nbytes)
        return place.value

    def _protect(self, address: int, nbytes: int) -> None:
        """Allow the device to read the memory, and to write if the driver knows no memory to read alone."""
        try:
            self._allow(address, nbytes, _READ)
        except CudaError as error:
            if error.code not in _NOT_SUPPORTED:
                raise
            self._allow(address, nbytes, _READ_WRITE)

    def _allow(self, address: int, nbytes: int, access: int) -> None:
        description = _Access(_DEVICE, self._property.location, access)
        self._call(
            "cuMemSetAccess",
            ctypes.c_uint64(address),
            ctypes.c_size_t(nbytes),
            ctypes.byref(description),
            ctypes.c_size_t(1),
        )

    def _call(self, name: str, *arguments: Any) -> None:
        # ctypes releases the GIL: some of these calls take milliseconds.
        function: Callable[..., int] = getattr(self._driver, name)
        if status := int(function(*arguments)):
            raise CudaError(status, f"{name} failed with CUDA error {status}")


def main() -> int:
    try:
        SharedDeviceMemory(load_runtime(), 0)
    except (CudaError, CudaUnavailable, AttributeError) as error:
        sys.stdout.write(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
