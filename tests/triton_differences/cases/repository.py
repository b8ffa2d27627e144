"""Index, load and unload: section 2.6. These change what is served, so they run last."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tritonclient.grpc import service_pb2 as pb

from triton_differences.steps import Case, Step, call, case, get, post
from triton_differences.tensors import In, Inference, http_json

_INDEX = "/v2/repository/index"
_X = Inference("unloaded", [In("x", "FP32", [1], [1.0])])


def _path(model: str, verb: str) -> str:
    return f"/v2/repository/models/{model}/{verb}"


def _load(model: str) -> Step:
    return call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=model))


def _unload(model: str) -> Step:
    return call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=model))


def cases() -> Iterator[Case]:
    yield from _index()
    yield from _refused()
    yield case(
        "http load, infer, unload",
        post(_path("unloaded", "load")),
        http_json(_X),
        post(_path("unloaded", "unload")),
    )
    after = (http_json(_X), get("/v2/models/unloaded/ready"), post(_INDEX, b""))
    yield case("http after unload", *after, ignore=["state", "reason"])
    yield case("grpc load, unload", _load("unloaded"), _unload("unloaded"))
    ready = call("ModelReady", pb.ModelReadyRequest(name="unloaded"))
    metadata = call("ModelMetadata", pb.ModelMetadataRequest(name="unloaded"))
    statistics = call("ModelStatistics", pb.ModelStatisticsRequest(name="unloaded"))
    yield case("grpc after unload", ready, metadata, statistics)
    yield case(
        "load again and again", _load("unloaded"), _load("unloaded"), _unload("unloaded"), _unload("unloaded")
    )
    config = {"parameters": {"config": _config()}}
    steps = (
        post(_path("unloaded", "load"), config),
        get("/v2/models/unloaded"),
        post(_path("unloaded", "unload")),
    )
    yield case("http load with a config", *steps, ignore=["platform"])


def _config() -> str:
    tensor = {"data_type": "TYPE_FP32", "dims": [1]}
    config = {"name": "unloaded", "backend": "python", "max_batch_size": "16"}
    return json.dumps(config | {"input": [{"name": "x", **tensor}], "output": [{"name": "y", **tensor}]})


def _index() -> Iterator[Case]:
    for name, body in {
        "no body": b"",
        "empty object": {},
        "ready": {"ready": True},
        "not only ready": {"ready": False},
        "ready as number": {"ready": 1},
        "ready as text": {"ready": "true"},
        "not JSON": b"{",
        "list": [],
        "deep": b'{"ready":' + b"[" * 250_000 + b"]" * 250_000 + b"}",
    }.items():
        yield case(f"http index: {name}", post(_INDEX, body))
    yield case("http index of a repository", post("/v2/repository/other/index"))
    yield case("grpc index", call("RepositoryIndex"))
    yield case("grpc index of the ready", call("RepositoryIndex", pb.RepositoryIndexRequest(ready=True)))
    named = pb.RepositoryIndexRequest(repository_name="other")
    yield case("grpc index of a repository", call("RepositoryIndex", named))


def _refused() -> Iterator[Case]:
    for verb in ("load", "unload"):
        yield case(f"http {verb} unknown", post(_path("unknown", verb)))
        yield case(f"http {verb} not JSON", post(_path("unknown", verb), b"{"))
        yield case(f"http {verb} of a repository", post(f"/v2/repository/other/models/unloaded/{verb}"))
        yield case(f"http {verb} of a path", post(_path("..%2f..", verb)))
        yield case(
            f"http {verb} with an unknown parameter",
            post(_path("unknown", verb), {"parameters": {"other": 1}}),
        )
    yield case("grpc load unknown", _load("unknown"))
    yield case("grpc unload unknown", _unload("unknown"))
    yield case("grpc load without a name", _load(""))
    yield case("grpc unload without a name", _unload(""))
    yield case("grpc load of a path", _load("../unloaded"))
    for name in ("a b", "ünï", "unloaded:1", "-", "x" * 128):
        yield case(f"grpc load and unload of {name[:12]!r}", _load(name), _unload(name))
    for parameter, value in (("config", "{"), ("other", "x")):
        request = pb.RepositoryModelLoadRequest(model_name="unloaded")
        request.parameters[parameter].string_param = value
        yield case(
            f"grpc load with {parameter} {value}", call("RepositoryModelLoad", request), _unload("unloaded")
        )
    wrong = pb.RepositoryModelLoadRequest(model_name="unloaded")
    wrong.parameters["config"].int64_param = 1
    yield case("grpc load with config as number", call("RepositoryModelLoad", wrong))
    file = pb.RepositoryModelLoadRequest(model_name="unloaded")
    file.parameters["file:1/model.py"].bytes_param = b"x"
    yield case("grpc load with a file and no config", call("RepositoryModelLoad", file))
    flag = pb.RepositoryModelUnloadRequest(model_name="unloaded")
    flag.parameters["unload_dependents"].string_param = "yes"
    yield case("grpc unload with dependents as text", call("RepositoryModelUnload", flag))
