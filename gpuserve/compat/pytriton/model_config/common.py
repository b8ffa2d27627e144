"""The parts of a ``ModelConfig``, and the requests of a warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuserve.client.client_config import DeviceKind
from gpuserve.compat.pytriton.exceptions import pytriton_errors
from gpuserve.model.build import warmups
from gpuserve.model.declaration import DynamicBatcher, ModelWarmup, QueuePolicy, TimeoutAction, WarmupInput
from gpuserve_worker.inference.inference_request import Request
from gpuserve_worker.inference.model_context import ModelContext
from gpuserve_worker.protocol.tensor import TensorSpec, datatype_of

__all__ = [
    "DeviceKind", "DynamicBatcher", "ModelWarmup", "QueuePolicy", "TimeoutAction", "WarmupInput",
    "generate_warmup_data", "generate_warmup_requests",
]  # fmt: skip

_INPUT = "input"


def generate_warmup_data(warmup_input: WarmupInput, batch_size: int) -> Any:
    """Return the array ``[batch_size, *shape]`` of one input of a warm-up.

    Raises:
        PyTritonBadParameterError: if the input has no values.
    """
    (request,) = generate_warmup_requests([ModelWarmup("warmup", batch_size, {_INPUT: warmup_input}, 1)])
    return request[_INPUT]


def generate_warmup_requests(
    model_warmup: Sequence[ModelWarmup] | None,
    input_specs: Sequence[Any] = (),
    outputs_specs: Sequence[Any] = (),
) -> list[dict[str, Any]]:
    """Return the arrays by name of each request of the warm-ups, ``count`` requests each, as instances
    receive them.

    The warm-ups themselves describe the tensors. The specs are accepted and ignored.

    Raises:
        PyTritonBadParameterError: if a warm-up has an invalid value.
    """
    return [request.data for one in model_warmup or () for request in _requests(one)]


def _requests(model_warmup: ModelWarmup) -> list[Request]:
    from gpuserve_worker.inference.warmup import warmup_batches

    given = model_warmup.inputs.items()
    inputs = tuple(TensorSpec(name, datatype_of(one.dtype), tuple(one.shape or ())) for name, one in given)
    size = model_warmup.batch_size
    with pytriton_errors():
        declared = warmups([model_warmup], inputs, size)
    model = ModelContext(model_warmup.name, 1, "0", "cpu", inputs, (), size, (), False)
    requests: list[Request] = []
    for batch in warmup_batches(declared, model):
        requests += batch.as_list()
    return requests
