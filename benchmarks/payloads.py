"""What is sent to the echo model, and the check that a server answers it right.

Bodies are made once, by tritonclient, so all servers get the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.grpc import service_pb2

from benchmarks.servers import RunningServer, ServerFailed

INFER = "/inference.GRPCInferenceService/ModelInfer"
_GRPC_PREFIX_NBYTES = 5  # one byte of flags, four of length
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True, slots=True)
class Payload:
    """One row of FP32 of this size, as a request over each protocol."""

    nbytes: int

    @property
    def array(self) -> npt.NDArray[np.float32]:
        """The tensor: [1, nbytes / 4]."""
        return np.arange(self.nbytes // 4, dtype=np.float32)[None]

    def grpc_message(self) -> bytes:
        """A serialized ModelInferRequest with raw contents."""
        request = service_pb2.ModelInferRequest(model_name="echo")
        request.inputs.add(name="x", datatype="FP32", shape=self.array.shape)
        request.raw_input_contents.append(self.array.tobytes())
        return bytes(request.SerializeToString())

    def http_body(self) -> tuple[bytes, int]:
        """A binary v2 request, and the length of the JSON that it starts with."""
        tensor = http_client.InferInput("x", list(self.array.shape), "FP32")
        tensor.set_data_from_numpy(self.array)
        body, json_nbytes = http_client.InferenceServerClient.generate_request_body([tensor])
        return bytes(body), int(json_nbytes)

    def write_grpc_body(self, folder: Path) -> Path:
        """The body of a gRPC call in a file: prefix and message."""
        message = self.grpc_message()
        path = folder / f"grpc-{self.nbytes}.bin"
        path.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
        return path

    def write_http_body(self, folder: Path) -> tuple[Path, int]:
        """The body of an HTTP request in a file, and the length of its JSON."""
        body, json_nbytes = self.http_body()
        path = folder / f"http-{self.nbytes}.bin"
        path.write_bytes(body)
        return path, json_nbytes


def check_answers(running: RunningServer, nbytes: int) -> int:
    """Infer one tensor of this size, and a batch of three, over both protocols with tritonclient.

    Returns:
        Bytes of the body of a gRPC answer to the payload of this size, prefix included.

    Raises:
        ServerFailed: an answer was an error or not the tensor that was sent.
    """
    one_row = Payload(nbytes).array
    for array in (one_row, np.concatenate([one_row, one_row + 1, one_row + 2])):
        for protocol, infer in (("gRPC", _infer_grpc), ("HTTP", _infer_http)):
            answer = infer(running, array)
            if answer is None or answer.dtype != array.dtype or not np.array_equal(answer, array):
                raise ServerFailed(f"{running.server.title} does not echo {array.shape} over {protocol}")
    return _grpc_answer_nbytes(running, Payload(nbytes).grpc_message())


def _infer_grpc(running: RunningServer, array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
    tensor = grpc_client.InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    with grpc_client.InferenceServerClient(f"127.0.0.1:{running.ports.grpc}") as client:
        answer: npt.NDArray[np.float32] | None = client.infer("echo", [tensor]).as_numpy("y")
    return answer


def _infer_http(running: RunningServer, array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
    tensor = http_client.InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    with http_client.InferenceServerClient(f"127.0.0.1:{running.ports.http}") as client:
        answer: npt.NDArray[np.float32] | None = client.infer("echo", [tensor]).as_numpy("y")
    return answer


def _grpc_answer_nbytes(running: RunningServer, message: bytes) -> int:
    with grpc.insecure_channel(f"127.0.0.1:{running.ports.grpc}", options=_OPTIONS) as channel:
        answer: bytes = channel.unary_unary(INFER)(message, timeout=30)
    return _GRPC_PREFIX_NBYTES + len(answer)
