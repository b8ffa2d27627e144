"""Messages of gRPC that are not as a client's library makes them."""

from __future__ import annotations

from collections.abc import Iterator

from tritonclient.grpc import service_pb2 as pb

from triton_differences.steps import Case, call, case
from triton_differences.tensors import In, Inference, grpc_raw, raw_message

_GOOD = Inference("echo_FP32", [In("x", "FP32", [1, 2], [1, 2])], id="a")


def cases() -> Iterator[Case]:
    whole = raw_message(_GOOD).SerializeToString()
    yield case("grpc message empty", call("ModelInfer", b""))
    yield case("grpc message cut", call("ModelInfer", whole[:-3]))
    yield case("grpc message of nonsense", call("ModelInfer", b"\xff\xff\xff\xff"))
    yield case("grpc unknown field", call("ModelInfer", whole + b"\xfa\x07\x03abc"))
    yield case("grpc raw contents first", call("ModelInfer", _raw_first()))
    yield case(
        "grpc model name twice", call("ModelInfer", whole + raw_message(_GOOD).SerializeToString()[:11])
    )
    yield case("grpc name not UTF-8", call("ModelInfer", b"\x0a\x02\xff\xfe"))
    yield case("grpc compressed by gzip", grpc_raw(_GOOD, compression="gzip"))
    yield case("grpc compressed by deflate", grpc_raw(_GOOD, compression="deflate"))
    for method in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryModelLoad"):
        yield case(f"grpc nonsense for {method}", call(method, b"\xff\xff\xff"))


def _raw_first() -> bytes:
    message = raw_message(_GOOD)
    raw = pb.ModelInferRequest(raw_input_contents=message.raw_input_contents)
    message.ClearField("raw_input_contents")
    return raw.SerializeToString() + message.SerializeToString()
