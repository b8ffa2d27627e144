"""What is sent to the models, and the check that a server answers it right.

Messages are made once, by tritonclient's protobuf, so all servers get the same bytes.
"""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import grpc
import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, shared_memory

from benchmarks.servers.server import (
    CHAIN,
    ECHO,
    ECHO_BYTES,
    ECHO_UNBATCHED,
    EIGHT_INPUTS,
    TOKENS,
    Api,
    RunningServer,
    ServerFailed,
)
from gpuserve.cli.bench.request_payloads import grpc_frame as framed

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_TIMEOUT_S = 30
#: Larger ones are not checked as a batch: Triton would have to hold it in shared memory.
_BATCHED_NBYTES = 1 << 24
_Infer: TypeAlias = Callable[[RunningServer, Any], Any]


class HttpRequest(NamedTuple):
    path: str
    body: bytes
    headers: dict[str, str]


class Payload:
    """One request to a model. ``nbytes`` is the size of its tensors, ``path`` that of its gRPC method, and
    ``messages`` the number of messages that answer the request.
    """

    __slots__ = ()
    model: str
    nbytes: int
    path = INFER
    messages = 1

    def grpc_message(self) -> bytes:
        raise NotImplementedError

    def http_request(self, api: Api) -> HttpRequest:
        """Return the request over HTTP, in this API."""
        raise NotImplementedError

    def check(self, running: RunningServer, api: Api = Api.GRPC) -> bytes:
        """Ask a server in this way, and compare the answer. Return the body of a right gRPC answer, each
        message with its prefix; empty for other protocols. Raises ServerFailed: the answer is wrong.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class EchoPayload(Payload):
    """One row of FP32 of this size for the model echo, as a request over each protocol."""

    nbytes: int
    model = ECHO

    @property
    def array(self) -> npt.NDArray[np.float32]:
        return np.arange(self.nbytes // 4, dtype=np.float32)[None]

    def grpc_message(self) -> bytes:
        return grpc_request(ECHO, Tensor("x", "FP32", self.array.shape, self.array.tobytes()))

    def http_request(self, api: Api) -> HttpRequest:
        match api:
            case Api.BYTES:
                return HttpRequest("/inference", self.array.tobytes(), {})
            case Api.PLAIN_JSON:
                return json_request("/predict", {"x": self.array[0].tolist()})
            case Api.HTTP_JSON:
                tensor = {"name": "x", "shape": list(self.array.shape), "datatype": "FP32"}
                inputs = [{**tensor, "data": self.array[0].tolist()}]
                return json_request(f"/v2/models/{ECHO}/infer", {"inputs": inputs})
            case _:
                tensor = http_client.InferInput("x", list(self.array.shape), "FP32")
                tensor.set_data_from_numpy(self.array)
                body, json_nbytes = http_client.InferenceServerClient.generate_request_body([tensor])
                headers = {"Inference-Header-Content-Length": str(json_nbytes)}
                return HttpRequest(f"/v2/models/{ECHO}/infer", bytes(body), headers)

    def check(self, running: RunningServer, api: Api = Api.GRPC) -> bytes:
        """Infer this tensor; with v2's binary data a batch of three as well. See ``Payload``."""
        match api:
            case Api.GRPC | Api.STREAM:
                self._check_client(running, "gRPC", grpc_client, _infer_grpc)
                return b"".join(map(framed, messages_of(running, self)))
            case Api.HTTP_BINARY:
                self._check_client(running, "HTTP", http_client, _infer_http)
            case Api.BODY_ECHO:
                return framed(self.grpc_message())
            case _:
                answer = _http_array(api, post(running, self.http_request(api)))
                if answer is None or not np.array_equal(answer, self.array[0]):
                    title = running.server.title
                    raise ServerFailed(f"{title} does not echo {self.nbytes} bytes over HTTP")
        return b""

    def _check_client(self, running: RunningServer, protocol: str, library: Any, infer: _Infer) -> None:
        one_row, title = self.array, running.server.title
        batch = np.concatenate([one_row, one_row + 1, one_row + 2])
        for array in (one_row, batch) if self.nbytes <= _BATCHED_NBYTES else (one_row,):
            tensor = library.InferInput("x", list(array.shape), "FP32")
            tensor.set_data_from_numpy(array)
            try:
                answer = infer(running, tensor).as_numpy("y")
            except InferenceServerException as error:
                raise ServerFailed(f"{title} refuses {array.shape} over {protocol}: {error}") from None
            if answer is None or answer.dtype != array.dtype or not np.array_equal(answer, array):
                raise ServerFailed(f"{title} does not echo {array.shape} over {protocol}")


