"""Control requests to the server under load: metadata, statistics, shared memory, one inference. They block,
on connections of their own, over the protocol of the load (``GrpcControl`` or ``HttpControl``).
"""

from __future__ import annotations

import base64
import http.client
import json
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpuserve.cli.bench.load_plan import BenchError, BenchOptionError, error_reason
from gpuserve.cli.bench.loader_messages import tls_context
from gpuserve.cli.bench.request_payloads import HttpRequest, Target, model_path
from gpuserve.cli.bench.request_tensors import TargetModel
from gpuserve.client.client_settings import ServerUrl
from gpuserve_worker.protocol.tensor import TensorSpec

if TYPE_CHECKING:
    import grpc


_UNLIMITED: Final = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_CONTROL_TIMEOUT_S: Final = 10.0
_MAX_TEXT: Final = 300
_HEAD_LENGTH: Final = "inference-header-content-length"

#: A v2 message in its JSON form.
JsonDocument = dict[str, Any]


class ServerControl(ABC):
    """A client for all requests but the load. Methods raise BenchError if the server refuses or is gone."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def metadata(self) -> TargetModel:
        found = self._document("")
        try:
            config = self._document("config")
        except BenchError:  # a server without the extension
            config = {}
        optional = frozenset(one["name"] for one in config.get("input", ()) if one.get("optional"))
        try:
            inputs = _tensor_metadata(found["inputs"], optional)
            outputs = _tensor_metadata(found["outputs"], frozenset())
        except (KeyError, TypeError, ValueError):
            text = f"{self._target.url} answered without metadata of model {self._target.model}"
            raise BenchError(text) from None
        policy = config.get("model_transaction_policy") or {}
        batch = int(config.get("max_batch_size", 0))
        return TargetModel(self._target.model, inputs, outputs, batch, bool(policy.get("decoupled")))

    def totals(self) -> ServerTotals | None:
        """Return the statistics of the model so far, or None if the server has none."""
        try:
            found = self._document("stats")
        except BenchError:
            return None
        versions = map(parse_statistics, found.get("model_stats", ()))
        return ServerTotals(*map(sum, zip(ServerTotals(), *versions, strict=True)))

    @abstractmethod
    def infer(self, request: Any) -> dict[str, int]:
        """Send one request (a message or an HttpRequest). Return the size in bytes of each output."""

    @abstractmethod
    def register_system(self, name: str, key: str, nbytes: int) -> None:
        """Register a region of system shared memory."""

    @abstractmethod
    def register_cuda(self, name: str, handle: bytes, device: int, nbytes: int) -> None:
        """Register memory of a GPU; ``handle`` is the result of cudaIpcGetMemHandle."""

    @abstractmethod
    def unregister(self, name: str, *, cuda: bool) -> None:
        """Unregister a region."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections to the server."""

    @abstractmethod
    def _document(self, what: str) -> JsonDocument:
        """Return a model's metadata (""), "config" or "stats" in the v2 protocol's JSON form."""


def connect(target: Target) -> ServerControl:
    """Return the control for the protocol of the target; nothing is sent yet."""
    return GrpcControl(target) if target.is_grpc else HttpControl(target)


