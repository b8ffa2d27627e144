"""A client of a server under check: requests as bytes, single calls over gRPC, and registered regions of
memory, of the host in /dev/shm or of the device by its IPC handle.
"""

from __future__ import annotations

import importlib
import mmap
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from benchmarks.gpu.running.section import SectionFailed, SectionSkipped
from benchmarks.servers.server import RunningServer

_SERVICE: Final = "/inference.GRPCInferenceService/"
OPTIONS: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
TIMEOUT_S: Final = 30.0


class Caller:
    """Calls on one channel. Made by ``calling``."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def call(self, method: str, message: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        """The answer's bytes. Raises grpc.RpcError: the call failed."""
        answer: bytes = self._channel.unary_unary(_SERVICE + method)(message, timeout=timeout_s)
        return answer

    def infer(self, message: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        return self.call("ModelInfer", message, timeout_s)

    def start(self, message: bytes, timeout_s: float = TIMEOUT_S) -> Any:
        """A ModelInfer whose answer is waited for later: a ``grpc.Future``."""
        return self._channel.unary_unary(f"{_SERVICE}ModelInfer").future(message, timeout=timeout_s)

    def failure(self, message: bytes, timeout_s: float = TIMEOUT_S) -> str | None:
        """The status and the text with which a ModelInfer fails; None where it does not."""
        try:
            self.infer(message, timeout_s)
        except grpc.RpcError as error:
            return status_text(error)
        return None


@contextmanager
def calling(one: RunningServer) -> Iterator[Caller]:
    """A channel to the server, while the context lasts."""
    with grpc.insecure_channel(f"127.0.0.1:{one.ports.grpc}", options=OPTIONS) as channel:
        yield Caller(channel)


def status_text(error: Any) -> str:
    return f"{error.code().name}: {error.details()}"


_DATATYPES = {"float32": "FP32", "int32": "INT32", "uint8": "UINT8"}


@dataclass(frozen=True, slots=True)
class InRegion:
    """A tensor of ``shape`` at the start of a client's region."""

    region: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def with_bytes(model: str, tensors: Mapping[str, NDArray[Any]]) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in tensors.items():
        request.inputs.add(name=name, datatype=_DATATYPES[array.dtype.name], shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return bytes(request.SerializeToString())


def in_regions(model: str, inputs: Mapping[str, InRegion], outputs: Mapping[str, InRegion]) -> bytes:
    """A ModelInferRequest whose tensors lie in regions, as those of its answer will."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, one in inputs.items():
        added = request.inputs.add(name=name, datatype=_DATATYPES[one.dtype], shape=one.shape)
        _place(added.parameters, one)
    for name, one in outputs.items():
        _place(request.outputs.add(name=name).parameters, one)
    return bytes(request.SerializeToString())


def answer_array(answer: bytes, output: str, dtype: str) -> NDArray[Any]:
    """An output that an answer carries. Raises KeyError: it carries none of that name."""
    response = service_pb2.ModelInferResponse.FromString(answer)
    for one, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if one.name == output:
            return np.frombuffer(raw, dtype).reshape(tuple(one.shape))
    raise KeyError(f"the answer carries no {output!r}")


def _place(parameters: Any, one: InRegion) -> None:
    parameters["shared_memory_region"].string_param = one.region
    parameters["shared_memory_byte_size"].int64_param = one.nbytes


_SHM: Final = Path("/dev/shm")


class HostRegion:
    """A region in /dev/shm under this name. Made by ``host_region``."""

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        self.name = name
        self._memory = memory

    def write(self, data: NDArray[Any]) -> None:
        self._memory[: data.nbytes] = data.tobytes()

    def read(self, nbytes: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._memory[:nbytes], np.uint8)


class DeviceRegion:
    """A region on the device. Made by ``device_region``."""

    def __init__(self, name: str, address: int, runtime: Any) -> None:
        self.name = name
        self._address = address
        self._runtime = runtime

    def write(self, data: NDArray[Any]) -> None:
        self._runtime.memcpy(self._address, data.ctypes.data, data.nbytes, 1)
        self._runtime.deviceSynchronize()

    def read(self, nbytes: int) -> NDArray[np.uint8]:
        data = np.empty(nbytes, np.uint8)
        self._runtime.memcpy(data.ctypes.data, self._address, nbytes, 2)
        return data


@contextmanager
def host_region(caller: Caller, nbytes: int) -> Iterator[HostRegion]:
    """Registered memory of the host. Raises SectionSkipped: /dev/shm has no room for it; grpc.RpcError: the
    server refused it.
    """
    shared = os.statvfs(_SHM)
    if shared.f_bavail * shared.f_frsize < nbytes:
        raise SectionSkipped(f"{_SHM} has no room for a region of {nbytes >> 10} KiB")
    name = f"gpu-check-{uuid.uuid4().hex}"
    file = _SHM / name
    file.touch(mode=0o600)
    try:
        os.truncate(file, nbytes)
        with (
            file.open("r+b") as opened,
            mmap.mmap(opened.fileno(), nbytes) as memory,
            _registered(caller, "System", name, key=f"/{name}", byte_size=nbytes),
        ):
            yield HostRegion(name, memory)
    finally:
        file.unlink()


@contextmanager
def host_requests(caller: Caller, model: str, nbytes: int, count: int) -> Iterator[list[bytes]]:
    """Requests of one FP32 tensor in and one out, each with registered memory of its own for both. Raises
    SectionSkipped: /dev/shm has no room for them; grpc.RpcError: the server refused it.
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
    """Registered memory of the first device. Raises grpc.RpcError: the server refused it."""
    import cupy

    runtime = cupy.cuda.runtime
    name = f"gpu-check-{uuid.uuid4().hex}"
    address = runtime.malloc(nbytes)
    try:
        handle = bytes(runtime.ipcGetMemHandle(address))
        with _registered(caller, "Cuda", name, raw_handle=handle, device_id=0, byte_size=nbytes):
            yield DeviceRegion(name, address, runtime)
    finally:
        runtime.free(address)


@contextmanager
def _registered(caller: Caller, kind: str, name: str, **fields: Any) -> Iterator[None]:
    request = getattr(service_pb2, f"{kind}SharedMemoryRegisterRequest")(name=name, **fields)
    caller.call(f"{kind}SharedMemoryRegister", request.SerializeToString())
    try:
        yield
    finally:
        request = service_pb2.CudaSharedMemoryUnregisterRequest(name=name)  # both have the one field
        with suppress(grpc.RpcError):  # the section may have done it, or the server be gone
            caller.call(f"{kind}SharedMemoryUnregister", request.SerializeToString())


def used_nbytes() -> int:
    """Bytes in use on the first GPU of this machine. Raises SectionFailed: the library is not there, or does
    not tell.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used)
        finally:
            nvml.nvmlShutdown()
    except Exception as error:  # its errors have no common base without the module
        raise SectionFailed(f"the memory in use cannot be told: {error}") from None
