"""Requests over gRPC, by grpcio: balanced by its own channel, or by a proxy in front of the pods."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2

from benchmarks.rollout.load import TIMEOUT_S, Transient, Wrong
from benchmarks.rollout.outcomes import Kind, Way
from benchmarks.rollout.served_requests import PAUSE_S, parts, value

_CALL: Final = "/inference.GRPCInferenceService/"
#: As docs/kubernetes.md has it.
SERVICE_CONFIG: Final = json.dumps({
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": "readiness"},
    "methodConfig": [{
        "name": [{}],
        "retryPolicy": {
            "maxAttempts": 4,
            "initialBackoff": "0.05s",
            "maxBackoff": "1s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        },
    }],
})  # fmt: skip


def balancing_channel(addresses: Sequence[str]) -> grpc.aio.Channel:
    """To all ``host:port`` there may be pods on; grpcio asks for their health and chooses."""
    options = [
        ("grpc.service_config", SERVICE_CONFIG),
        ("grpc.use_local_subchannel_pool", 1),
        # A pod that comes back to an address is found soon. By name, new pods have new addresses.
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 200),
    ]
    return grpc.aio.insecure_channel("ipv4:" + ",".join(addresses), options=options)


def proxied_channel(address: str) -> grpc.aio.Channel:
    """To a proxy at ``host:port``, which balances and repeats."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    return grpc.aio.insecure_channel(address, options=options)


class UnaryClient:
    """See ``load.Client``; ``channel`` is closed with it."""

    kind = Kind.GRPC_UNARY

    def __init__(self, way: Way, channel: grpc.aio.Channel) -> None:
        self.way = way
        self._channel = channel
        self._infer = channel.unary_unary(
            _CALL + "ModelInfer", response_deserializer=service_pb2.ModelInferResponse.FromString
        )

    async def ask(self, number: int) -> int:
        request = _request("double", x=np.full((1, 1), value(number), np.float32))
        call = self._infer(request, timeout=TIMEOUT_S)
        try:
            answer = await call
            n_sent = _times_sent(await call.initial_metadata())
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from None
        _check(_numbers(answer), [2 * value(number)])
        return n_sent

    async def close(self) -> None:
        await self._channel.close()


class StreamClient:
    """See ``load.Client``; ``channel`` is closed with it. Every request is a stream that it then closes."""

    kind = Kind.GRPC_STREAM

    def __init__(self, way: Way, channel: grpc.aio.Channel) -> None:
        self.way = way
        self._channel = channel
        self._stream = channel.stream_stream(
            _CALL + "ModelStreamInfer",
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )

    async def ask(self, number: int) -> int:
        x, pause = np.full(1, value(number), np.float32), np.full(1, PAUSE_S, np.float32)
        call = self._stream(iter([_request("count", x=x, pause_s=pause)]), timeout=TIMEOUT_S)
        got: list[float] = []
        try:
            async for answer in call:
                if answer.error_message:
                    raise Wrong(answer.error_message)
                got += _numbers(answer.infer_response)
            n_sent = _times_sent(await call.initial_metadata())
        except grpc.aio.AioRpcError as error:
            raise _failure(error, f" after {len(got)} answers") from None
        _check(got, parts(number))
        return n_sent

    async def close(self) -> None:
        await self._channel.close()


def _request(model: str, **tensors: np.ndarray[Any, Any]) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in tensors.items():
        request.inputs.add(name=name, datatype="FP32", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    serialised: bytes = request.SerializeToString()
    return serialised


def _numbers(answer: Any) -> list[float]:
    found: list[float] = []
    for content in answer.raw_output_contents:
        found += np.frombuffer(content, np.float32).tolist()
    return found


def _check(got: list[float], expected: list[float]) -> None:
    if got != expected:
        raise Wrong(f"expected {expected}, got {got}")


def _times_sent(metadata: Any) -> int:
    return int(dict(metadata).get("x-envoy-attempt-count", 1))


def _failure(error: grpc.aio.AioRpcError, when: str = "") -> Exception:
    """A proxy that loses a pod in the midst of an answer resets the stream, and grpcio says INTERNAL."""
    code, details = error.code(), error.details() or ""
    passes = code is grpc.StatusCode.UNAVAILABLE or "RST_STREAM" in details
    text = f"{code.name}{when}: {details}"
    return Transient(text) if passes else Wrong(text)
