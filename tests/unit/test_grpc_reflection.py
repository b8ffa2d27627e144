"""What server reflection says is so, whatever it is asked, and a stream of it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import InvalidArgument
from gpuserve.front.protocols.access.endpoints import METHODS as GUARDED
from gpuserve.front.protocols.grpc.reflection import METHODS, REFLECTION_PACKAGES, replies, reply, schema
from gpuserve.front.service.inference_service import inference_service

V1, V1ALPHA = METHODS
TIMEOUT_S = 10.0
NAMES = [
    *schema().services,
    "inference.ModelInferRequest",
    "inference.ModelInferRequest.id",
    "grpc_service.proto",
    "grpc/health/v1/health.proto",
    "",
    ".",
]


def file(name: str) -> Any:
    made = descriptor_pb2.FileDescriptorProto()
    schema().pool.FindFileByName(name).CopyToProto(made)
    return made


@pytest.mark.parametrize("package", REFLECTION_PACKAGES)
def test_the_descriptor_by_hand_is_the_one_that_grpc_publishes(package: str) -> None:
    """Their v1 is their v1alpha under another name."""
    published = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(published)
    ours = file(f"{package.replace('.', '/')}/reflection.proto")
    assert shapes(ours, package) == shapes(published, published.package)


def shapes(described: Any, package: str) -> dict[str, Any]:
    """The fields of every message, and the methods, with the package cut from the names of types."""
    messages = {
        message.name: sorted(
            (one.number, one.name, one.type, one.label, one.type_name.removeprefix(f".{package}."), choice)
            for one in message.field
            for choice in [message.oneof_decl[one.oneof_index].name if one.HasField("oneof_index") else ""]
        )
        for message in described.message_type
    }
    methods = {
        f"{service.name}.{one.name}": (one.client_streaming, one.server_streaming)
        for service in described.service
        for one in service.method
    }
    return {**messages, **methods}


def test_every_described_method_is_one_that_is_guarded() -> None:
    services = [schema().pool.FindServiceByName(name) for name in schema().services]
    described = {f"/{service.full_name}/{one.name}" for service in services for one in service.methods}
    assert described <= set(GUARDED)
    assert set(METHODS) <= described


@given(st.binary(), st.sampled_from([V1, V1ALPHA]))
def test_any_bytes_are_answered_or_refused(body: bytes, path: str) -> None:
    try:
        pb.ServerReflectionRequest.FromString(body)
    except DecodeError:
        with pytest.raises(InvalidArgument, match="not a ServerReflectionRequest"):
            reply(path, body)
    else:
        answer = pb.ServerReflectionResponse.FromString(reply(path, body))
        assert answer.WhichOneof("message_response") is not None


@given(
    st.sampled_from(
        ["file_by_filename", "file_containing_symbol", "all_extension_numbers_of_type", "list_services"]
    ),
    st.sampled_from(NAMES) | st.text(max_size=300),
)
def test_any_name_is_answered(field: str, name: str) -> None:
    request = pb.ServerReflectionRequest(host="h", **{field: name})
    answer = pb.ServerReflectionResponse.FromString(reply(V1, request.SerializeToString()))
    assert answer.original_request == request
    assert answer.WhichOneof("message_response") is not None
    assert len(answer.error_response.error_message) < 2000


@pytest.mark.parametrize("number", [-(1 << 31), 0, 7, (1 << 31) - 1])
def test_there_are_no_extensions(number: int) -> None:
    for name in NAMES:
        asked = pb.ExtensionRequest(containing_type=name, extension_number=number)
        request = pb.ServerReflectionRequest(file_containing_extension=asked)
        answer = pb.ServerReflectionResponse.FromString(reply(V1, request.SerializeToString()))
        assert answer.error_response.error_code == 5


def test_a_stream_ends_with_the_drain_and_watches_no_more() -> None:
    async def run() -> tuple[int, bool]:
        service = inference_service(ServerSettings())
        n_watchers = len(service.health._watchers)
        cancelled = asyncio.Event()

        async def requests() -> AsyncIterator[bytes]:
            yield pb.ServerReflectionRequest(list_services="").SerializeToString()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        answered = 0
        async for _ in replies(service, V1, requests()):
            answered += 1
            asyncio.get_running_loop().call_soon(service.health.drain)
        assert len(service.health._watchers) == n_watchers
        return answered, cancelled.is_set()

    assert asyncio.run(asyncio.wait_for(run(), TIMEOUT_S)) == (1, True)
