"""From the arguments of ``Server.bind()`` to a ``ModelSpec``. No process and no socket here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpuserve.array_spec import device_problem
from gpuserve.declared_batcher import batching_spec, boolean, integer, queue_spec
from gpuserve.declared_rate import rate_spec
from gpuserve.declared_sequences import check_sequences, sequence_spec, with_controls
from gpuserve.declared_warmup import warmups
from gpuserve.devices.names import CPU, check_device_name
from gpuserve.errors import BadModelConfig, BindError, DuplicateModel
from gpuserve.model import DynamicBatcher, ModelConfig, Tensor, array_kind, label_specs, tensor_specs
from gpuserve.pickling import described, pickled_source
from gpuserve.rate_spec import RateSpec
from gpuserve.spec import (
    MAX_CONCURRENCY,
    RESTART_WORKER,
    SHUTDOWN,
    BatchingSpec,
    InstanceSpec,
    ModelSpec,
    QueueSpec,
    check_model_name,
)
from gpuserve_worker.callable import YIELDING, kind_of


def model_spec(
    model_name: str,
    infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    model_version: int,
    config: ModelConfig | None,
    strict: bool,
    isolation: str,
    concurrency: int | None = None,
    on_unrecoverable: str = SHUTDOWN,
    device: str | Sequence[str] = CPU,
) -> ModelSpec:
    """What ``bind()`` was given, as a ``ModelSpec``.

    Raises:
        BindError: any of it cannot be served.
    """
    check_model_name(model_name)
    config = _config(config)
    integer("model_version", model_version, 1)
    _check_one_of("isolation", isolation, ("process", "thread"))
    _check_one_of("on_unrecoverable", on_unrecoverable, (SHUTDOWN, RESTART_WORKER))
    callables, devices = _paired(_callables(infer_func), _devices(device))
    _check_answers(config, callables)
    array = array_kind(config.array, inputs)
    _check_devices(array, devices)
    max_batch_size, batching, queue = _batching(config)
    input_specs = tensor_specs(inputs, "INPUT", config.array)
    output_specs = tensor_specs(outputs, "OUTPUT")
    sequence = sequence_spec(config.sequence_batching)
    check_sequences(
        sequence, batching, queue, input_specs, model=model_name, response_cache=config.response_cache
    )
    warmup = warmups(config.model_warmup, input_specs, max_batch_size)
    return ModelSpec(
        name=model_name,
        version=model_version,
        inputs=input_specs,
        outputs=output_specs,
        max_batch_size=max_batch_size,
        batching=batching,
        queue=queue,
        concurrency=_concurrency(concurrency),
        strict=bool(strict),
        decoupled=config.decoupled,
        response_cache=config.response_cache,
        array=array,
        # Some of its responses may have been sent when the worker dies; or the callable's state is lost.
        retry_on_worker_death=not config.decoupled and not sequence.strategy,
        on_unrecoverable=on_unrecoverable,
        warmup=with_controls(warmup, sequence),
        instances=_instances(model_name, callables, devices, isolation, rate_spec(config.rate_limiter)),
        prefetch=int(any(one != CPU for one in devices)),
        sequence=sequence,
        labels=label_specs(outputs, output_specs),
    )


def check_new(spec: ModelSpec, bound: Iterable[ModelSpec], *, one_version: bool = False) -> None:
    """Do nothing if a model of this name and version may join those that are bound.

    Raises:
        DuplicateModel: it is bound, or with ``one_version`` any version is; case does not tell names apart.
    """
    for one in bound:
        if one.name.lower() != spec.name.lower():
            continue
        known = f"{spec.name!r} is bound already"
        if one.name != spec.name:
            known += f", as {one.name!r}, and names must differ in more than case"
        elif one.version != spec.version:
            if not one_version:
                continue
            known += f", as version {one.version}, and an attached program serves one version of a name"
        raise DuplicateModel(f"Cannot add model with the same name twice: {known}")


def _config(config: Any) -> ModelConfig:
    if config is None:
        return ModelConfig()
    if not isinstance(config, ModelConfig):
        raise BadModelConfig(f"config must be a ModelConfig, got an object of type {type(config).__name__}")
    return config


def _check_one_of(name: str, value: object, words: tuple[str, str]) -> None:
    if value not in words:
        raise BindError(f"{name} must be {words[0]!r} or {words[1]!r}, got {value!r}")


def _instances(
    model_name: str,
    callables: Sequence[Callable[..., Any]],
    devices: Sequence[str],
    isolation: str,
    rate: RateSpec,
) -> tuple[InstanceSpec, ...]:
    """One instance an element. A callable that is there several times is pickled, and held, once."""
    distinct = {id(one): one for one in callables}
    sources = {key: _source(model_name, one, isolation) for key, one in distinct.items()}
    return tuple(
        InstanceSpec(f"{number}", device, sources[id(one)], rate)
        for number, (one, device) in enumerate(zip(callables, devices, strict=True))
    )


def _devices(device: Any) -> list[str]:
    """What ``device`` names, one at least."""
    given = [device] if isinstance(device, str) else device
    if not isinstance(given, Sequence) or not given or not all(isinstance(one, str) for one in given):
        raise BindError(f"device must be a string or a non-empty sequence of strings, got {device!r:.200}")
    try:
        return [check_device_name(one) for one in given]
    except ValueError as error:
        raise BindError(f"device: {error}") from None


def _check_devices(array: str, devices: Sequence[str]) -> None:
    if problem := device_problem(array, devices):
        raise BindError(f"device: {problem}")


def _paired(
    callables: Sequence[Callable[..., Any]], devices: Sequence[str]
) -> tuple[list[Callable[..., Any]], list[str]]:
    """One callable and one device for each instance, where one of either may stand for several."""
    if len(callables) != len(devices) and 1 not in (len(callables), len(devices)):
        raise BindError(
            f"there are {len(callables)} callables and {len(devices)} devices: give one device, or one for "
            "each callable"
        )
    count = max(len(callables), len(devices))
    return [*callables] * (count // len(callables)), [*devices] * (count // len(devices))


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


def _batching(config: ModelConfig) -> tuple[int, BatchingSpec, QueueSpec]:
    """``max_batch_size``, 0 where the model does not batch, when batches are formed, and what may wait."""
    if not boolean("batching", config.batching):
        return 0, BatchingSpec(), QueueSpec()
    most, batcher = integer("max_batch_size", config.max_batch_size, 1), config.batcher
    if batcher is None:
        return most, BatchingSpec(merge=False), QueueSpec()
    if not isinstance(batcher, DynamicBatcher):
        raise BadModelConfig(
            f"batcher must be a DynamicBatcher or None, got an object of type {type(batcher).__name__}"
        )
    return most, batching_spec(batcher, most), queue_spec(batcher)


def _concurrency(concurrency: int | None) -> int:
    """0 leaves it to the worker."""
    if concurrency is None:
        return 0
    if integer("concurrency", concurrency, 1) > MAX_CONCURRENCY:
        raise BindError(f"concurrency must be at most {MAX_CONCURRENCY}, got {concurrency}")
    return concurrency


def _check_answers(config: ModelConfig, callables: Sequence[Callable[..., Any]]) -> None:
    """Whether the model's way to answer is one that its callables have, and that can be cached."""
    decoupled = boolean("decoupled", config.decoupled)
    if boolean("response_cache", config.response_cache) and decoupled:
        raise BadModelConfig(
            "response_cache does not go with decoupled: only a model that gives one response to a request "
            "can be answered from memory"
        )
    yielding = [one for one in callables if kind_of(one) in YIELDING]
    if yielding and not decoupled:
        raise BindError(
            f"{described(yielding[0])} is {kind_of(yielding[0]).value}, which gives any number of responses "
            "to a request: say decoupled=True in ModelConfig, or return one response"
        )


def _source(model_name: str, infer_func: Callable[..., Any], isolation: str) -> dict[str, Any]:
    return {"object": infer_func} if isolation == "thread" else pickled_source(model_name, infer_func)
