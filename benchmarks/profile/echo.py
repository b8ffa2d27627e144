"""The model that the stages run: ``echo`` of the other benchmarks, and one request for it of 64 bytes."""

from __future__ import annotations

from typing import Final

from gpuserve.front.requests.inference import InferRequest, InputTensor
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec
from gpuserve_worker.protocol.wire import Done, Run, WireTensor

INSTANCE: Final = "cpu#0"
ELEMENTS: Final = 16
DATA: Final = bytes(4 * ELEMENTS)
X: Final = TensorSpec("x", "FP32", (-1,))
Y: Final = TensorSpec("y", "FP32", (-1,))
SPEC: Final = ModelSpec("echo", (X,), (Y,), 64, (InstanceSpec(INSTANCE, "cpu", {}),))


def infer_request() -> InferRequest:
    tensor = InputTensor("x", "FP32", (1, ELEMENTS), DATA)
    return InferRequest("echo", "", "", {}, [tensor], (), None)


def run(batch_id: int, requests: int) -> Run:
    """The batch of so many requests, as the front sends it."""
    tensor = WireTensor("x", "FP32", (requests, ELEMENTS), DATA * requests)
    return Run(batch_id, (1,) * requests, (tensor,))


def done(batch_id: int, requests: int) -> Done:
    """The answer to it, as a worker sends it."""
    tensor = WireTensor("y", "FP32", (requests, ELEMENTS), DATA * requests)
    return Done(batch_id, (tensor,), None, True, 10_000, 10_000, 10_000)
