"""From the arguments of ``Server.bind()`` to a ``ModelSpec``. No process and no socket here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpuserve.errors import BindError
from gpuserve.model import DynamicBatcher, ModelConfig, Tensor, tensor_specs
from gpuserve.pickling import pickled_source
from gpuserve.spec import BatchingSpec, InstanceSpec, ModelSpec, check_model_name


def model_spec(
    model_name: str,
    infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    model_version: int,
    config: ModelConfig | None,
    strict: bool,
    isolation: str,
) -> ModelSpec:
    """What ``bind()`` was given, as a ``ModelSpec``.

    Raises:
        BindError: any of it cannot be served.
    """
    check_model_name(model_name)
    if isolation not in {"process", "thread"}:
        raise BindError(f"isolation must be 'process' or 'thread', got {isolation!r}")
    if not _is_integer(model_version, 1):
        raise BindError(f"model_version must be an integer of at least 1, got {model_version!r}")
    callables = _callables(infer_func)
    max_batch_size, batching = _batching(config)
    return ModelSpec(
        name=model_name,
        version=model_version,
        inputs=tensor_specs(inputs, "INPUT"),
        outputs=tensor_specs(outputs, "OUTPUT"),
        max_batch_size=max_batch_size,
        batching=batching,
        strict=bool(strict),
        instances=_instances(model_name, callables, isolation),
    )


def _instances(
    model_name: str, callables: Sequence[Callable[..., Any]], isolation: str
) -> tuple[InstanceSpec, ...]:
    """One instance an element. A callable that is there several times is pickled, and held, once."""
    distinct = {id(one): one for one in callables}
    sources = {key: _source(model_name, one, isolation) for key, one in distinct.items()}
    return tuple(InstanceSpec(f"{number}", "cpu", sources[id(one)]) for number, one in enumerate(callables))


def _callables(infer_func: Any) -> list[Callable[..., Any]]:
    if callable(infer_func):
        return [infer_func]
    if isinstance(infer_func, Sequence) and infer_func and all(map(callable, infer_func)):
        return list(infer_func)
    raise BindError(
        f"infer_func must be a callable or a non-empty sequence of callables, got {_shown(infer_func)}"
    )


def _shown(infer_func: Any) -> str:
    if not isinstance(infer_func, list | tuple):
        return f"an object of type {type(infer_func).__name__}"
    kinds = ", ".join(type(one).__name__ for one in infer_func)
    return f"a {type(infer_func).__name__} of {kinds or 'nothing'}"


def _batching(config: ModelConfig | None) -> tuple[int, BatchingSpec]:
    """``max_batch_size``, 0 where the model does not batch, and when batches are formed."""
    config = ModelConfig() if config is None else config
    if not isinstance(config, ModelConfig):
        raise BindError(f"config must be a ModelConfig, got an object of type {type(config).__name__}")
    if not config.batching:
        return 0, BatchingSpec()
    if not _is_integer(config.max_batch_size, 1):
        raise BindError(f"max_batch_size must be an integer of at least 1, got {config.max_batch_size!r}")
    if config.batcher is None:
        return config.max_batch_size, BatchingSpec(merge=False)
    return config.max_batch_size, _merging(config.batcher, config.max_batch_size)


def _merging(batcher: DynamicBatcher, max_batch_size: int) -> BatchingSpec:
    if not isinstance(batcher, DynamicBatcher):
        raise BindError(
            f"batcher must be a DynamicBatcher or None, got an object of type {type(batcher).__name__}"
        )
    delay_us, preferred = batcher.max_queue_delay_microseconds, batcher.preferred_batch_size
    if not _is_integer(delay_us, 0):
        raise BindError(f"max_queue_delay_microseconds must be an integer of at least 0, got {delay_us!r}")
    if preferred is None:
        return BatchingSpec(delay_us)
    sizes_fit = isinstance(preferred, Sequence) and all(_is_integer(size, 1) for size in preferred)
    if not sizes_fit or any(size > max_batch_size for size in preferred):
        raise BindError(
            f"preferred_batch_size must be a list of integers from 1 to max_batch_size ({max_batch_size}), "
            f"got {preferred!r}"
        )
    return BatchingSpec(delay_us, tuple(preferred))


def _source(model_name: str, infer_func: Callable[..., Any], isolation: str) -> dict[str, Any]:
    return {"object": infer_func} if isolation == "thread" else pickled_source(model_name, infer_func)


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
