"""Server reflection, as clients that have no protobuf files use it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from config_file import model, tensor, write_config
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2 as pb
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from operated import OperatedServer
from serving import GPUSERVE, Addresses, serving

TIMEOUT_S = 15.0
SERVICE = "inference.GRPCInferenceService"
SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    SERVICE,
]
NOT_FOUND, INVALID_ARGUMENT = 5, 3


def config(folder: Path, **settings: Any) -> Path:
    echo = model("echo", "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 4)
    return write_config(folder, [echo], host="127.0.0.1", **settings)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    with serving(GPUSERVE, "serve", str(config(tmp_path_factory.mktemp("r")))) as addresses:
        yield addresses


@pytest.fixture
def channel(server: Addresses) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as opened:
        yield opened


def stream(channel: Any, requests: Iterator[bytes], version: str = "v1", **options: Any) -> Any:
    """A call of the raw method. The messages of v1 are those of v1alpha, byte for byte."""
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    return channel.stream_stream(path)(requests, timeout=TIMEOUT_S, **options)


def asked(channel: Any, *requests: pb.ServerReflectionRequest, version: str = "v1") -> list[Any]:
    replies = stream(channel, iter([one.SerializeToString() for one in requests]), version)
    return [pb.ServerReflectionResponse.FromString(one) for one in replies]


def files(reply: Any) -> list[str]:
    data = reply.file_descriptor_response.file_descriptor_proto
    return [descriptor_pb2.FileDescriptorProto.FromString(one).name for one in data]


def test_a_model_is_called_with_nothing_but_what_reflection_says(channel: Any) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert list(database.get_services()) == SERVICES
    pool = descriptor_pool.DescriptorPool(database)
    assert pool.FindMessageTypeByName("inference.ModelInferRequest").file.name == "grpc_service.proto"
    method = pool.FindServiceByName(SERVICE).FindMethodByName("ModelInfer")
    request = message_factory.GetMessageClass(method.input_type)(model_name="echo")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1.5, -2])
    call = channel.unary_unary(
        f"/{SERVICE}/{method.name}",
        type(request).SerializeToString,
        message_factory.GetMessageClass(method.output_type).FromString,
    )
    answer = call(request, timeout=TIMEOUT_S)
    assert (answer.model_name, answer.outputs[0].name, list(answer.outputs[0].shape)) == ("echo", "y", [1, 2])
    assert len(answer.raw_output_contents[0]) == 8


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_both_versions_answer_each_request_in_order(channel: Any, version: str) -> None:
    request = pb.ServerReflectionRequest
    replies = asked(
        channel,
        request(host="h", list_services="*"),
        request(file_by_filename="model_config.proto"),
        request(file_containing_symbol="inference.ModelInferRequest.InferInputTensor"),
        request(file_containing_symbol=f"{SERVICE}.ModelStreamInfer"),
        request(file_containing_symbol="grpc.health.v1.Health.Watch"),
        request(file_containing_symbol=f"grpc.reflection.{version}.ErrorResponse"),
        request(all_extension_numbers_of_type="inference.ModelInferRequest"),
        version=version,
    )
    assert [one.name for one in replies[0].list_services_response.service] == SERVICES
    assert (replies[0].valid_host, replies[0].original_request.list_services) == ("h", "*")
    assert [files(one) for one in replies[1:6]] == [
        ["model_config.proto"],
        ["grpc_service.proto", "model_config.proto"],
        ["grpc_service.proto", "model_config.proto"],
        ["grpc/health/v1/health.proto"],
        [f"grpc/reflection/{version}/reflection.proto"],
    ]
    extensions = replies[6].all_extension_numbers_response
    assert (extensions.base_type_name, len(extensions.extension_number)) == ("inference.ModelInferRequest", 0)


def test_what_there_is_not_is_an_answer_and_the_stream_goes_on(channel: Any) -> None:
    request = pb.ServerReflectionRequest
    extension = pb.ExtensionRequest(containing_type="inference.ModelInferRequest", extension_number=7)
    replies = asked(
        channel,
        request(file_by_filename="../etc/passwd"),
        request(file_containing_symbol="inference.Nope"),
        request(file_containing_symbol=f"{SERVICE}.Nope"),
        request(file_containing_symbol=""),
        request(file_containing_extension=extension),
        request(all_extension_numbers_of_type="Nope"),
        request(),
        request(list_services=""),
    )
    errors = [(one.error_response.error_code, one.error_response.error_message) for one in replies]
    assert errors == [
        (NOT_FOUND, "no protobuf file '../etc/passwd'"),
        (NOT_FOUND, "no symbol 'inference.Nope'"),
        (NOT_FOUND, f"no symbol '{SERVICE}.Nope'"),
        (NOT_FOUND, "no symbol ''"),
        (NOT_FOUND, "no extension 7 of message type 'inference.ModelInferRequest'"),
        (NOT_FOUND, "no message type 'Nope'"),
        (INVALID_ARGUMENT, "the request asks for nothing: 'message_request' is not set"),
        (0, ""),
    ]
    assert len(replies[-1].list_services_response.service) == len(SERVICES)


def test_bytes_that_are_no_request_end_the_call(channel: Any) -> None:
    with pytest.raises(grpc.RpcError, match="not a ServerReflectionRequest") as raised:
        list(stream(channel, iter([b"\x0a\xff"])))
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_stream_without_requests_and_one_that_is_compressed(channel: Any) -> None:
    assert asked(channel) == []
    listing = pb.ServerReflectionRequest(host="h" * 2000, list_services="").SerializeToString()
    (reply,) = stream(channel, iter([listing]), compression=grpc.Compression.Gzip)
    assert pb.ServerReflectionResponse.FromString(reply).valid_host == "h" * 2000


def test_an_open_stream_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with OperatedServer(config(tmp_path)) as started:
        server = started.wait_ready()
        with grpc.insecure_channel(server.addresses["gRPC"]) as channel:
            ended = threading.Event()
            replies = stream(channel, _one_and_then_silence(ended))
            assert pb.ServerReflectionResponse.FromString(next(replies)).list_services_response.service
            server.process.send_signal(signal.SIGTERM)
            assert list(replies) == []
            assert replies.code() == grpc.StatusCode.OK
            ended.set()
        assert server.process.wait(TIMEOUT_S) == 0
        assert not [one for one in server.messages() if one["level"] in {"error", "critical"}]


def _one_and_then_silence(ended: threading.Event) -> Iterator[bytes]:
    yield pb.ServerReflectionRequest(list_services="").SerializeToString()
    ended.wait(TIMEOUT_S)


def test_restricted_metadata_closes_reflection(tmp_path: Path) -> None:
    settings = {"restricted_endpoints": ["metadata"], "access_token": "right"}
    path = config(tmp_path, **settings)
    listing = pb.ServerReflectionRequest(list_services="").SerializeToString()
    with serving(GPUSERVE, "serve", str(path)) as addresses, grpc.insecure_channel(addresses.grpc) as channel:
        for version in ("v1", "v1alpha"):
            with pytest.raises(grpc.RpcError, match="This protocol is restricted"):
                list(stream(channel, iter([listing]), version))
            token = [("triton-grpc-protocol-triton-access-token", "right")]
            assert len(list(stream(channel, iter([listing]), version, metadata=token))) == 1
