"""Declarations of models: gpuserve's own classes, whose names and defaults are PyTriton's; the requests of a
warm-up; and the conversion of configurations to and from Triton's messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuserve.client.client_config import (
    ClientModelConfig,
    DeviceKind,
    ResponseCache,
    TensorSpec,
    parse_model_config,
)
from gpuserve.client.client_config import ClientModelConfig as TritonModelConfig
from gpuserve.compat.pytriton.exceptions import PyTritonModelConfigError, pytriton_errors
from gpuserve.core.errors import BindError
from gpuserve.model.declaration import (
    DynamicBatcher,
    ModelConfig,
    ModelWarmup,
    QueuePolicy,
    Tensor,
    TimeoutAction,
    WarmupInput,
    tensor_specs,
)
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec as ServedTensor
from gpuserve_worker.protocol.tensor import datatype_of

__all__ = [
    "DeviceKind", "DynamicBatcher", "ModelConfig", "ModelConfigGenerator", "ModelConfigParser", "ModelWarmup",
    "QueuePolicy", "ResponseCache", "Tensor", "TensorSpec", "TimeoutAction", "TritonModelConfig",
    "WarmupInput", "generate_warmup_data", "generate_warmup_requests",
]  # fmt: skip

_INPUT = "input"


def generate_warmup_data(warmup_input: WarmupInput, batch_size: int) -> Any:
    """Return the array ``[batch_size, *shape]`` of a warm-up's input; raise PyTritonBadParameterError."""
    (request,) = generate_warmup_requests([ModelWarmup("warmup", batch_size, {_INPUT: warmup_input}, 1)])
    return request[_INPUT]


def generate_warmup_requests(
    model_warmup: Sequence[ModelWarmup] | None,
    input_specs: Sequence[Any] = (),
    outputs_specs: Sequence[Any] = (),
) -> list[dict[str, Any]]:
    """Return the arrays by name of each request, ``count`` for each warm-up; raise PyTritonBadParameterError.
    The specs are ignored: warm-ups describe their tensors themselves.
    """
    return [request.data for one in model_warmup or () for request in _requests(one)]


def _requests(model_warmup: ModelWarmup) -> list[Any]:
    from gpuserve.model.build import warmups
    from gpuserve_worker.inference.model_context import ModelContext
    from gpuserve_worker.inference.warmup import warmup_batches

    given = model_warmup.inputs.items()
    inputs = tuple(ServedTensor(name, datatype_of(one.dtype), tuple(one.shape or ())) for name, one in given)
    size = model_warmup.batch_size
    with pytriton_errors():
        declared = warmups([model_warmup], inputs, size)
    model = ModelContext(model_warmup.name, 1, "0", "cpu", inputs, (), size, (), False)
    requests: list[Any] = []
    for batch in warmup_batches(declared, model):
        requests += batch.as_list()
    return requests


class ModelConfigGenerator:
    """A writer of one model configuration."""

    def __init__(self, config: ClientModelConfig) -> None:
        self._config = config

    def get_config(self) -> dict[str, Any]:
        """Return the configuration as protobuf's own JSON; raise PyTritonModelConfigError."""
        from google.protobuf import json_format  # type: ignore[import-untyped]

        document: dict[str, Any] = json_format.MessageToDict(self._message())
        return document

    def to_file(self, config_path: str | Path) -> str:
        """Write a ``config.pbtxt`` and return its text; raise PyTritonModelConfigError."""
        from google.protobuf import text_format

        text: str = text_format.MessageToString(self._message())
        Path(config_path).parent.mkdir(parents=True, exist_ok=True)
        Path(config_path).write_text(text)
        return text

    def _message(self) -> Any:
        from gpuserve.model.triton_config import model_config

        with pytriton_errors():
            return model_config(_spec(self._config))


def _spec(config: ClientModelConfig) -> ModelSpec:
    from gpuserve.model.build import batching_options

    size, batching, queue = batching_options(
        ModelConfig(config.batching, config.max_batch_size, config.batcher)
    )
    counts = config.instance_group.items()
    # Only the kind of device is known, so GPU instances get the first GPU.
    devices = [
        "cuda:0" if kind is DeviceKind.KIND_GPU else "cpu"
        for kind, count in counts
        for _ in range(count or 1)
    ]
    return ModelSpec(
        name=config.model_name,
        version=config.model_version,
        inputs=_tensors(config.inputs, "INPUT"),
        outputs=_tensors(config.outputs, "OUTPUT"),
        max_batch_size=size,
        batching=batching,
        queue=queue,
        decoupled=config.decoupled,
        response_cache=config.response_cache is not None and config.response_cache.enable,
        instances=tuple(InstanceSpec(f"{number}", one, {}) for number, one in enumerate(devices)),
    )


def _tensors(declared: Any, prefix: str) -> Any:
    try:
        tensors = [Tensor(one.shape, one.dtype, one.name, one.optional) for one in declared or ()]
        return tensor_specs(tensors, prefix)
    except BindError as error:
        raise PyTritonModelConfigError(str(error)) from error


class ModelConfigParser:
    """A reader of configurations with the names of protobuf's fields."""

    @classmethod
    def from_dict(cls, model_config_dict: Mapping[str, Any]) -> ClientModelConfig:
        """Return the configuration in a server's JSON; raise PyTritonModelConfigError."""
        try:
            return parse_model_config(model_config_dict)
        except KeyError as error:
            raise PyTritonModelConfigError(f"The model configuration has no {error}.") from error
        except (TypeError, ValueError) as error:
            raise PyTritonModelConfigError(f"The model configuration cannot be read: {error}") from error

    @classmethod
    def from_file(cls, *, config_path: Path) -> ClientModelConfig:
        """Return the configuration in a ``config.pbtxt``; raise PyTritonModelConfigError."""
        from google.protobuf import json_format, text_format
        from tritonclient.grpc import model_config_pb2

        try:
            message = text_format.Parse(Path(config_path).read_text(), model_config_pb2.ModelConfig())
        except (OSError, text_format.ParseError) as error:
            raise PyTritonModelConfigError(f"{config_path} cannot be read: {error}") from error
        return cls.from_dict(json_format.MessageToDict(message, preserving_proto_field_name=True))
