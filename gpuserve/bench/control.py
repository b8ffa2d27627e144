"""What is asked of a server beside the load: metadata, statistics, memory, one request.

Blocking, on connections of its own, over the protocol of the load. Two of a kind: ``GrpcControl`` and, in
``http_control``, ``HttpControl``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from gpuserve.bench.errors import BenchError, BenchOptionError
from gpuserve.bench.model_metadata import ModelMetadata, TensorMetadata
from gpuserve.bench.server_time import ServerTotals, totals
from gpuserve.bench.target import Target

if TYPE_CHECKING:
    import grpc

_UNLIMITED: Final = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_CONTROL_TIMEOUT_S: Final = 10.0


class Control(Protocol):
    """The server beside the load.

    Every method raises BenchError where the server cannot be reached or refuses.
    """

    def metadata(self) -> ModelMetadata:
        """The model as the server describes it."""

    def totals(self) -> ServerTotals | None:
        """The statistics of the model so far; None where the server has none."""

    def infer(self, request: Any) -> dict[str, int]:
        """One request; returns the bytes of each output that is in the answer.

        Args:
            request: a serialized message or an HttpRequest, by the protocol.
        """

    def register_system(self, name: str, key: str, nbytes: int) -> None:
        """Let the server use system shared memory."""

    def register_cuda(self, name: str, handle: bytes, device: int, nbytes: int) -> None:
        """Let the server use memory of a GPU; ``handle`` as cudaIpcGetMemHandle gives it."""

    def unregister(self, name: str, *, cuda: bool) -> None:
        """Take memory back."""

    def close(self) -> None:
        """End the connections."""


def connect(target: Target) -> Control:
    """The control of the protocol of the target; nothing is sent yet."""
    if target.is_grpc:
        return GrpcControl(target)
    from gpuserve.bench.http_control import HttpControl

    return HttpControl(target)


class GrpcControl:
    """``Control`` over gRPC."""

    def __init__(self, target: Target) -> None:
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        self._target = target
        self._messages = service_pb2
        self._channel = _channel(target)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def metadata(self) -> ModelMetadata:
        """See ``Control``."""
        names = {"name": self._target.model, "version": self._target.version}
        found = self._call("ModelMetadata", self._messages.ModelMetadataRequest(**names))
        batch, decoupled, optional = 0, False, frozenset[str]()
        try:
            config = self._call("ModelConfig", self._messages.ModelConfigRequest(**names)).config
        except BenchError:  # a server without the extension
            pass
        else:
            batch = config.max_batch_size
            decoupled = config.model_transaction_policy.decoupled
            optional = frozenset(one.name for one in config.input if one.optional)
        return ModelMetadata(
            found.name, _tensors(found.inputs, optional), _tensors(found.outputs), batch, decoupled
        )

    def totals(self) -> ServerTotals | None:
        """See ``Control``."""
        request = self._messages.ModelStatisticsRequest(name=self._target.model, version=self._target.version)
        try:
            found = self._call("ModelStatistics", request)
        except BenchError:
            return None
        return sum((totals(_plain(one)) for one in found.model_stats), ServerTotals())

    def infer(self, request: bytes) -> dict[str, int]:
        """See ``Control``."""
        message = self._messages.ModelInferRequest.FromString(request)
        answer = self._call("ModelInfer", message, self._target.timeout_s)
        contents = iter(answer.raw_output_contents)
        return {
            one.name: len(next(contents, b""))
            for one in answer.outputs
            if "shared_memory_region" not in one.parameters
        }

    def register_system(self, name: str, key: str, nbytes: int) -> None:
        """See ``Control``."""
        request = self._messages.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=nbytes)
        self._call("SystemSharedMemoryRegister", request)

    def register_cuda(self, name: str, handle: bytes, device: int, nbytes: int) -> None:
        """See ``Control``."""
        request = self._messages.CudaSharedMemoryRegisterRequest(
            name=name, raw_handle=handle, device_id=device, byte_size=nbytes
        )
        self._call("CudaSharedMemoryRegister", request)

    def unregister(self, name: str, *, cuda: bool) -> None:
        """See ``Control``."""
        kind = "Cuda" if cuda else "System"
        request = getattr(self._messages, f"{kind}SharedMemoryUnregisterRequest")(name=name)
        self._call(f"{kind}SharedMemoryUnregister", request)

    def close(self) -> None:
        """See ``Control``."""
        self._channel.close()

    def _call(self, method: str, request: Any, timeout_s: float = _CONTROL_TIMEOUT_S) -> Any:
        import grpc

        try:
            return getattr(self._stub, method)(
                request, timeout=timeout_s, metadata=self._target.headers, wait_for_ready=False
            )
        except grpc.RpcError as error:
            if (reason := _unreachable(str(error.details()))) is not None:
                raise BenchError(f"{self._target.url} cannot be reached: {reason}") from None
            said = f"{error.code().name}: {error.details()}"
            raise BenchError(f"{self._target.url} answers {method} with {said}") from None


def _unreachable(details: str) -> str | None:
    """Why there is no connection, in what gRPC says; None where the server itself has answered."""
    if details.startswith(("failed to connect", "errors resolving")):
        return details.rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
    return None


def _channel(target: Target) -> grpc.Channel:
    import grpc

    tls = target.tls
    if tls is None:
        return grpc.insecure_channel(target.url.address, options=_UNLIMITED)
    if not tls.verify:
        raise BenchOptionError(
            "--tls-no-verify", "gRPC always verifies the server; give its authority by --tls-ca"
        )
    files = [
        _read(option, path)
        for option, path in (("--tls-ca", tls.ca), ("--tls-key", tls.key), ("--tls-cert", tls.cert))
    ]
    return grpc.secure_channel(target.url.address, grpc.ssl_channel_credentials(*files), options=_UNLIMITED)


def _read(option: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise BenchOptionError(option, f"{path} cannot be read: {reason}") from None


def _tensors(found: Sequence[Any], optional: frozenset[str] = frozenset()) -> tuple[TensorMetadata, ...]:
    return tuple(
        TensorMetadata(one.name, one.datatype, tuple(one.shape), one.name in optional) for one in found
    )


def _plain(statistics: Any) -> dict[str, Any]:
    """A ModelStatistics in the form of JSON, as far as it is read."""
    durations = {
        field.name: {"count": duration.count, "ns": duration.ns}
        for field, duration in statistics.inference_stats.ListFields()
    }
    return {
        "inference_stats": durations,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
    }