@dataclass(frozen=True, slots=True)
class EchoFractionsPayload(EchoPayload):
    """The same of numbers that take all their digits in JSON."""

    @property
    def array(self) -> npt.NDArray[np.float32]:
        return np.random.default_rng(1).random((1, self.nbytes // 4), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class EchoInStreamPayload(EchoPayload):
    """The same request as one message of ModelStreamInfer."""

    path = STREAM_INFER


class Tensor(NamedTuple):
    """An input of a request, with its values as they are sent."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes

    @classmethod
    def fp32(cls, name: str, *shape: int, value: float | None = None) -> Tensor:
        """Return a tensor of this value, or of the numbers from 0 on."""
        size = int(np.prod(shape))
        values = np.arange(size, dtype=np.float32) if value is None else np.full(size, value, np.float32)
        return cls(name, "FP32", shape, values.tobytes())


@dataclass(frozen=True, slots=True)
class RawPayload(Payload):
    """Inputs for a model that returns the first of them as its one output."""

    model: str
    inputs: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(len(one.raw) for one in self.inputs)

    def grpc_message(self) -> bytes:
        return grpc_request(self.model, *self.inputs)

    def check(self, running: RunningServer, api: Api = Api.GRPC) -> bytes:
        if api is Api.BODY_ECHO:
            return framed(self.grpc_message())
        (message,) = messages_of(running, self)
        answer = service_pb2.ModelInferResponse.FromString(message)
        first = self.inputs[0]
        if list(answer.raw_output_contents) != [first.raw] or tuple(answer.outputs[0].shape) != first.shape:
            what = f"{self.model} with {self.nbytes} bytes of inputs"
            raise ServerFailed(f"{running.server.title}, {what}, answers wrong: {str(answer)[:200]}")
        return framed(message)


def eight_inputs(nbytes: int) -> RawPayload:
    """Return one FP32 row of this size in each of the eight inputs of a model."""
    inputs = (Tensor.fp32(name, 1, nbytes // 4, value=at + 0.5) for at, name in enumerate("abcdefgh"))
    return RawPayload(EIGHT_INPUTS, tuple(inputs))


def echo_rows(rows: int, row_nbytes: int) -> RawPayload:
    """Return a batch that the client has made, for the model echo."""
    return RawPayload(ECHO, (Tensor.fp32("x", rows, row_nbytes // 4, value=0.5),))


def strings(count: int, nbytes: int) -> RawPayload:
    """Return one row of BYTES; as they are sent, four bytes of length go before each string."""
    texts = (f"{number:0{nbytes}d}".encode() for number in range(count))
    raw = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return RawPayload(ECHO_BYTES, (Tensor("x", "BYTES", (1, count), raw),))


def unbatched(nbytes: int) -> RawPayload:
    """Return one FP32 vector of this size for the model without batching."""
    return RawPayload(ECHO_UNBATCHED, (Tensor.fp32("x", nbytes // 4),))


def chain(nbytes: int) -> RawPayload:
    """Return one FP32 row of this size for the model chain, which has another model echo it twice."""
    return RawPayload(CHAIN, (Tensor.fp32("x", 1, nbytes // 4),))


@dataclass(frozen=True, slots=True)
class SharedMemoryPayload(Payload):
    """One row of FP32 of this size for a model that echoes it, from one region of the client to another."""

    nbytes: int
    model: str

    def check(self, running: RunningServer, api: Api = Api.GRPC) -> bytes:
        """Echo the tensor once by tritonclient, from one region to the other. See ``Payload``."""
        numbers = np.arange(self.nbytes // 4, dtype=np.float32)[None]
        with ExitStack() as stack:
            client = stack.enter_context(grpc_client.InferenceServerClient(f"127.0.0.1:{running.ports.grpc}"))
            names = [f"benchmark-{one}-{uuid.uuid4()}" for one in "xy"]
            regions = [_region(stack, client, one, self.nbytes) for one in names]
            shared_memory.set_shared_memory_region(regions[0], [numbers])
            shared_memory.set_shared_memory_region(regions[1], [~numbers.view(np.uint32)])
            given = grpc_client.InferInput("x", list(numbers.shape), "FP32")
            asked = grpc_client.InferRequestedOutput("y")
            given.set_shared_memory(names[0], self.nbytes)
            asked.set_shared_memory(names[1], self.nbytes)
            try:
                client.infer(self.model, [given], outputs=[asked])
            except InferenceServerException as error:
                text = f"{running.server.title}, {self.model} in shared memory: {error}"
                raise ServerFailed(text) from None
            written = shared_memory.get_contents_as_numpy(regions[1], np.float32, numbers.shape)
            if not np.array_equal(written, numbers):
                raise ServerFailed(f"{running.server.title} does not echo {self.nbytes} bytes of a region")
        return b""


def _region(stack: ExitStack, client: Any, name: str, nbytes: int) -> Any:
    """Return a region of shared memory under this name, registered until the stack unwinds."""
    region = shared_memory.create_shared_memory_region(name, f"/{name}", nbytes)
    stack.callback(shared_memory.destroy_shared_memory_region, region)
    client.register_system_shared_memory(name, f"/{name}", nbytes)
    # A server may answer a moment before the region is free, and refuse until then.
    stack.enter_context(suppress(InferenceServerException))
    stack.callback(client.unregister_system_shared_memory, name)
    return region


@dataclass(frozen=True, slots=True)
class TokensPayload(Payload):
    """One call of ModelStreamInfer with one request for so many tokens, each of them a message."""

    messages: int
    model = TOKENS
    nbytes = 4
    path = STREAM_INFER

    def grpc_message(self) -> bytes:
        return grpc_request(TOKENS, Tensor("count", "INT32", (1, 1), self.messages.to_bytes(4, "little")))

    def check(self, running: RunningServer, api: Api = Api.GRPC) -> bytes:
        messages = messages_of(running, self)
        numbers = [_token(message) for message in messages]
        if numbers != list(range(self.messages)):
            raise ServerFailed(f"{running.server.title} does not stream {self.messages} tokens: {numbers}")
        return b"".join(map(framed, messages))


def grpc_request(model: str, *inputs: Tensor) -> bytes:
    """Return a serialized ModelInferRequest with raw contents."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for one in inputs:
        request.inputs.add(name=one.name, datatype=one.datatype, shape=one.shape)
        request.raw_input_contents.append(one.raw)
    return bytes(request.SerializeToString())


def json_request(path: str, document: dict[str, object]) -> HttpRequest:
    return HttpRequest(path, json.dumps(document).encode(), {"Content-Type": "application/json"})


def post(running: RunningServer, request: HttpRequest) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", running.ports.http, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", request.path, request.body, request.headers)
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException) as error:
        raise ServerFailed(f"{running.server.title} does not answer over HTTP: {error!r}") from None
    finally:
        connection.close()