class GrpcControl(ServerControl):
    def __init__(self, target: Target) -> None:
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        super().__init__(target)
        self._messages = service_pb2
        self._channel = _grpc_channel(target)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def infer(self, request: bytes) -> dict[str, int]:
        message = self._messages.ModelInferRequest.FromString(request)
        answer = self._call("ModelInfer", message, self._target.timeout_s)
        contents = iter(answer.raw_output_contents)
        return {
            one.name: len(next(contents, b""))
            for one in answer.outputs
            if "shared_memory_region" not in one.parameters
        }

    def register_system(self, name: str, key: str, nbytes: int) -> None:
        request = self._messages.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=nbytes)
        self._call("SystemSharedMemoryRegister", request)

    def register_cuda(self, name: str, handle: bytes, device: int, nbytes: int) -> None:
        request = self._messages.CudaSharedMemoryRegisterRequest(
            name=name, raw_handle=handle, device_id=device, byte_size=nbytes
        )
        self._call("CudaSharedMemoryRegister", request)

    def unregister(self, name: str, *, cuda: bool) -> None:
        kind = "Cuda" if cuda else "System"
        request = getattr(self._messages, f"{kind}SharedMemoryUnregisterRequest")(name=name)
        self._call(f"{kind}SharedMemoryUnregister", request)

    def close(self) -> None:
        self._channel.close()

    def _document(self, what: str) -> JsonDocument:
        from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]

        method = {"": "ModelMetadata", "config": "ModelConfig", "stats": "ModelStatistics"}[what]
        request = getattr(self._messages, f"{method}Request")
        answer = self._call(method, request(name=self._target.model, version=self._target.version))
        found: JsonDocument = MessageToDict(answer, preserving_proto_field_name=True)
        if what == "config":
            found = found.get("config", {})
        return found if what else {"inputs": [], "outputs": [], **found}

    def _call(self, method: str, request: Any, timeout_s: float = _CONTROL_TIMEOUT_S) -> Any:
        import grpc

        try:
            return getattr(self._stub, method)(
                request, timeout=timeout_s, metadata=self._target.headers, wait_for_ready=False
            )
        except grpc.RpcError as error:
            details = str(error.details())
            if details.startswith(("failed to connect", "errors resolving")):  # not an answer of the server
                why = details.rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
                raise _unreachable(self._target.url, why) from None
            said = f"{error.code().name}: {error.details()}"
            raise BenchError(f"{self._target.url} answered {method} with {said}") from None


def _unreachable(url: ServerUrl, why: str) -> BenchError:
    hint = ""
    if "certificate" in why.lower():
        hint = "; --tls-ca names the file of the authority that signed the server's certificate"
    elif not url.tls and "closed" in why.lower():
        hint = f"; a server with TLS needs {str(url).replace('://', 's://', 1)}"
    return BenchError(f"{url} cannot be reached: {why}{hint}")


def _grpc_channel(target: Target) -> grpc.Channel:
    import grpc

    tls = target.tls
    if tls is None:
        return grpc.insecure_channel(target.url.address, options=_UNLIMITED)
    if not tls.verify:
        text = "gRPC always verifies the server; give its authority by --tls-ca"
        raise BenchOptionError("--tls-no-verify", text)
    paths = (("--tls-ca", tls.ca), ("--tls-key", tls.key), ("--tls-cert", tls.cert))
    files = [_read_pem(option, path) for option, path in paths]
    return grpc.secure_channel(target.url.address, grpc.ssl_channel_credentials(*files), options=_UNLIMITED)


