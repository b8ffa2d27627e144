"""A client's region of device memory, as a worker sees it: opened by its ``cudaIpcMemHandle_t``, and copied
from and to the host.

The only module here that imports CUDA, by way of cupy, and only when a client registers such a region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from gpuserve_worker.failure import client_text
from gpuserve_worker.payloads import Place
from gpuserve_worker.regions import RegionError, check_inside

_NO_CUPY: Final = "the server has no cupy, which it needs to open device memory"


class CudaRegion:
    """One region. Made by ``open_cuda_region``; whoever made the memory may free it at any time, which CUDA
    itself takes care of.
    """

    def __init__(self, cupy: Any, device_id: int, address: int, nbytes: int) -> None:
        self._cupy = cupy
        self._device_id = device_id
        self._address = address
        self._nbytes = nbytes

    def read(self, place: Place, target: memoryview) -> None:
        """Copy a place to the host.

        Raises:
            RegionError: CUDA refused.
            ValueError: the place is not in the region.
        """
        check_inside(place, self._nbytes)
        runtime = self._cupy.cuda.runtime
        source, into = self._address + place.offset, np.frombuffer(target, np.uint8).ctypes.data
        self._copy(into, source, place.nbytes, runtime.memcpyDeviceToHost)

    def write(self, place: Place, put: Callable[[memoryview], None]) -> None:
        """Have the bytes of a place put into memory, and copy them to the device; raises as ``read``."""
        check_inside(place, self._nbytes)
        staged = bytearray(place.nbytes)
        put(memoryview(staged))
        runtime = self._cupy.cuda.runtime
        source = np.frombuffer(staged, np.uint8).ctypes.data
        self._copy(self._address + place.offset, source, place.nbytes, runtime.memcpyHostToDevice)

    def check(self, place: Place) -> None:
        """Device memory does not shrink."""

    def close(self) -> None:
        """Let go of the memory, which may be gone already."""
        runtime = self._cupy.cuda.runtime
        try:
            with self._cupy.cuda.Device(self._device_id):
                runtime.ipcCloseMemHandle(self._address)
        except runtime.CUDARuntimeError:
            pass

    def _copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        runtime = self._cupy.cuda.runtime
        try:
            with self._cupy.cuda.Device(self._device_id):
                runtime.memcpy(to, source, nbytes, kind)
        except runtime.CUDARuntimeError as error:
            raise RegionError(f"a region of CUDA memory could not be copied: {client_text(error)}") from None


def open_cuda_region(device_id: int, nbytes: int, raw_handle: bytes) -> CudaRegion:
    """Open the memory of another process.

    Raises:
        RegionError: there is no cupy, no such device, or no such memory.
    """
    try:
        import cupy
    except ImportError:
        raise RegionError(_NO_CUPY) from None
    runtime = cupy.cuda.runtime
    try:
        with cupy.cuda.Device(device_id):
            address = runtime.ipcOpenMemHandle(raw_handle)
    except runtime.CUDARuntimeError as error:
        raise RegionError(f"CUDA could not open its handle: {client_text(error)}") from None
    return CudaRegion(cupy, device_id, address, nbytes)
