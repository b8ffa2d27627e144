"""From the options to what the processes that load are told: requests as bytes, placed in memory. The server
is asked here for its metadata and for one answer. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.bench.calls.messages import LoaderSetup
from gpuserve.bench.plan.errors import BenchOptionError
from gpuserve.bench.plan.plan import LoadPlan, SharedMemory
from gpuserve.bench.server import payloads
from gpuserve.bench.server.control import ServerControl
from gpuserve.bench.server.inputs import OPTION, Array, TensorFill, content, fitted, made_up, read_requests
from gpuserve.bench.server.model_metadata import TargetModel, request_shapes
from gpuserve.bench.server.payloads import TensorPlace, Tensors
from gpuserve.bench.server.regions import SharedRegions
from gpuserve.bench.server.target import Target

_ALIGNMENT: Final = 64
#: Requests in flight at once write to so many different places of the output region.
_MAX_OUTPUT_PLACES: Final = 64
_MAX_OUTPUT_NBYTES: Final = 1 << 30


@dataclass(frozen=True)
class Data:
    """What the tensors of requests hold; with ``file`` None they are made up."""

    file: str | None = None
    fill: TensorFill = TensorFill.RANDOM
    shapes: dict[str, tuple[int, ...]] | None = None
    batch_size: int = 1
    string_length: int = 32
    seed: int = 0

    @classmethod
    def of(
        cls,
        text: str,
        shapes: dict[str, tuple[int, ...]],
        batch_size: int,
        string_length: int = 32,
        seed: int = 0,
    ) -> Data:
        """The data that ``random``, ``zero`` or the name of a file stands for."""
        fills = {fill.value: fill for fill in TensorFill}
        file = None if text in fills else text
        return cls(file, fills.get(text, TensorFill.RANDOM), shapes, batch_size, string_length, seed)


def request_arrays(model: TargetModel, data: Data) -> list[dict[str, Array]]:
    """The tensors of every request, sent in turn; BenchOptionError: they do not fit, or cannot be read."""
    if data.file is None:
        shapes = request_shapes(model, data.shapes or {}, data.batch_size)
        return [made_up(model, shapes, data.fill, data.string_length, data.seed)]
    if data.shapes:
        raise BenchOptionError("--shape", "the shapes are those of the file that --data names")
    return [fitted(model, one, data.batch_size, OPTION) for one in read_requests(data.file)]


def check_memory(target: Target, model: TargetModel, memory: SharedMemory) -> None:
    """Refuse with BenchOptionError where this model's tensors cannot lie there, over this protocol."""
    if memory is not SharedMemory.NONE and model.decoupled and not target.is_grpc:
        raise BenchOptionError(
            "--shared-memory", "a stream over HTTP carries its tensors; use --protocol grpc"
        )


def place_tensors(
    control: ServerControl,
    target: Target,
    model: TargetModel,
    requests: Sequence[dict[str, Array]],
    regions: SharedRegions,
    in_flight: int,
) -> list[Tensors]:
    """The same requests with their tensors in regions; answers to several at once go to different places."""
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
    return [
        inputs[copy % len(inputs)]._replace(output_places=_output_places(region, copy * nbytes, sizes))
        for copy in range(copies)
    ]


def _input_places(
    model: TargetModel, requests: Sequence[dict[str, Array]]
) -> tuple[list[dict[str, tuple[int, int]]], list[bytes]]:
    """(offset, bytes) of every input of every request, and what a region with all of them holds."""
    datatypes = {one.name: one.datatype for one in model.inputs}
    parts: list[bytes] = []
    offset = 0
    placed = []
    for arrays in requests:
        places = {}
        for name, array in arrays.items():
            data = content(array, datatypes[name])
            places[name] = (offset, len(data))
            parts.append(data.ljust(_aligned(len(data)), b"\0"))
            offset += len(parts[-1])
        placed.append(places)
    return placed, parts


def _output_sizes(
    control: ServerControl, target: Target, model: TargetModel, requests: Sequence[Tensors]
) -> dict[str, int]:
    """The largest that the answers to the first requests had."""
    sizes: dict[str, int] = {}
    for tensors in requests[:_MAX_OUTPUT_PLACES]:
        for name, nbytes in control.infer(_control_request(target, model, tensors)).items():
            sizes[name] = max(nbytes, sizes.get(name, 0))
    return sizes


def _output_places(region: str, offset: int, sizes: dict[str, int]) -> dict[str, TensorPlace]:
    places = {}
    for name, nbytes in sizes.items():
        places[name] = TensorPlace(region, offset, nbytes)
        offset += _aligned(nbytes)
    return places


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _control_request(target: Target, model: TargetModel, tensors: Tensors) -> Any:
    if target.is_grpc:
        return payloads.grpc_message(target, model, tensors)
    return payloads.http_infer(target, model, tensors)


def require_answer(
    control: ServerControl, target: Target, model: TargetModel, requests: Sequence[Tensors]
) -> None:
    """Ask once before anything is timed, but for streams; BenchError: it does not answer as it should."""
    if not model.decoupled:
        control.infer(_control_request(target, model, requests[0]))


def setup(target: Target, model: TargetModel, requests: Sequence[Tensors], plan: LoadPlan) -> LoaderSetup:
    """What every process that sends requests is told at its start."""
    return LoaderSetup(
        target.url.host,
        target.url.port,
        target.tls,
        target.is_grpc,
        payloads.call_head(target, in_streams=model.decoupled) if target.is_grpc else b"",
        [_wire(target, model, one) for one in requests],
        model.decoupled,
        target.timeout_s,
        min(plan.drain_s, target.timeout_s),
        -(-plan.max_in_flight // plan.processes),
    )


def _wire(target: Target, model: TargetModel, tensors: Tensors) -> bytes:
    if target.is_grpc:
        return payloads.framed(payloads.grpc_message(target, model, tensors))
    if model.decoupled:
        return payloads.http_bytes(target, payloads.http_stream(target, tensors))
    return payloads.http_bytes(target, payloads.http_infer(target, model, tensors))
