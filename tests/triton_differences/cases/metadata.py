"""Health, metadata, configuration, versions and paths: sections 0.4, 1.1 and 1.4."""

from __future__ import annotations

from collections.abc import Iterator

from tritonclient.grpc import service_pb2 as pb

from triton_differences.steps import METRICS, Case, call, case, get, http, post

#: The configuration has much of Triton's own in it; these parts mean the same to both.
_CONFIG_IGNORED = (
    *("backend", "parameters", "instance_group", "optimization", "default_model_filename", "version_policy"),
    *("dynamic_batching", "cc_model_filenames", "metric_tags", "batch_input", "batch_output", "model_warmup"),
    *("platform", "runtime", "model_transaction_policy"),
)
_MODELS = ("simple", "echo_BYTES", "echo_BF16", "flat", "optional", "repeat", "unknown")
_VERSIONS = ("1", "2", "01", "0", "-1", "x", "99999999999999999999")


def cases() -> Iterator[Case]:
    yield from _server()
    for name in _MODELS:
        yield from _of_model(name)
    for version in _VERSIONS:
        yield from _of_version(version)
    yield from _paths()


def _server() -> Iterator[Case]:
    yield case("http live", get("/v2/health/live"), ignore=["headers"])
    yield case("http ready", get("/v2/health/ready"), ignore=["headers"])
    yield case("http server metadata", get("/v2"), ignore=["version"])
    yield case("grpc live", call("ServerLive"))
    yield case("grpc ready", call("ServerReady"))
    yield case("grpc server metadata", call("ServerMetadata"), ignore=["version"])
    for service in ("", "readiness", "unknown"):
        yield case(f"grpc health check {service!r}", call("/grpc.health.v1.Health/Check", _named(service)))
    yield case("metrics", http("GET", "/metrics", port=METRICS))
    yield case("metrics unknown path", http("GET", "/other", port=METRICS))
    yield case("metrics post", http("POST", "/metrics", b"", port=METRICS))


def _named(name: str) -> bytes:
    """A message whose field 1 is this string."""
    return b"\x0a" + bytes([len(name)]) + name.encode() if name else b""


def _of_model(name: str) -> Iterator[Case]:
    yield case(f"http metadata of {name}", get(f"/v2/models/{name}"), ignore=["platform"])
    yield case(f"http config of {name}", get(f"/v2/models/{name}/config"), ignore=_CONFIG_IGNORED)
    yield case(f"http ready of {name}", get(f"/v2/models/{name}/ready"), ignore=["body", "headers"])
    yield case(
        f"grpc metadata of {name}",
        call("ModelMetadata", pb.ModelMetadataRequest(name=name)),
        ignore=["platform"],
    )
    yield case(
        f"grpc config of {name}",
        call("ModelConfig", pb.ModelConfigRequest(name=name)),
        ignore=_CONFIG_IGNORED,
    )
    yield case(f"grpc ready of {name}", call("ModelReady", pb.ModelReadyRequest(name=name)))


def _of_version(version: str) -> Iterator[Case]:
    path = f"/v2/models/simple/versions/{version}"
    yield case(f"http metadata of version {version}", get(path), ignore=["platform"])
    yield case(f"http ready of version {version}", get(f"{path}/ready"), ignore=["body", "headers"])
    yield case(f"http infer of version {version}", post(f"{path}/infer", {"inputs": []}))
    metadata = pb.ModelMetadataRequest(name="simple", version=version)
    yield case(f"grpc metadata of version {version}", call("ModelMetadata", metadata), ignore=["platform"])
    yield case(
        f"grpc ready of version {version}",
        call("ModelReady", pb.ModelReadyRequest(name="simple", version=version)),
    )
    infer = pb.ModelInferRequest(model_name="simple", model_version=version)
    yield case(f"grpc infer of version {version}", call("ModelInfer", infer))


def _paths() -> Iterator[Case]:
    for path in (
        "/",
        "/v2/",
        "/v1",
        "/v2/models",
        "/v2/models/",
        "/v2/models/simple/",
        "/v2/models/simple/other",
    ):
        yield case(f"http path {path}", get(path))
    yield case("http path with a query", get("/v2/models/simple/ready?x=1"), ignore=["headers", "body"])
    yield case("http quoted name", get("/v2/models/simpl%65"), ignore=["platform"])
    for method, path in (
        ("POST", "/v2/health/live"),
        ("POST", "/v2"),
        ("HEAD", "/v2"),
        ("OPTIONS", "/v2"),
        ("GET", "/v2/models/simple/infer"),
        ("DELETE", "/v2/models/simple"),
        ("PUT", "/v2/models/simple/infer"),
        ("GET", "/v2/repository/index"),
        ("POST", "/v2/models/simple/stats"),
    ):
        yield case(f"http {method} {path}", http(method, path))
    yield case("grpc unknown method", call("/inference.GRPCInferenceService/Other"))
    yield case("grpc unknown service", call("/inference.Other/ModelInfer"))
