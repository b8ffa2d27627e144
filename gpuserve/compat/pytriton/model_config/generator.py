"""``ModelConfigGenerator``: the conversion of a configuration to Triton's message, as a dictionary or a
file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuserve.client.client_config import ClientModelConfig, TensorSpec
from gpuserve.compat.pytriton.exceptions import PyTritonModelConfigError, pytriton_errors
from gpuserve.core.errors import BindError
from gpuserve.model.build import batching_options
from gpuserve.model.declaration import ModelConfig, Tensor, tensor_specs
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve.model.triton_config import model_config


class ModelConfigGenerator:
    """A writer of one model configuration."""

    def __init__(self, config: ClientModelConfig) -> None:
        self._config = config

    def get_config(self) -> dict[str, Any]:
        """Return the configuration as protobuf's own JSON.

        Raises:
            PyTritonModelConfigError, PyTritonBadParameterError: if a value is invalid.
        """
        from google.protobuf import json_format  # type: ignore[import-untyped]

        document: dict[str, Any] = json_format.MessageToDict(self._message())
        return document

    def to_file(self, config_path: str | Path) -> str:
        """Write a ``config.pbtxt`` and return its text.

        Raises:
            PyTritonModelConfigError, PyTritonBadParameterError: if a value is invalid.
        """
        from google.protobuf import text_format

        text: str = text_format.MessageToString(self._message())
        Path(config_path).parent.mkdir(parents=True, exist_ok=True)
        Path(config_path).write_text(text)
        return text

    def _message(self) -> Any:
        with pytriton_errors():
            return model_config(_spec(self._config))


def _spec(config: ClientModelConfig) -> ModelSpec:
    size, batching, queue = batching_options(
        ModelConfig(config.batching, config.max_batch_size, config.batcher)
    )
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
        instances=_instances(config),
    )


def _tensors(declared: Any, prefix: str) -> Any:
    given: list[TensorSpec] = list(declared or ())
    try:
        tensors = [Tensor(one.shape, one.dtype, one.name, one.optional) for one in given]
        return tensor_specs(tensors, prefix)
    except BindError as error:
        raise PyTritonModelConfigError(str(error)) from error


def _instances(config: ClientModelConfig) -> tuple[InstanceSpec, ...]:
    """Return the instances. Only the kind of device is known, so GPU instances get the first GPU."""
    counts = config.instance_group.items()
    devices = {kind: "cuda:0" if kind.name == "KIND_GPU" else "cpu" for kind, _ in counts}
    return tuple(
        InstanceSpec(f"{number}", devices[kind], {}) for kind, count in counts for number in range(count or 1)
    )
