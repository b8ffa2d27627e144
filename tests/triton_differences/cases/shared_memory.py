"""Regions of system and CUDA shared memory: sections 2.8 and 2.9. ``wire`` makes the objects."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from triton_differences.steps import Case, Step, call, case, get, post
from triton_differences.tensors import In, Inference, Out, message

_KEY = "/triton_differences_in"
_OUT = "/triton_differences_out"
_FLOATS = struct.pack("<4f", 1, 2, 3, 4)
_REGIONS = {_KEY: _FLOATS + bytes(48), _OUT: bytes(64)}
_SYSTEM = "/v2/systemsharedmemory"
_CUDA = "/v2/cudasharedmemory"


def _register(name: str, key: str, nbytes: int, offset: int = 0) -> Step:
    request = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=nbytes)
    return call("SystemSharedMemoryRegister", request)


def _status(name: str = "") -> Step:
    return call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name=name))


def _unregister(name: str = "") -> Step:
    return call("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=name))


_BOTH = (_register("in", _KEY, 64), _register("out", _OUT, 64))


def cases() -> Iterator[Case]:
    yield from _life()
    yield from _http_bodies()
    yield from _refused()
    yield from _inferences()
    yield from _cuda()


def _life() -> Iterator[Case]:
    yield case("shm status of none", _status(), get(f"{_SYSTEM}/status"))
    yield case("shm status of unknown", _status("x"), get(f"{_SYSTEM}/region/x/status"))
    yield case("shm unregister unknown", _unregister("x"), post(f"{_SYSTEM}/region/x/unregister"))
    yield case("shm unregister all of none", _unregister(), post(f"{_SYSTEM}/unregister"))
    register = post(f"{_SYSTEM}/region/in/register", {"key": _KEY, "offset": 8, "byte_size": 16})
    steps = (register, get(f"{_SYSTEM}/status"), get(f"{_SYSTEM}/region/in/status"), _status("in"))
    yield case(
        "shm registered by http", *steps, post(f"{_SYSTEM}/region/in/unregister"), _status(), regions=_REGIONS
    )
    yield case(
        "shm registered by grpc",
        *_BOTH,
        _status("in"),
        _unregister("in"),
        _status(),
        _unregister(),
        regions=_REGIONS,
    )
    yield case("shm registered twice", *_BOTH[:1], *_BOTH[:1], _unregister(), regions=_REGIONS)
    other = _register("in", _OUT, 8)
    yield case("shm name taken", *_BOTH[:1], other, _unregister(), regions=_REGIONS)
    asked_as_cuda = call("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(name="in"))
    yield case("shm asked for as cuda", *_BOTH[:1], asked_as_cuda, _unregister(), regions=_REGIONS)


def _http_bodies() -> Iterator[Case]:
    for name, body in {
        "no body": b"",
        "no key": {"byte_size": 8},
        "no byte_size": {"key": _KEY},
        "no offset": {"key": _KEY, "byte_size": 8},
        "key as number": {"key": 1, "byte_size": 8},
        "byte_size as text": {"key": _KEY, "byte_size": "8"},
        "byte_size negative": {"key": _KEY, "byte_size": -8},
        "offset negative": {"key": _KEY, "byte_size": 8, "offset": -8},
        "not JSON": b"{",
        "list": [],
    }.items():
        yield case(
            f"shm register: {name}",
            post(f"{_SYSTEM}/region/in/register", body),
            _unregister(),
            regions=_REGIONS,
        )


def _refused() -> Iterator[Case]:
    for name, step in {
        "unknown key": _register("in", "/triton_differences_none", 8),
        "empty key": _register("in", "", 8),
        "key of a slash": _register("in", "/", 8),
        "key with a path": _register("in", "/../etc/passwd", 8),
        "key without a slash": _register("in", _KEY[1:], 8),
        "reserved key": _register("in", "/triton_python_backend_shm_region_1", 8),
        "empty name": _register("", _KEY, 8),
        "larger than the object": _register("in", _KEY, 65),
        "offset behind the object": _register("in", _KEY, 8, 64),
        "offset and size behind it": _register("in", _KEY, 32, 40),
        "huge": _register("in", _KEY, 2**63, 2**63),
        "size of zero": _register("in", _KEY, 0),
    }.items():
        yield case(f"shm register: {name}", step, _status(), _unregister(), regions=_REGIONS)


def _where(region: str, nbytes: int | None = 16, **more: Any) -> dict[str, Any]:
    size = {} if nbytes is None else {"shared_memory_byte_size": nbytes}
    return {"shared_memory_region": region, **size, **more}


def _echo(given: dict[str, Any], wanted: dict[str, Any] | None = None, datatype: str = "FP32") -> Inference:
    outputs = [] if wanted is None else [Out("y", wanted)]
    return Inference(f"echo_{datatype}", [In("x", datatype, [1, 4], parameters=given)], outputs)


_INFERENCES: dict[str, Inference] = {
    "input": _echo(_where("in")),
    "input at an offset": _echo(_where("in", shared_memory_offset=16)),
    "output": _echo(_where("in"), _where("out", 64)),
    "output at an offset": _echo(_where("in"), _where("out", 16, shared_memory_offset=32)),
    "output into the input": _echo(_where("in"), _where("in", 16, shared_memory_offset=32)),
    "unknown region": _echo(_where("none")),
    "unknown output region": _echo(_where("in"), _where("none")),
    "no byte size": _echo(_where("in", None)),
    "no byte size of the output": _echo(_where("in"), _where("out", None)),
    "offset without a region": _echo({"shared_memory_offset": 8}),
    "byte size without a region": _echo({"shared_memory_byte_size": 8}),
    "too small for the input": _echo(_where("in", 12)),
    "too large for the input": _echo(_where("in", 20)),
    "behind the region": _echo(_where("in", 16, shared_memory_offset=56)),
    "offset behind the region": _echo(_where("in", 16, shared_memory_offset=100)),
    "size of the output too small": _echo(_where("in"), _where("out", 8)),
    "output behind the region": _echo(_where("in"), _where("out", 16, shared_memory_offset=60)),
    "region as number": _echo({"shared_memory_region": 1, "shared_memory_byte_size": 16}),
    "byte size as text": _echo({"shared_memory_region": "in", "shared_memory_byte_size": "16"}),
    "byte size negative": _echo(_where("in", -16)),
    "offset negative": _echo(_where("in", shared_memory_offset=-4)),
    "output classified": _echo(_where("in"), {**_where("out"), "classification": 2}),
    "strings that are none": _echo(_where("in", 16), datatype="BYTES"),
}


def _inferences() -> Iterator[Case]:
    for name, request in _INFERENCES.items():
        for written in (_as_http, _as_grpc):
            yield case(
                f"shm {written.__name__[4:]} infer: {name}",
                *_BOTH,
                written(request),
                _unregister(),
                regions=_REGIONS,
            )
    with_contents = message(_echo(_where("in")))
    with_contents.inputs[0].contents.fp32_contents.extend([1, 2, 3, 4])
    yield case(
        "shm grpc infer: contents too",
        *_BOTH,
        call("ModelInfer", with_contents),
        _unregister(),
        regions=_REGIONS,
    )
    inputs = [In("INPUT0", "INT32", [1, 16], parameters=_where("in", 64)), In("INPUT1", "INT32", [1, 16])]
    mixed = message(Inference("simple", inputs))
    mixed.raw_input_contents.append(bytes(64))
    yield case(
        "shm grpc infer: one input raw", *_BOTH, call("ModelInfer", mixed), _unregister(), regions=_REGIONS
    )


def _as_grpc(request: Inference) -> Step:
    return call("ModelInfer", message(request))


def _as_http(request: Inference) -> Step:
    inputs = [
        {"name": one.name, "datatype": one.datatype, "shape": list(one.shape), "parameters": one.parameters}
        for one in request.inputs
    ]
    outputs = [{"name": one.name, "parameters": one.parameters} for one in request.outputs]
    return post(request.path, {"inputs": inputs} | ({"outputs": outputs} if outputs else {}))


def _cuda() -> Iterator[Case]:
    status = pb.CudaSharedMemoryStatusRequest
    yield case("cuda shm status", call("CudaSharedMemoryStatus"), get(f"{_CUDA}/status"))
    yield case(
        "cuda shm status of unknown",
        call("CudaSharedMemoryStatus", status(name="x")),
        get(f"{_CUDA}/region/x/status"),
    )
    yield case(
        "cuda shm unregister", call("CudaSharedMemoryUnregister"), post(f"{_CUDA}/region/x/unregister")
    )
    bad = pb.CudaSharedMemoryRegisterRequest(name="x", raw_handle=bytes(64), device_id=0, byte_size=8)
    yield case("cuda shm register", call("CudaSharedMemoryRegister", bad))
    body = {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 8}
    yield case("cuda shm register of a short handle", post(f"{_CUDA}/region/x/register", body))
    for name in body:
        left = {key: value for key, value in body.items() if key != name}
        yield case(f"cuda shm register without {name}", post(f"{_CUDA}/region/x/register", left))
