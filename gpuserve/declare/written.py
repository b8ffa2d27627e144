"""From the classes that programs write (``model.py``) to the parts of a ``ModelSpec``. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from gpuserve.declare.ensembles import check_ensemble
from gpuserve.declare.model import (
    DynamicBatcher,
    ModelConfig,
    ModelWarmup,
    QueuePolicy,
    Step,
    Tensor,
)
from gpuserve.declare.rules import check_batching, told_as_config, whole_control, with_controls
from gpuserve.declare.spec import (
    NO_RATE,
    NO_SEQUENCES,
    BatchingSpec,
    InstanceSpec,
    ModelSpec,
    PolicySpec,
    QueueSpec,
    RateLimiter,
    SequenceBatching,
    StepSpec,
    check_model_name,
)
from gpuserve.declare.tensors import array_kind, label_specs, tensor_specs
from gpuserve.declare.warmups import warmups
from gpuserve.devices.names import CPU
from gpuserve.errors import BadModelConfig
from gpuserve.options import boolean, checked, declared, integer, rows

_Table = TypeVar("_Table")
#: Each table of which programs write another class.
_WRITTEN: Final[dict[type, type]] = {PolicySpec: QueuePolicy, StepSpec: Step}


def plain_options(config: ModelConfig) -> dict[str, Any]:
    """The options of ``ModelConfig`` that are options of ``ModelSpec`` by the same name, and plain values.
    Raises BadModelConfig: a value that cannot be; the text names it.
    """
    given = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    with told_as_config():
        return {
            name: checked(row, given[name], name)
            for name, row in rows(ModelSpec).items()
            if name in given and row.hint in {bool, str, int, float} and name != "max_batch_size"
        }


def batching_of(config: ModelConfig) -> tuple[int, BatchingSpec, QueueSpec]:
    """``max_batch_size``, 0 where the model does not batch, when batches are formed, and what may wait.
    Raises BadModelConfig: a value that cannot be, or values that do not go together.
    """
    with told_as_config():
        queue = QueueSpec() if config.queue is None else declared(QueueSpec, config.queue, "queue.")
        is_off = not isinstance(config.batching, BatchingSpec) and not boolean("batching", config.batching)
        size = 0 if is_off else integer("max_batch_size", config.max_batch_size, 1)
        if isinstance(config.batching, BatchingSpec):
            batching = declared(BatchingSpec, config.batching, "batching.")
        elif is_off:
            batching = BatchingSpec()
        else:
            batching, queue = _batcher(config, queue)
    written_for_triton = config.queue is None and isinstance(config.batching, bool)
    check_batching(size, batching, queue, in_tritons_names=written_for_triton)
    return size, batching, queue


def _batcher(config: ModelConfig, queue: QueueSpec) -> tuple[BatchingSpec, QueueSpec]:
    """What PyTriton's class says; where there is a queue, that says all of the queue."""
    batcher = config.batcher
    if batcher is None:
        return BatchingSpec(merge=False), queue
    if not isinstance(batcher, DynamicBatcher):
        raise ValueError(
            f"batcher must be a DynamicBatcher or None, got an object of type {type(batcher).__name__}"
        )
    batching, told = batching_and_queue(vars(batcher), _WRITTEN)
    if config.queue is None:
        return batching, told
    if told != QueueSpec():
        raise ValueError("priorities and their policies are said by queue or by batcher, not by both")
    return batching, queue


def batching_and_queue(
    given: Mapping[str, Any], written: Mapping[type, type] | None = None
) -> tuple[BatchingSpec, QueueSpec]:
    """What the values of a ``DynamicBatcher`` say, under its names for the options. Raises ValueError: a
    value that cannot be.
    """
    return declared(BatchingSpec, given, "", written), declared(QueueSpec, given, "", written)


def sequence_of(given: Any) -> SequenceBatching:
    """What ``ModelConfig.sequence_batching`` says; BadModelConfig names a value that cannot be."""
    if given is None:
        return NO_SEQUENCES
    with told_as_config():
        made = _written(SequenceBatching, given, "sequence_batching")
        return dataclasses.replace(made, controls=tuple(map(whole_control, made.controls)))


def rate_of(given: Any) -> RateLimiter:
    """What ``ModelConfig.rate_limiter`` says; BadModelConfig names a value that cannot be."""
    with told_as_config():
        return NO_RATE if given is None else _written(RateLimiter, given, "rate_limiter")


def _written(table: type[_Table], given: Any, name: str) -> _Table:
    if isinstance(given, Mapping):
        raise ValueError(f"{name} must be a {_WRITTEN.get(table, table).__name__}, got {given!r:.200}")
    return declared(table, given, f"{name}.", _WRITTEN)


def whole_model(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    instances: tuple[InstanceSpec, ...],
    given: Mapping[str, Any],
    warmup: Sequence[ModelWarmup] | None = None,
    **options: Any,
) -> ModelSpec:
    """A model with what follows from its other parts: where ``given`` says nothing of them, the kind of its
    arrays and its prefetch; its retries, and what tells of sequences in its warm-ups. Raises BindError: any
    of it cannot be served.
    """
    input_specs, output_specs = (
        tensor_specs(inputs, "INPUT", given["array"]),
        tensor_specs(outputs, "OUTPUT"),
    )
    options["array"] = array_kind(given["array"], inputs)
    if given["prefetch"] is None:
        options["prefetch"] = int(any(one.device != CPU for one in instances))
    sequence: SequenceBatching = options["sequence"]
    # Some of its responses may have been sent when the worker dies; or the callable's state is lost.
    options["retry_on_worker_death"] &= not (options["decoupled"] or sequence.strategy)
    warmed = warmups(warmup, input_specs, options["max_batch_size"])
    options.setdefault("labels", label_specs(outputs, output_specs))
    return ModelSpec(
        name=name,
        inputs=input_specs,
        outputs=output_specs,
        instances=instances,
        warmup=with_controls(warmed, sequence),
        **options,
    )


def ensemble_spec(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    steps: Sequence[Step],
    version: int,
    max_batch_size: int,
) -> ModelSpec:
    """An ensemble that holds in itself, of the arguments of ``Server.ensemble()``. Raises BindError: any of
    it cannot be served.
    """
    check_model_name(name)
    if any(isinstance(one, Tensor) and one.memory is not None for one in inputs):
        raise BadModelConfig(f"ensemble {name!r}: memory is for the inputs of the models of its steps")
    output_specs = tensor_specs(outputs, "OUTPUT")
    with told_as_config():
        spec = ModelSpec(
            name=name,
            version=integer("version", version, 1),
            inputs=tensor_specs(inputs, "INPUT"),
            outputs=output_specs,
            max_batch_size=integer("max_batch_size", max_batch_size),
            steps=_steps(f"ensemble {name!r}: steps", steps),
            labels=label_specs(outputs, output_specs),
        )
    check_ensemble(spec)
    return spec


def _steps(where: str, steps: Any) -> tuple[StepSpec, ...]:
    if not isinstance(steps, Sequence) or not steps or not all(isinstance(one, Step) for one in steps):
        raise ValueError(f"{where} must be a non-empty list of Step, got {steps!r:.200}")
    return tuple(_written(StepSpec, one, f"{where}[{number}]") for number, one in enumerate(steps))
