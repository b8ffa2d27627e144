"""Statistics and the names of the metrics: sections 2.10 and 2.19. Counts are compared, times are not."""

from __future__ import annotations

from collections.abc import Iterator

from tritonclient.grpc import service_pb2 as pb

from triton_differences.steps import METRICS, Case, Step, call, case, get, http, stream
from triton_differences.tensors import In, Inference, grpc_raw, raw_message

_TIMES = ("ns", "last_inference", "memory_usage")
_USED = Inference("echo_UINT8", [In("x", "UINT8", [3, 2], range(6))])
_WRONG = Inference("echo_UINT8", [In("x", "UINT8", [3, 2], range(5))])
_FAILING = Inference("fails", [In("x", "INT32", [1], [0])])
_RAISING = Inference("fails", [In("x", "INT32", [1], [6])])
_GOOD = Inference("fails", [In("x", "INT32", [1], [9])])
_THREE = Inference("repeat", [In("count", "INT32", [1], [3])])


def _of(name: str, version: str = "") -> Step:
    return call("ModelStatistics", pb.ModelStatisticsRequest(name=name, version=version))


def cases() -> Iterator[Case]:
    for name in ("simple", "repeat", "unknown", "unloaded"):
        yield case(f"http statistics of {name}", get(f"/v2/models/{name}/stats"), ignore=_TIMES)
        yield case(f"grpc statistics of {name}", _of(name), ignore=_TIMES)
    used = (*map(grpc_raw, (_USED, _WRONG, _USED)), _of("echo_UINT8"))
    yield case("grpc statistics after use", *used, ignore=_TIMES)
    yield case("http statistics of a version", get("/v2/models/echo_UINT8/versions/1/stats"), ignore=_TIMES)
    failed = (*map(grpc_raw, (_GOOD, _FAILING, _RAISING)), _of("fails"))
    yield case("grpc statistics after failures", *failed, ignore=_TIMES)
    streamed = (stream(raw_message(_THREE)), stream(raw_message(_THREE)), _of("repeat"))
    yield case("grpc statistics after a stream", *streamed, ignore=_TIMES)
    yield case("http statistics after a stream", get("/v2/models/repeat/stats"), ignore=_TIMES)
    yield case("http statistics of an unknown version", get("/v2/models/echo_UINT8/versions/9/stats"))
    yield case("grpc statistics of an unknown version", _of("echo_UINT8", "9"))
    yield case("grpc statistics of a bad version", _of("echo_UINT8", "x"))
    yield case("http statistics of all", get("/v2/models/stats"), ignore=["model_stats"])
    yield case("grpc statistics of all", _of(""), ignore=["model_stats"])
    yield case("metrics after use", http("GET", "/metrics", port=METRICS))
