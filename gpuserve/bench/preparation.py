"""From the options to what the processes that load are told: requests as bytes, placed in memory.

The server is asked here for its metadata and for one answer. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.bench import payloads
from gpuserve.bench.control import Control
from gpuserve.bench.errors import BenchOptionError
from gpuserve.bench.input_files import OPTION, read_requests
from gpuserve.bench.inputs import Array, Fill, content, fitted, made_up
from gpuserve.bench.messages import Setup
from gpuserve.bench.model_metadata import ModelMetadata, request_shapes
from gpuserve.bench.payloads import Place, Tensors
from gpuserve.bench.plan import Plan, SharedMemory
from gpuserve.bench.regions import Regions
from gpuserve.bench.target import Target

_ALIGNMENT: Final = 64
#: Requests in flight at once write to so many different places of the output region.
_MAX_OUTPUT_PLACES: Final = 64
_MAX_OUTPUT_NBYTES: Final = 1 << 30


@dataclass(frozen=True)
class Data:
    """What requests hold. ``file`` None: made up."""

    file: str | None = None
    fill: Fill = Fill.RANDOM
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
        """Of ``random``, ``zero`` or the name of a file."""
        fills = {fill.value: fill for fill in Fill}
        file = None if text in fills else text
        return cls(file, fills.get(text, Fill.RANDOM), shapes, batch_size, string_length, seed)


def request_arrays(model: ModelMetadata, data: Data) -> list[dict[str, Array]]:
    """The tensors of every request, sent in turn.

    Raises:
        BenchOptionError: they do not fit the model, or the file cannot be read.
    """
    if data.file is None:
        shapes = request_shapes(model, data.shapes or {}, data.batch_size)
        return [made_up(model, shapes, data.fill, data.string_length, data.seed)]
    if data.shapes:
        raise BenchOptionError("--shape", "the shapes are those of the file that --data names")
    return [fitted(model, one, data.batch_size, OPTION) for one in read_requests(data.file)]


def check_memory(target: Target, model: ModelMetadata, memory: SharedMemory) -> None:
    """Do nothing if the tensors of this model can lie there, over this protocol.

    Raises:
        BenchOptionError: they cannot.
    """
    if memory is not SharedMemory.NONE and model.decoupled and not target.is_grpc:
        raise BenchOptionError(
            "--shared-memory", "a stream over HTTP carries its tensors; use --protocol grpc"
        )


def place_tensors(
    control: Control,
    target: Target,
    model: ModelMetadata,
    requests: Sequence[dict[str, Array]],
    regions: Regions,
    in_flight: int,
) -> list[Tensors]:
    """The same requests with their tensors in regions; answers to several at once go to different places."""
    placed, parts = _input_places(model, requests)
    region = regions.add("in", sum(map(len, parts)), b"".join(parts))
    inputs = [
        Tensors(arrays, {name: Place(region, *where) for name, where in places.items()})
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
    model: ModelMetadata, requests: Sequence[dict[str, Array]]
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
    control: Control, target: Target, model: ModelMetadata, requests: Sequence[Tensors]
) -> dict[str, int]:
    """The largest that the answers to the first requests had."""
    sizes: dict[str, int] = {}
    for tensors in requests[:_MAX_OUTPUT_PLACES]:
        for name, nbytes in control.infer(_control_request(target, model, tensors)).items():
            sizes[name] = max(nbytes, sizes.get(name, 0))
    return sizes


def _output_places(region: str, offset: int, sizes: dict[str, int]) -> dict[str, Place]:
    places = {}
    for name, nbytes in sizes.items():
        places[name] = Place(region, offset, nbytes)
        offset += _aligned(nbytes)
    return places


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _control_request(target: Target, model: ModelMetadata, tensors: Tensors) -> Any:
    if target.is_grpc:
        return payloads.grpc_message(target, model, tensors)
    return payloads.http_infer(target, model, tensors)


def require_answer(
    control: Control, target: Target, model: ModelMetadata, requests: Sequence[Tensors]
) -> None:
    """Ask once before anything is timed; a model with streams is not asked.

    Raises:
        BenchError: it does not answer as it should.
    """
    if not model.decoupled:
        control.infer(_control_request(target, model, requests[0]))


def setup(target: Target, model: ModelMetadata, requests: Sequence[Tensors], plan: Plan) -> Setup:
    """What a process that loads has to know."""
    return Setup(
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


def _wire(target: Target, model: ModelMetadata, tensors: Tensors) -> bytes:
    if target.is_grpc:
        return payloads.framed(payloads.grpc_message(target, model, tensors))
    if model.decoupled:
        return payloads.http_bytes(target, payloads.http_stream(target, tensors))
    return payloads.http_bytes(target, payloads.http_infer(target, model, tensors))
