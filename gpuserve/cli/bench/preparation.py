"""Preparation of a run: options become requests as bytes, and tensors get places in shared memory. The server
is asked for its metadata and for one answer. Nothing is timed.
"""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpuserve.cli.bench import request_payloads as payloads
from gpuserve.cli.bench import request_tensors as tensors_of
from gpuserve.cli.bench.load_plan import BenchError, BenchOptionError, LoadPlan, SharedMemory
from gpuserve.cli.bench.loader_messages import LoaderSetup
from gpuserve.cli.bench.request_payloads import Target, TensorPlace, Tensors
from gpuserve.cli.bench.request_tensors import Array, TargetModel, TensorFill
from gpuserve.cli.bench.server_control import ServerControl

_ALIGNMENT: Final = 64
#: The most places in the output region, for requests that are in flight at the same time.
_MAX_OUTPUT_PLACES: Final = 64
_MAX_OUTPUT_NBYTES: Final = 1 << 30


@dataclass(frozen=True)
class RequestData:
    """The content of requests' tensors: ``source`` is a ``TensorFill`` or the name of a file."""

    source: str
    shapes: dict[str, tuple[int, ...]]
    batch_size: int = 1
    string_length: int = 32
    seed: int = 0


def request_arrays(model: TargetModel, data: RequestData) -> list[dict[str, Array]]:
    """Return the tensors of requests, sent in turn. Raise BenchOptionError if they are unfit."""
    if data.source in {fill.value for fill in TensorFill}:
        shapes, fill = tensors_of.request_shapes(model, data.shapes, data.batch_size), TensorFill(data.source)
        return [tensors_of.generated_tensors(model, shapes, fill, data.string_length, data.seed)]
    if data.shapes:
        raise BenchOptionError("--shape", "does not go with a file as --data, which has shapes of its own")
    given = tensors_of.read_requests(data.source)
    return [tensors_of.fitted_tensors(model, one, data.batch_size) for one in given]


