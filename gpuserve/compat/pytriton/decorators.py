"""gpuserve's decorators under PyTriton's names, and PyTriton's access to the served model.

User code in workers imports this module, so nothing here may import a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

from gpuserve.compat.pytriton.exceptions import PyTritonValidationError
from gpuserve.decorators import (
    ConstantPadder,
    batch,
    current_model,
    fill_optionals,
    first_value,
    group_by_keys,
    group_by_values,
    pad_batch,
    sample,
)
from gpuserve.decorators.batch_data import named
from gpuserve.decorators.wrapping import wraps_request_list
from gpuserve_worker.inference.inference_request import Request
from gpuserve_worker.inference.model_context import ModelContext

if TYPE_CHECKING:
    from gpuserve.client.client_config import ClientModelConfig

__all__ = [
    "ConstantPadder", "InferenceRequest", "InferenceRequests", "InferenceResult", "InferenceResults",
    "InputNames", "ModelConfigDict", "TritonContext", "batch", "convert_output", "fill_optionals",
    "first_value", "get_inference_request_batch_size", "get_model_config", "get_triton_context",
    "group_by_keys", "group_by_values", "pad_batch", "sample", "triton_context",
]  # fmt: skip

InputNames: TypeAlias = list[str]
InferenceRequest: TypeAlias = Request
InferenceRequests: TypeAlias = list[Request] | tuple[Request, ...]
InferenceResult: TypeAlias = dict[str, Any]
InferenceResults: TypeAlias = list[InferenceResult] | tuple[InferenceResult, ...]


class ModelConfigDict(MutableMapping[Callable[..., Any], "ClientModelConfig"]):
    """Configurations by inference callable. An object and its ``__call__`` are the same key."""

    def __init__(self) -> None:
        self._configs: dict[str, ClientModelConfig] = {}
        self._callables: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, infer_callable: Callable[..., Any]) -> ClientModelConfig:
        return self._configs[_callable_key(infer_callable)]

    def __setitem__(self, infer_callable: Callable[..., Any], config: ClientModelConfig) -> None:
        self._callables[_callable_key(infer_callable)] = infer_callable
        self._configs[_callable_key(infer_callable)] = config

    def __delitem__(self, infer_callable: Callable[..., Any]) -> None:
        del self._callables[_callable_key(infer_callable)], self._configs[_callable_key(infer_callable)]

    def __len__(self) -> int:
        return len(self._configs)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self._callables.values())


class _ServedConfig(ModelConfigDict):
    """The configuration of the served model, returned for every callable."""

    def __init__(self, config: ClientModelConfig, function: Callable[..., Any]) -> None:
        super().__init__()
        self._served = config
        self[function] = config

    def __getitem__(self, infer_callable: Callable[..., Any]) -> ClientModelConfig:
        return self._served

    def __contains__(self, infer_callable: object) -> bool:
        return callable(infer_callable)


class TritonContext:
    """The value of ``@triton_context``: configurations by callable, and the served one."""

    def __init__(self, model_configs: ModelConfigDict | None = None) -> None:
        self.model_configs = ModelConfigDict() if model_configs is None else model_configs

    @property
    def model_config(self) -> ClientModelConfig:
        """The configuration of the served model. Raise PyTritonValidationError if no model is served here."""
        return _model_config(_served_model())


def triton_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass ``triton_context`` to a function, which raises PyTritonValidationError outside a server."""

    @wraps_request_list(function)
    def call(*args: Any, **given: Any) -> Any:
        given.setdefault("triton_context", get_triton_context(function, None))
        return function(*args, **given)

    return call


def get_triton_context(wrapped: Any, instance: Any) -> TritonContext:
    """Return the context of the server that calls; raise PyTritonValidationError if none does."""
    return TritonContext(_ServedConfig(_model_config(_served_model()), wrapped))


def get_model_config(wrapped: Any, instance: Any) -> ClientModelConfig:
    """Return the called model's configuration; raise PyTritonValidationError if no server calls."""
    return _model_config(_served_model())


def convert_output(
    outputs: Any, wrapped: Any = None, instance: Any = None, model_config: ClientModelConfig | None = None
) -> InferenceResult:
    """Return outputs by name, of which a list has the model's in order; raise PyTritonValidationError."""
    if isinstance(outputs, dict):
        return outputs
    config = get_model_config(wrapped, instance) if model_config is None else model_config
    try:
        return dict(named(outputs, [one.name for one in config.outputs or ()]))
    except ValueError as error:
        raise PyTritonValidationError(str(error)) from error


def get_inference_request_batch_size(inference_request: Any) -> int:
    first = next(iter(inference_request.values()))
    return int(first.shape[0])


def _callable_key(infer_callable: Any) -> str:
    """Return the key of a callable. An object's ``__call__`` has the key of the object."""
    owner = getattr(infer_callable, "__self__", None)
    if owner is not None and getattr(infer_callable, "__name__", "") == "__call__":
        infer_callable = owner
    return str(infer_callable)


def _served_model() -> ModelContext:
    try:
        return current_model()
    except LookupError:
        raise PyTritonValidationError(
            "Wrapped function or object must bound with triton to get  __triton_context__"
        ) from None


def _model_config(model: ModelContext) -> ClientModelConfig:
    from gpuserve.client.client_config import parse_model_config

    return parse_model_config(
        {
            "name": model.name,
            "max_batch_size": model.max_batch_size,
            "dynamic_batching": {"preferred_batch_size": model.preferred_batch_sizes},
            "model_transaction_policy": {"decoupled": model.decoupled},
            "input": [_tensor(one) for one in model.inputs],
            "output": [_tensor(one) for one in model.outputs],
        },
        str(model.version),
    )


def _tensor(spec: Any) -> dict[str, Any]:
    return {"name": spec.name, "data_type": spec.datatype, "dims": spec.shape, "optional": spec.optional}