def _read_pem(option: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise BenchOptionError(option, f"{path} cannot be read: {error_reason(error)}") from None


class HttpControl(ServerControl):
    """A control over HTTP that uses only the standard library."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._model = model_path(target)
        try:
            context = tls_context(target.tls, http2=False)
        except OSError as error:
            raise BenchError(f"the files of TLS cannot be used: {error_reason(error)}") from None
        at = target.url.host, target.url.port
        self._connection: http.client.HTTPConnection
        if context is None:
            self._connection = http.client.HTTPConnection(*at, timeout=target.timeout_s)
        else:
            self._connection = http.client.HTTPSConnection(*at, timeout=target.timeout_s, context=context)

    def infer(self, request: HttpRequest) -> dict[str, int]:
        headers, body = self._send("POST", request.path, request.body, dict(request.headers))
        length = int(headers.get(_HEAD_LENGTH, len(body)))
        answer = _parse_document(body[:length])
        sizes = {}
        for one in answer.get("outputs", ()):
            parameters = one.get("parameters", {})
            if "shared_memory_region" not in parameters:
                sizes[one["name"]] = int(parameters.get("binary_data_size", 0))
        return sizes

    def register_system(self, name: str, key: str, nbytes: int) -> None:
        document = {"key": key, "offset": 0, "byte_size": nbytes}
        self._json("POST", f"/v2/systemsharedmemory/region/{name}/register", document)

    def register_cuda(self, name: str, handle: bytes, device: int, nbytes: int) -> None:
        raw = {"b64": base64.b64encode(handle).decode()}
        document = {"raw_handle": raw, "device_id": device, "byte_size": nbytes}
        self._json("POST", f"/v2/cudasharedmemory/region/{name}/register", document)

    def unregister(self, name: str, *, cuda: bool) -> None:
        kind = "cuda" if cuda else "system"
        self._json("POST", f"/v2/{kind}sharedmemory/region/{name}/unregister", {})

    def close(self) -> None:
        self._connection.close()

    def _document(self, what: str) -> JsonDocument:
        return self._json("GET", f"{self._model}/{what}".rstrip("/"))

    def _json(self, method: str, path: str, document: Mapping[str, Any] | None = None) -> JsonDocument:
        body = b"" if document is None else json.dumps(document).encode()
        return _parse_document(self._send(method, path, body, {})[1])

    def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[Mapping[str, str], bytes]:
        try:
            self._connection.request(method, path, body, {**headers, **dict(self._target.headers)})
            answer = self._connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(self._target.url, error_reason(error)) from None
        finally:  # the server may close an idle connection
            self._connection.close()
        if answer.status != 200:
            said = _parse_document(content).get("error") or content[:_MAX_TEXT].decode(errors="replace")
            raise BenchError(f"{self._target.url} answered {path} with {answer.status}: {said}")
        return {name.lower(): value for name, value in answer.getheaders()}, content


def _parse_document(content: bytes) -> JsonDocument:
    try:
        found = json.loads(content) if content else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _tensor_metadata(found: Sequence[Mapping[str, Any]], optional: frozenset[str]) -> tuple[TensorSpec, ...]:
    shapes = [tuple(map(int, one.get("shape", ()))) for one in found]
    return tuple(
        TensorSpec(one["name"], one["datatype"], shape, one["name"] in optional)
        for one, shape in zip(found, shapes, strict=True)
    )


class ServerTotals(NamedTuple):
    """Sums since the server's start, over all requested versions of the model."""

    success_count: int = 0
    queue_ns: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    compute_count: int = 0
    cache_hit_count: int = 0
    inference_count: int = 0
    execution_count: int = 0


@dataclass(frozen=True, slots=True)
class ServerTime:
    """Means over the requests of a level; ``rows_per_execution`` is the mean size of a merged batch."""

    requests: int
    queue_ms: float
    compute_input_ms: float
    compute_infer_ms: float
    compute_output_ms: float
    executions: int
    rows_per_execution: float
    cache_hits: int

    @property
    def compute_ms(self) -> float:
        return self.compute_input_ms + self.compute_infer_ms + self.compute_output_ms


def parse_statistics(statistics: Mapping[str, Any]) -> ServerTotals:
    """Return the sums of one entry of ``model_stats`` in JSON form, whose fields may be missing or texts."""
    durations = statistics.get("inference_stats", {})

    def total_of(name: str, key: str) -> int:
        return int(durations.get(name, {}).get(key, 0))

    return ServerTotals(
        total_of("success", "count"),
        total_of("queue", "ns"),
        total_of("compute_input", "ns"),
        total_of("compute_infer", "ns"),
        total_of("compute_output", "ns"),
        total_of("compute_infer", "count"),
        total_of("cache_hit", "count"),
        int(statistics.get("inference_count", 0)),
        int(statistics.get("execution_count", 0)),
    )


def server_time_between(before: ServerTotals | None, after: ServerTotals | None) -> ServerTime | None:
    """Return the means between two readings, or None without statistics or without a counted request."""
    if before is None or after is None:
        return None
    found = ServerTotals(*map(operator.sub, after, before))
    if found.success_count <= 0 or min(found) < 0:  # the server was restarted
        return None
    computed = max(found.compute_count, 1)
    return ServerTime(
        found.success_count,
        found.queue_ns / found.success_count / 1e6,
        found.compute_input_ns / computed / 1e6,
        found.compute_infer_ns / computed / 1e6,
        found.compute_output_ns / computed / 1e6,
        found.execution_count,
        found.inference_count / max(found.execution_count, 1),
        found.cache_hit_count,
    )