def place_tensors(
    control: ServerControl,
    target: Target,
    model: TargetModel,
    requests: Sequence[dict[str, Array]],
    regions: SharedRegions,
    in_flight: int,
) -> list[Tensors]:
    """Return the requests with their tensors in regions; answers in flight together have different places."""
    placed, parts = _input_places(model, requests)
    region = regions.add("in", sum(map(len, parts)), b"".join(parts))
    inputs = [
        Tensors(arrays, {name: TensorPlace(region, *where) for name, where in places.items()})
        for arrays, places in zip(requests, placed, strict=True)
    ]
    if model.decoupled:
        return inputs
    sizes = _output_sizes(control, target, model, inputs)
    nbytes = sum(map(_aligned, sizes.values()))
    copies = max(1, min(in_flight, _MAX_OUTPUT_PLACES, _MAX_OUTPUT_NBYTES // max(nbytes, 1)))
    copies = max(copies, len(inputs))
    region = regions.add("out", copies * nbytes)
    found = []
    for copy in range(copies):
        places, offset = {}, copy * nbytes
        for name, size in sizes.items():
            places[name] = TensorPlace(region, offset, size)
            offset += _aligned(size)
        found.append(inputs[copy % len(inputs)]._replace(output_places=places))
    return found


def _input_places(
    model: TargetModel, requests: Sequence[dict[str, Array]]
) -> tuple[list[dict[str, tuple[int, int]]], list[bytes]]:
    """Return (offset, size in bytes) of every input of every request, and the content of their region."""
    datatypes = {one.name: one.datatype for one in model.inputs}
    parts: list[bytes] = []
    offset = 0
    placed = []
    for arrays in requests:
        places = {}
        for name, array in arrays.items():
            data = tensors_of.tensor_bytes(array, datatypes[name])
            places[name] = (offset, len(data))
            parts.append(data.ljust(_aligned(len(data)), b"\0"))
            offset += len(parts[-1])
        placed.append(places)
    return placed, parts


def _output_sizes(
    control: ServerControl, target: Target, model: TargetModel, requests: Sequence[Tensors]
) -> dict[str, int]:
    """Return the largest size of each output in the answers to the first requests."""
    sizes: dict[str, int] = {}
    for tensors in requests[:_MAX_OUTPUT_PLACES]:
        for name, nbytes in control.infer(_control_request(target, model, tensors)).items():
            sizes[name] = max(nbytes, sizes.get(name, 0))
    return sizes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _control_request(target: Target, model: TargetModel, tensors: Tensors) -> Any:
    if target.is_grpc:
        return payloads.grpc_message(target, model, tensors)
    return payloads.http_infer(target, model, tensors)


def require_answer(
    control: ServerControl, target: Target, model: TargetModel, requests: Sequence[Tensors]
) -> None:
    """Send one request before anything is timed, unless the model streams. Raise BenchError on failure."""
    if not model.decoupled:
        control.infer(_control_request(target, model, requests[0]))


def loader_setup(
    target: Target, model: TargetModel, requests: Sequence[Tensors], plan: LoadPlan
) -> LoaderSetup:
    """Return the setup message of the processes that send requests."""
    return LoaderSetup(
        target.url.host,
        target.url.port,
        target.tls,
        target.is_grpc,
        payloads.grpc_header_block(target, in_streams=model.decoupled) if target.is_grpc else b"",
        [_request_bytes(target, model, one) for one in requests],
        model.decoupled,
        target.timeout_s,
        min(plan.drain_s, target.timeout_s),
        -(-plan.max_in_flight // plan.processes),
    )


def _request_bytes(target: Target, model: TargetModel, tensors: Tensors) -> bytes:
    if target.is_grpc:
        return payloads.grpc_frame(payloads.grpc_message(target, model, tensors))
    if model.decoupled:
        return payloads.http_bytes(target, payloads.http_stream(target, tensors))
    return payloads.http_bytes(target, payloads.http_infer(target, model, tensors))


_UNREGISTER_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.02
_CUDA_DEVICE: Final = 0


class SharedRegions:
    """The shared memory of a run, until ``stack`` is closed. Raises BenchError without a GPU or a package."""

    def __init__(self, kind: SharedMemory, control: ServerControl, stack: contextlib.ExitStack) -> None:
        self._is_cuda = kind is SharedMemory.CUDA
        self._control = control
        self._library = _memory_library(self._is_cuda)
        self._stack = stack

    def add(self, role: str, nbytes: int, content: bytes = b"") -> str:
        """Create and register a region, and return its name. Raise BenchError if that fails."""
        name = f"gpuserve-bench-{os.getpid()}-{role}"
        self._stack.enter_context(self._region(name, max(nbytes, 1), content))
        return name

    @contextlib.contextmanager
    def _region(self, name: str, nbytes: int, content: bytes) -> Iterator[None]:
        try:
            args: tuple[Any, ...] = (nbytes, _CUDA_DEVICE) if self._is_cuda else (f"/{name}", nbytes)
            handle = self._library.create_shared_memory_region(name, *args)
        except Exception as error:  # tritonclient has an error class for each kind of memory
            raise BenchError(f"cannot create {nbytes} bytes of shared memory: {error}") from None
        try:
            if content:
                self._library.set_shared_memory_region(handle, [np.frombuffer(content, np.uint8)])
            if self._is_cuda:
                raw = base64.b64decode(self._library.get_raw_handle(handle))
                self._control.register_cuda(name, raw, _CUDA_DEVICE, nbytes)
            else:
                self._control.register_system(name, f"/{name}", nbytes)
            try:
                yield
            finally:
                self._unregister(name)
        finally:
            self._library.destroy_shared_memory_region(handle)

    def _unregister(self, name: str) -> None:
        """Unregister a region, with retries while the server's last answer may use it."""
        deadline = time.monotonic() + _UNREGISTER_TIMEOUT_S
        while True:
            try:
                self._control.unregister(name, cuda=self._is_cuda)
                return
            except BenchError:
                if time.monotonic() > deadline:
                    return
                time.sleep(_RETRY_S)


def _memory_library(is_cuda: bool) -> Any:
    if not is_cuda:
        from tritonclient.utils import shared_memory

        return shared_memory
    try:
        from tritonclient.utils import cuda_shared_memory
    except Exception as error:  # missing or mismatched bindings raise various errors
        raise BenchError(
            "--shared-memory cuda needs a GPU and the packages of tritonclient[cuda]: "
            f"{type(error).__name__}: {error}"
        ) from None
    return cuda_shared_memory
