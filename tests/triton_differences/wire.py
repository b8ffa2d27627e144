"""Sends a step to one server and returns what came back, unchanged. The only part that opens sockets."""

from __future__ import annotations

import http.client
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.servers import Ports
from triton_differences.answers import Answer, GrpcAnswer, HttpAnswer, NoAnswer
from triton_differences.steps import METRICS, Case, HttpStep, Region, Step, StreamStep, UnaryStep

_TIMEOUT_S = 5.0
_SERVICE = "inference.GRPCInferenceService"
_SHARED_MEMORY = Path("/dev/shm")
_COMPRESSION = {"": None, "gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}


@dataclass(frozen=True, slots=True)
class CaseAnswers:
    """The answer to each step, and what the regions held afterwards."""

    answers: tuple[Answer, ...]
    regions: tuple[bytes, ...]


class Client:
    """One server, seen as bytes."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._channel = grpc.insecure_channel(f"127.0.0.1:{ports.grpc}")

    def close(self) -> None:
        """Closes what is kept open between steps."""
        self._channel.close()

    def run(self, case: Case) -> CaseAnswers:
        """All steps, in order."""
        with _existing(case.regions):
            answers = tuple(map(self.send, case.steps))
            return CaseAnswers(answers, tuple(_path(one).read_bytes() for one in case.regions))

    def send(self, step: Step) -> Answer:
        """One step."""
        match step:
            case HttpStep():
                return self._http(step)
            case UnaryStep():
                return self._unary(step)
            case StreamStep():
                return self._stream(step)

    def _http(self, step: HttpStep) -> Answer:
        port = self._ports.metrics if step.port == METRICS else self._ports.http
        try:
            with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as connection:
                connection.sendall(step.raw)
                answer = http.client.HTTPResponse(connection, method=step.raw.split(b" ", 1)[0].decode())
                answer.begin()
                return HttpAnswer(answer.status, _headers(answer), answer.read())
        except (OSError, http.client.HTTPException) as error:
            return NoAnswer(type(error).__name__)

    def _unary(self, step: UnaryStep) -> Answer:
        path = step.method if "/" in step.method else f"/{_SERVICE}/{step.method}"
        call = self._channel.unary_unary(path)  # no serializers: bytes in, bytes out
        options: dict[str, Any] = {"timeout": _TIMEOUT_S, "metadata": step.metadata}
        try:
            answer = call(step.message, compression=_COMPRESSION[step.compression], **options)
        except grpc.RpcError as error:
            return GrpcAnswer(path, error.code().name, error.details() or "", ())
        return GrpcAnswer(path, "OK", "", (answer,))

    def _stream(self, step: StreamStep) -> Answer:
        path = f"/{_SERVICE}/ModelStreamInfer"
        call = self._channel.stream_stream(path)(
            iter(step.messages), timeout=_TIMEOUT_S, metadata=step.metadata
        )
        messages: list[bytes] = []
        with suppress(grpc.RpcError):  # code and details tell of it
            messages.extend(call)
        return GrpcAnswer(path, call.code().name, call.details() or "", tuple(messages))


def _headers(answer: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.getheaders()}


def _path(region: Region) -> Path:
    return _SHARED_MEMORY / region.key.removeprefix("/")


@contextmanager
def _existing(regions: tuple[Region, ...]) -> Iterator[None]:
    for region in regions:
        descriptor = os.open(_path(region), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(region.content)
    try:
        yield
    finally:
        for region in regions:
            _path(region).unlink()
