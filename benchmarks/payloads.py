"""What is sent to the models, and the check that a server answers it right.

Messages are made once, by tritonclient's protobuf, so all servers get the same bytes.
"""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import grpc
import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from benchmarks import shared_memory_client
from benchmarks.servers import ECHO, TOKENS, Api, RunningServer, ServerFailed

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_TIMEOUT_S = 30


class HttpRequest(NamedTuple):
    """A POST."""

    path: str
    body: bytes
    headers: dict[str, str]


class Payload(Protocol):
    """One request, and how many messages answer it."""

    @property
    def path(self) -> str:
        """The gRPC method."""

    @property
    def messages(self) -> int:
        """Messages of an answer."""

    def grpc_message(self) -> bytes:
        """The serialized request."""

    def check(self, running: RunningServer) -> bytes:
        """Ask a server, and look at what it answers.

        Returns:
            The body of a right gRPC answer: every message with its prefix. Empty where there is none, or
            where an answer is told in another way.

        Raises:
            ServerFailed: it answered wrong.
        """


@dataclass(frozen=True, slots=True)
class EchoPayload:
    """One row of FP32 of this size for the model echo, as a request over each protocol."""

    nbytes: int
    path = INFER
    messages = 1

    @property
    def array(self) -> npt.NDArray[np.float32]:
        """The tensor: [1, nbytes / 4]."""
        return np.arange(self.nbytes // 4, dtype=np.float32)[None]

    def grpc_message(self) -> bytes:
        """A serialized ModelInferRequest with raw contents."""
        return _grpc_message(ECHO, "x", "FP32", self.array)

    def http_request(self, api: Api) -> HttpRequest:
        """The same over HTTP."""
        if api is Api.RAW:
            return HttpRequest("/inference", self.array.tobytes(), {})
        tensor = http_client.InferInput("x", list(self.array.shape), "FP32")
        tensor.set_data_from_numpy(self.array)
        body, json_nbytes = http_client.InferenceServerClient.generate_request_body([tensor])
        headers = {"Inference-Header-Content-Length": str(json_nbytes)}
        return HttpRequest(f"/v2/models/{ECHO}/infer", bytes(body), headers)

    def check(self, running: RunningServer) -> bytes:
        """Infer this tensor, and a batch of three, over both protocols with tritonclient; see ``Payload``."""
        if running.server.api is Api.RAW:
            self._check_raw(running)
            return b""
        one_row = self.array
        for array in (one_row, np.concatenate([one_row, one_row + 1, one_row + 2])):
            for protocol, infer in (("gRPC", _infer_grpc), ("HTTP", _infer_http)):
                answer = infer(running, array)
                if answer is None or answer.dtype != array.dtype or not np.array_equal(answer, array):
                    raise ServerFailed(f"{running.server.title} does not echo {array.shape} over {protocol}")
        return b"".join(map(framed, _messages(running, self)))

    def _check_raw(self, running: RunningServer) -> None:
        request = self.http_request(Api.RAW)
        connection = http.client.HTTPConnection("127.0.0.1", running.ports.http, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", request.path, request.body, request.headers)
            if connection.getresponse().read() != request.body:
                raise ServerFailed(
                    f"{running.server.title} does not echo {len(request.body)} bytes over HTTP"
                )
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class EchoInStreamPayload(EchoPayload):
    """The same request as one message of ModelStreamInfer."""

    path = STREAM_INFER


@dataclass(frozen=True, slots=True)
class SharedMemoryPayload:
    """One row of FP32 of this size for a model that echoes it, from one region of the client to another."""

    nbytes: int
    model: str
    path = INFER
    messages = 1

    def grpc_message(self) -> bytes:
        """A serialized ModelInferRequest that holds no tensor."""
        request = service_pb2.ModelInferRequest(model_name=self.model)
        tensor = request.inputs.add(name="x", datatype="FP32", shape=(1, self.nbytes // 4))
        _place(tensor.parameters, shared_memory_client.INPUT, self.nbytes)
        _place(request.outputs.add(name="y").parameters, shared_memory_client.OUTPUT, self.nbytes)
        return bytes(request.SerializeToString())

    def check(self, running: RunningServer) -> bytes:
        """Register regions, ask once, and look into the output region; see ``Payload``."""
        try:
            shared_memory_client.run(running.ports.grpc, self.path, 0.0, self.nbytes, self.grpc_message())
        except (shared_memory_client.SharedMemoryFailed, InferenceServerException, grpc.RpcError) as error:
            raise ServerFailed(f"{running.server.title}, {self.model} in shared memory: {error}") from None
        return b""


@dataclass(frozen=True, slots=True)
class TokensPayload:
    """One call of ModelStreamInfer with one request for so many tokens, each of them a message."""

    messages: int
    path = STREAM_INFER

    def grpc_message(self) -> bytes:
        """A serialized ModelInferRequest with raw contents."""
        return _grpc_message(TOKENS, "count", "INT32", np.array([[self.messages]], np.int32))

    def check(self, running: RunningServer) -> bytes:
        """Open one stream and parse what comes; see ``Payload``."""
        messages = _messages(running, self)
        numbers = [_token(message) for message in messages]
        if numbers != list(range(self.messages)):
            raise ServerFailed(f"{running.server.title} does not stream {self.messages} tokens: {numbers}")
        return b"".join(map(framed, messages))


def framed(message: bytes) -> bytes:
    """A message in the body of a gRPC call: one byte of flags and four of length go before it."""
    return b"\0" + len(message).to_bytes(4) + message


def _grpc_message(model: str, name: str, datatype: str, array: npt.NDArray[np.generic]) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name=name, datatype=datatype, shape=array.shape)
    request.raw_input_contents.append(array.tobytes())
    return bytes(request.SerializeToString())


def _place(parameters: Any, region: str, nbytes: int) -> None:
    parameters["shared_memory_region"].string_param = region
    parameters["shared_memory_byte_size"].int64_param = nbytes


def _infer_grpc(running: RunningServer, array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
    tensor = grpc_client.InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    with grpc_client.InferenceServerClient(f"127.0.0.1:{running.ports.grpc}") as client:
        answer: npt.NDArray[np.float32] | None = client.infer(ECHO, [tensor]).as_numpy("y")
    return answer


def _infer_http(running: RunningServer, array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
    tensor = http_client.InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    with http_client.InferenceServerClient(f"127.0.0.1:{running.ports.http}") as client:
        answer: npt.NDArray[np.float32] | None = client.infer(ECHO, [tensor]).as_numpy("y")
    return answer


def _messages(running: RunningServer, payload: Payload) -> list[bytes]:
    """The serialized messages that answer a request. A call with one answer is read as a stream of one."""
    with grpc.insecure_channel(f"127.0.0.1:{running.ports.grpc}", options=_OPTIONS) as channel:
        try:
            return list(channel.unary_stream(payload.path)(payload.grpc_message(), timeout=_TIMEOUT_S))
        except grpc.RpcError as error:
            raise ServerFailed(f"{running.server.title} ends {payload.path} with {error.details()}") from None


def _token(message: bytes) -> int | str:
    """The number in one message of a stream; where there is none, what there is."""
    answer = service_pb2.ModelStreamInferResponse.FromString(message)
    response = answer.infer_response
    tensors = [(one.name, one.datatype, tuple(one.shape)) for one in response.outputs]
    if answer.error_message or tensors != [("token", "INT32", (1, 1))]:
        return str(answer)
    return int.from_bytes(response.raw_output_contents[0], "little", signed=True)
