"""Memory of a client that a server knows as a region: of the host in /dev/shm, or of the device by its IPC
handle. Both are there while a block lasts, and hold a tensor each.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from benchmarks.gpu.running.section import SectionSkipped
from benchmarks.gpu.served.calls import Caller
from benchmarks.gpu.served.messages import InRegion, in_regions

_SHM: Final = Path("/dev/shm")


class HostRegion:
    """A region in /dev/shm under this name. Made by ``host_region``."""

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        self.name = name
        self._memory = memory

    def write(self, data: NDArray[Any]) -> None:
        """Put bytes at its start."""
        self._memory[: data.nbytes] = data.tobytes()

    def read(self, nbytes: int) -> NDArray[np.uint8]:
        """A copy of the bytes at its start."""
        return np.frombuffer(self._memory[:nbytes], np.uint8)


class DeviceRegion:
    """A region on the device. Made by ``device_region``."""

    def __init__(self, name: str, address: int, runtime: Any) -> None:
        self.name = name
        self._address = address
        self._runtime = runtime

    def write(self, data: NDArray[Any]) -> None:
        """Put bytes at its start; they are there when it returns."""
        self._runtime.memcpy(self._address, data.ctypes.data, data.nbytes, 1)
        self._runtime.deviceSynchronize()

    def read(self, nbytes: int) -> NDArray[np.uint8]:
        """A copy of the bytes at its start."""
        data = np.empty(nbytes, np.uint8)
        self._runtime.memcpy(data.ctypes.data, self._address, nbytes, 2)
        return data


@contextmanager
def host_region(caller: Caller, nbytes: int) -> Iterator[HostRegion]:
    """Registered memory of the host.

    Raises:
        SectionSkipped: /dev/shm has no room for it.
        grpc.RpcError: the server refused it.
    """
    shared = os.statvfs(_SHM)
    if shared.f_bavail * shared.f_frsize < nbytes:
        raise SectionSkipped(f"{_SHM} has no room for a region of {nbytes >> 10} KiB")
    name = f"gpu-check-{uuid.uuid4().hex}"
    file = _SHM / name
    file.touch(mode=0o600)
    try:
        os.truncate(file, nbytes)
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), nbytes) as memory:
            request = service_pb2.SystemSharedMemoryRegisterRequest(
                name=name, key=f"/{name}", byte_size=nbytes
            )
            caller.call("SystemSharedMemoryRegister", request.SerializeToString())
            try:
                yield HostRegion(name, memory)
            finally:
                _forget(caller, "SystemSharedMemoryUnregister", name)
    finally:
        file.unlink()


@contextmanager
def host_requests(caller: Caller, model: str, nbytes: int, count: int) -> Iterator[list[bytes]]:
    """Requests of one FP32 tensor in and one out, each with registered memory of its own for both.

    Raises:
        SectionSkipped: /dev/shm has no room for them.
        grpc.RpcError: the server refused it.
    """
    shape = (nbytes // 4,)
    with ExitStack() as stack:
        messages = []
        for _ in range(count):
            given, answered = (stack.enter_context(host_region(caller, nbytes)) for _ in range(2))
            given.write(np.zeros(shape, np.float32))
            inputs = {"x": InRegion(given.name, shape, "float32")}
            messages.append(in_regions(model, inputs, {"y": InRegion(answered.name, shape, "float32")}))
        yield messages


@contextmanager
def device_region(caller: Caller, nbytes: int) -> Iterator[DeviceRegion]:
    """Registered memory of the first device.

    Raises:
        grpc.RpcError: the server refused it.
    """
    import cupy

    runtime = cupy.cuda.runtime
    name = f"gpu-check-{uuid.uuid4().hex}"
    address = runtime.malloc(nbytes)
    try:
        handle = bytes(runtime.ipcGetMemHandle(address))
        request = service_pb2.CudaSharedMemoryRegisterRequest(
            name=name, raw_handle=handle, device_id=0, byte_size=nbytes
        )
        caller.call("CudaSharedMemoryRegister", request.SerializeToString())
        try:
            yield DeviceRegion(name, address, runtime)
        finally:
            _forget(caller, "CudaSharedMemoryUnregister", name)
    finally:
        runtime.free(address)


def _forget(caller: Caller, method: str, name: str) -> None:
    request = service_pb2.CudaSharedMemoryUnregisterRequest(name=name)  # both have the one field
    try:
        caller.call(method, request.SerializeToString())
    except grpc.RpcError:
        pass  # the section may have done it, or the server be gone
