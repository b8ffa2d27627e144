"""gpuserve's decorators under PyTriton's names, and PyTriton's way to the model that is served. Imported by
user code inside workers: nothing here may import a server.
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
from gpuserve_worker.calling.context import ModelContext
from gpuserve_worker.calling.request import Request

if TYPE_CHECKING:
    from gpuserve.client.config import ClientModelConfig

__all__ = [
    "ConstantPadder",
    "InferenceRequest",
    "InferenceRequests",
    "InferenceResult",
    "InferenceResults",
    "InputNames",
    "ModelConfigDict",
    "TritonContext",
    "batch",
    "convert_output",
    "fill_optionals",
    "first_value",
    "get_inference_request_batch_size",
    "get_model_config",
    "get_triton_context",
    "group_by_keys",
    "group_by_values",
    "pad_batch",
    "sample",
    "triton_context",
]

InputNames: TypeAlias = list[str]
InferenceRequest: TypeAlias = Request
InferenceRequests: TypeAlias = list[Request] | tuple[Request, ...]
InferenceResult: TypeAlias = dict[str, Any]
InferenceResults: TypeAlias = list[InferenceResult] | tuple[InferenceResult, ...]


class ModelConfigDict(MutableMapping[Callable[..., Any], "ClientModelConfig"]):
    """Configurations by inference callable; an object and its ``__call__`` are the same."""

    def __init__(self) -> None:
        self._configs: dict[str, ClientModelConfig] = {}
        self._callables: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, infer_callable: Callable[..., Any]) -> ClientModelConfig:
        return self._configs[_key(infer_callable)]

    def __setitem__(self, infer_callable: Callable[..., Any], config: ClientModelConfig) -> None:
        self._callables[_key(infer_callable)] = infer_callable
        self._configs[_key(infer_callable)] = config

    def __delitem__(self, infer_callable: Callable[..., Any]) -> None:
        del self._callables[_key(infer_callable)], self._configs[_key(infer_callable)]

    def __len__(self) -> int:
        return len(self._configs)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self._callables.values())


class _ServedConfig(ModelConfigDict):
    """Whoever asks is the callable of the model that is served here, and no other is known."""

    def __init__(self, config: ClientModelConfig, function: Callable[..., Any]) -> None:
        super().__init__()
        self._served = config
        self[function] = config

    def __getitem__(self, infer_callable: Callable[..., Any]) -> ClientModelConfig:
        return self._served

    def __contains__(self, infer_callable: object) -> bool:
        return callable(infer_callable)


class TritonContext:
    """What ``@triton_context`` gives: ``model_configs`` by callable, ``model_config`` of the model served."""

    def __init__(self, model_configs: ModelConfigDict | None = None) -> None:
        self.model_configs = ModelConfigDict() if model_configs is None else model_configs

    @property
    def model_config(self) -> ClientModelConfig:
        """The configuration of the model that is served here.

        Raises:
            PyTritonValidationError: none is.
        """
        return _model_config(_served())


def triton_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give the function the keyword argument ``triton_context``, a ``TritonContext``.

    Raises (when called):
        PyTritonValidationError: no server calls it.
    """

    @wraps_request_list(function)
    def call(*args: Any, **given: Any) -> Any:
        given.setdefault("triton_context", get_triton_context(function, None))
        return function(*args, **given)

    return call


def get_triton_context(wrapped: Any, instance: Any) -> TritonContext:
    """The context of the server that calls the inference callable.

    Raises:
        PyTritonValidationError: none does.
    """
    return TritonContext(_ServedConfig(_model_config(_served()), wrapped))


def get_model_config(wrapped: Any, instance: Any) -> ClientModelConfig:
    """The configuration of the model whose inference callable is called.

    Raises:
        PyTritonValidationError: no server calls it.
    """
    return _model_config(_served())


def convert_output(
    outputs: Any, wrapped: Any = None, instance: Any = None, model_config: ClientModelConfig | None = None
) -> InferenceResult:
    """Outputs by name: a list's are those of the model, in order.

    Raises:
        PyTritonValidationError: there are not as many as the model has, or these are no outputs.
    """
    if isinstance(outputs, dict):
        return outputs
    config = get_model_config(wrapped, instance) if model_config is None else model_config
    try:
        return dict(named(outputs, [one.name for one in config.outputs or ()]))
    except ValueError as error:
        raise PyTritonValidationError(str(error)) from error


def get_inference_request_batch_size(inference_request: Any) -> int:
    """How many rows a request has."""
    first = next(iter(inference_request.values()))
    return int(first.shape[0])


def _key(infer_callable: Any) -> str:
    """As an object is called by its ``__call__``, so it is found by it."""
    owner = getattr(infer_callable, "__self__", None)
    if owner is not None and getattr(infer_callable, "__name__", "") == "__call__":
        infer_callable = owner
    return str(infer_callable)


def _served() -> ModelContext:
    try:
        return current_model()
    except LookupError:
        raise PyTritonValidationError(
            "Wrapped function or object must bound with triton to get  __triton_context__"
        ) from None


def _model_config(model: ModelContext) -> ClientModelConfig:
    from gpuserve.client.config import parse_model_config

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