def _http_array(api: Api, body: bytes) -> npt.NDArray[np.float32] | None:
    """The one row that a server without v2's binary data has answered; None where there is none."""
    try:
        if api is Api.BYTES:
            return np.frombuffer(body, np.float32)
        document = json.loads(body)
        row = document["y"] if api is Api.PLAIN_JSON else document["outputs"][0]["data"]
        return np.array(row, np.float32).ravel()
    except (ValueError, LookupError, TypeError):
        return None


def _infer_grpc(running: RunningServer, tensor: Any) -> Any:
    tls, url = running.server.tls, f"127.0.0.1:{running.ports.grpc}"
    root = None if tls is None else str(tls.path)
    with grpc_client.InferenceServerClient(url, ssl=tls is not None, root_certificates=root) as client:
        return client.infer(ECHO, [tensor], headers=dict(_metadata(running)))


def _infer_http(running: RunningServer, tensor: Any) -> Any:
    with http_client.InferenceServerClient(f"127.0.0.1:{running.ports.http}") as client:
        return client.infer(ECHO, [tensor])


def messages_of(running: RunningServer, payload: Payload) -> list[bytes]:
    """The serialized messages that answer a request. A call with one answer is read as a stream of one."""
    with _channel(running) as channel:
        call, metadata = channel.unary_stream(payload.path), _metadata(running)
        try:
            return list(call(payload.grpc_message(), timeout=_TIMEOUT_S, metadata=metadata))
        except grpc.RpcError as error:
            what = f"{running.server.title}, model {payload.model},"
            raise ServerFailed(f"{what} ends {payload.path} with {error.details()}") from None


def _channel(running: RunningServer) -> grpc.Channel:
    tls, address = running.server.tls, f"127.0.0.1:{running.ports.grpc}"
    if tls is None:
        return grpc.insecure_channel(address, options=_OPTIONS)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(tls.path.read_bytes()), options=_OPTIONS)


def _metadata(running: RunningServer) -> tuple[tuple[str, str], ...]:
    """The headers of its option, but for gRPC's own, which its clients set."""
    option = running.server.option
    given = () if option is None else option.headers
    return tuple((name, value) for name, value in given if not name.startswith("grpc-"))


def _token(message: bytes) -> int | str:
    """The number in one message of a stream; where there is none, what there is."""
    answer = service_pb2.ModelStreamInferResponse.FromString(message)
    response = answer.infer_response
    tensors = [(one.name, one.datatype, tuple(one.shape)) for one in response.outputs]
    if answer.error_message or tensors != [("token", "INT32", (1, 1))]:
        return str(answer)
    return int.from_bytes(response.raw_output_contents[0], "little", signed=True)
