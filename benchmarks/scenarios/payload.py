"""The request of the scenarios: one row of 64 bytes, answered as it came; and the check of that."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from benchmarks.payloads import INFER, framed
from benchmarks.servers import RunningServer, ServerFailed

_ROW = np.arange(16, dtype=np.float32)
_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class RowPayload:
    """One row of 16 FP32 for a model that echoes it; a ``Payload`` for h2load as well."""

    model: str
    path = INFER
    messages = 1

    def grpc_message(self) -> bytes:
        """A serialized ModelInferRequest with raw contents."""
        request = service_pb2.ModelInferRequest(model_name=self.model)
        request.inputs.add(name="x", datatype="FP32", shape=(1, _ROW.size))
        request.raw_input_contents.append(_ROW.tobytes())
        return bytes(request.SerializeToString())

    def check(self, running: RunningServer) -> bytes:
        """Ask once; returns the body of a right answer.

        Raises:
            ServerFailed: the server answered wrong, or not.
        """
        title = running.server.title
        with grpc.insecure_channel(f"127.0.0.1:{running.ports.grpc}") as channel:
            try:
                message: bytes = channel.unary_unary(self.path)(self.grpc_message(), timeout=_TIMEOUT_S)
            except grpc.RpcError as error:
                raise ServerFailed(f"{title}, model {self.model}: {error.details()}") from None
        response = service_pb2.ModelInferResponse.FromString(message)
        if list(response.raw_output_contents) != [_ROW.tobytes()]:
            raise ServerFailed(f"{title}, model {self.model} does not echo a row: {response}")
        return framed(message)
