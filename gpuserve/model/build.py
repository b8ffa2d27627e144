"""From the classes that programs write to a ``ModelSpec``; workers make the arrays of warm-ups."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from gpuserve.core.errors import BadModelConfig
from gpuserve.devices.names import CPU
from gpuserve.model.declaration import (
    FILE,
    RANDOM,
    ZERO,
    DynamicBatcher,
    ModelConfig,
    ModelWarmup,
    QueuePolicy,
    Step,
    Tensor,
    WarmupInput,
    array_kind,
    label_specs,
    tensor_specs,
)
from gpuserve.model.options import boolean, checked, declared, integer, rows
from gpuserve.model.rules import (
    Violation,
    check_batching,
    check_ensemble,
    check_ragged,
    complete_control,
    value_errors_as_bad_config,
    with_control_inputs,
)
from gpuserve.model.spec import (
    NO_RATE,
    NO_SEQUENCES,
    RAGGED_BATCH_ELEMENTS,
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
from gpuserve_worker.protocol.tensor import TensorSpec, datatype_of

#: (name, datatype, shape, source, file) and (name, batch size, count, inputs), as in ``wire.Init.warmup``.
WarmedInput: TypeAlias = tuple[str, str, tuple[int, ...], str, str]
Warmup: TypeAlias = tuple[str, int, int, tuple[WarmedInput, ...]]


def warmups(
    declared: Sequence[ModelWarmup] | None, inputs: Sequence[TensorSpec], max_batch_size: int
) -> tuple[Warmup, ...]:
    """Return the warm-ups of a model with these inputs; raise BadModelConfig if a value is invalid."""
    if declared is None:
        return ()
    if not isinstance(declared, Sequence) or not all(isinstance(one, ModelWarmup) for one in declared):
        raise BadModelConfig(f"model_warmup must be a list of ModelWarmup, got {declared!r:.200}")
    found = []
    with value_errors_as_bad_config():
        for one in declared:
            batch_size, count = _checked_warmup(one)
            for _, text in warmup_faults(one, inputs, max_batch_size):
                raise BadModelConfig(text)
            named = [_warmup_input(spec, one.inputs[spec.name]) for spec in inputs if spec.name in one.inputs]
            found.append((one.name, batch_size, count, tuple(named)))
    return tuple(found)


def warmup_as_given(one: ModelWarmup, inputs: Sequence[TensorSpec]) -> Warmup:
    """Return a warm-up with just the inputs that it names, even invalid requests; raise BadModelConfig."""
    with value_errors_as_bad_config():
        batch_size, count = _checked_warmup(one)
        known = {spec.name: spec for spec in inputs}
        named = []
        for name, given in one.inputs.items():
            spec = known.get(name)
            if spec is None:
                if given.dtype is None or given.shape is None:
                    raise BadModelConfig(
                        f"warm-up {one.name!r}: input {name!r} is none of the model, and has "
                        "no dtype or no shape"
                    )
                spec = TensorSpec(name, datatype_of(given.dtype), tuple(given.shape))
            named.append(_warmup_input(spec, given))
    return one.name, batch_size, count, tuple(named)


def warmup_faults(one: ModelWarmup, inputs: Sequence[TensorSpec], max_batch_size: int) -> Iterator[Violation]:
    """Yield, by place, the reasons why the model would refuse a warm-up whose own values are valid."""
    where = f"warm-up {one.name!r}"
    if max_batch_size and one.batch_size > max_batch_size:
        text = f"batch_size must be at most max_batch_size ({max_batch_size}), got {one.batch_size}"
        yield Violation(("batch_size",), f"{where}: {text}")
    known = [spec.name for spec in inputs]
    if unknown := [name for name in one.inputs if name not in known]:
        text = f"the model has no input {unknown[0]!r}; its inputs are {', '.join(known) or 'none'}"
        yield Violation(("inputs",), f"{where}: {text}")
    for spec in inputs:
        if spec.name in one.inputs:
            yield from _warmup_input_faults(f"{where}: input {spec.name!r}", spec, one.inputs[spec.name])
        elif not spec.optional:
            yield Violation(("inputs",), f"{where}: the input {spec.name!r} is missing")


def _warmup_input_faults(where: str, spec: TensorSpec, given: WarmupInput) -> Iterator[Violation]:
    place = ("inputs", spec.name)
    _, datatype, shape, _, path = _warmup_input(spec, given)
    if datatype != spec.datatype:
        text = f"{where} is {datatype}, but the model declares it as {spec.datatype}"
        yield Violation(place, text)
    if -1 in shape:
        yield Violation(place, f"{where} has no shape, and the model declares {list(spec.shape)}")
    elif len(shape) != len(spec.shape) or any(
        want not in (-1, dim) for want, dim in zip(spec.shape, shape, strict=True)
    ):
        text = f"{where} has the shape {list(shape)}, but the model declares {list(spec.shape)}, "
        yield Violation(place, text + "both without the batch axis")
    if path and not os.path.isfile(path):
        yield Violation((*place, "file"), f"{where}: there is no file {path}")


def _checked_warmup(one: ModelWarmup) -> tuple[int, int]:
    """Return a warm-up's batch size and count; raise BadModelConfig if they are invalid."""
    if not isinstance(one.name, str) or not one.name:
        raise BadModelConfig(f"the name of a ModelWarmup must be a non-empty string, got {one.name!r}")
    where = f"warm-up {one.name!r}"
    batch_size, count = (integer(f"{where}: {key}", getattr(one, key), 1) for key in ("batch_size", "count"))
    if not isinstance(one.inputs, Mapping):
        raise BadModelConfig(
            f"{where}: inputs must be a mapping of names to WarmupInput, got {one.inputs!r:.200}"
        )
    for name, given in one.inputs.items():
        at = f"{where}: input {name!r}"
        if not isinstance(given, WarmupInput):
            raise BadModelConfig(f"{at} must be a WarmupInput, got an object of type {type(given).__name__}")
        for key in ("dtype", "shape", "values"):
            checked(rows(WarmupInput)[key], getattr(given, key), f"{at}: {key}")
        if not isinstance(given.file, str | os.PathLike | None):
            raise BadModelConfig(f"{at}: file must be a path, got {given.file!r:.100}")
        if not (given.zero_data or given.random_data or given.file or given.values):
            text = (
                "One of 'zero_data', 'random_data', or 'input_data_file' must be provided for warmup input."
            )
            raise BadModelConfig(f"{at}: {text}")
    return batch_size, count


def _warmup_input(spec: TensorSpec, given: WarmupInput) -> WarmedInput:
    """Return an input for ``wire.Init.warmup``; paths are absolute, since workers have other directories."""
    datatype = spec.datatype if given.dtype is None else datatype_of(given.dtype)
    shape = spec.shape if given.shape is None else tuple(given.shape)
    if given.file:
        return spec.name, datatype, shape, FILE, os.path.abspath(given.file)
    source = ZERO if given.zero_data or given.values == ZERO else RANDOM
    return spec.name, datatype, shape, source, ""


_Table = TypeVar("_Table")
#: Tables that programs write as another class.
_WRITTEN: Final[dict[type, type]] = {PolicySpec: QueuePolicy, StepSpec: Step}


#: The types of options that need no conversion.
_PLAIN: Final = {bool, str, int, float, tuple[str, ...]}


def plain_options(config: ModelConfig) -> dict[str, Any]:
    """Return ``ModelConfig``'s plain options that ``ModelSpec`` names alike; raise BadModelConfig."""
    given = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    with value_errors_as_bad_config():
        return {
            name: checked(row, given[name], name)
            for name, row in rows(ModelSpec).items()
            if name in given and row.hint in _PLAIN and name != "max_batch_size"
        }


def batching_options(config: ModelConfig) -> tuple[int, BatchingSpec, QueueSpec]:
    """Return ``max_batch_size`` (0: none), batching and queue options; raise BadModelConfig."""
    with value_errors_as_bad_config():
        queue = QueueSpec() if config.queue is None else declared(QueueSpec, config.queue, "queue.")
        is_off = not isinstance(config.batching, BatchingSpec) and not boolean("batching", config.batching)
        size = 0 if is_off else _option("max_batch_size", config.max_batch_size)
        if size == 0 and not is_off:
            raise ValueError(
                "max_batch_size must be an integer of at least 1, got 0: "
                "batching=False declares a model that does not batch"
            )
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
    """Return the options of a ``DynamicBatcher``; ``queue``, if given, replaces its queue options."""
    batcher = config.batcher
    if batcher is None:
        return BatchingSpec(merge=False), queue
    if not isinstance(batcher, DynamicBatcher):
        raise ValueError(
            f"batcher must be a DynamicBatcher or None, got an object of type {type(batcher).__name__}"
        )
    batching, queue_options = batching_and_queue(vars(batcher), _WRITTEN)
    if config.queue is None:
        return batching, queue_options
    if queue_options != QueueSpec():
        raise ValueError("priorities and queue policies must be given by queue or by batcher, not by both")
    return batching, queue


def batching_and_queue(
    given: Mapping[str, Any], written: Mapping[type, type] | None = None
) -> tuple[BatchingSpec, QueueSpec]:
    """Return the options that a ``DynamicBatcher``'s values set; raise ValueError if a value is invalid."""
    return declared(BatchingSpec, given, "", written), declared(QueueSpec, given, "", written)


def sequence_options(given: Any) -> SequenceBatching:
    if given is None:
        return NO_SEQUENCES
    with value_errors_as_bad_config():
        made = _written(SequenceBatching, given, "sequence_batching")
        return dataclasses.replace(made, controls=tuple(map(complete_control, made.controls)))


def rate_options(given: Any) -> RateLimiter:
    with value_errors_as_bad_config():
        return NO_RATE if given is None else _written(RateLimiter, given, "rate_limiter")


def _written(table: type[_Table], given: Any, name: str) -> _Table:
    if isinstance(given, Mapping):
        raise ValueError(f"{name} must be a {_WRITTEN.get(table, table).__name__}, got {given!r:.200}")
    return declared(table, given, f"{name}.", _WRITTEN)


def build_model_spec(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    instances: tuple[InstanceSpec, ...],
    given: Mapping[str, Any],
    warmup: Sequence[ModelWarmup] | None = None,
    **options: Any,
) -> ModelSpec:
    """Return a model, and derive what follows from other parts of the declaration: the array library and the
    prefetch, if ``given`` leaves them out, the retries, and the control inputs of warm-ups. Raise BindError.
    """
    input_specs, output_specs = tensor_specs(inputs, "INPUT", given["array"]), tensor_specs(outputs, "OUTPUT")
    with value_errors_as_bad_config():
        options |= {key: _option(key, one) for key, one in options.items() if key in rows(ModelSpec)}
    options["array"] = array_kind(given["array"], inputs)
    if any(one.ranks > 1 for one in instances):
        options["read_only_inputs"] = True  # all ranks read the same memory
    if given["prefetch"] is None:
        options["prefetch"] = int(any(one.device != CPU for one in instances))
    sequence: SequenceBatching = options["sequence"]
    # Some responses may have been sent when the worker dies; the state of a sequence is lost with the worker.
    stepped = bool(options["max_active"])
    once = options["decoupled"] and not stepped
    options["retry_on_worker_death"] &= not (once or sequence.strategy)
    warmed = warmups(warmup, input_specs, options["max_batch_size"])
    batching: BatchingSpec = options.get("batching", BatchingSpec())
    if stepped:
        if sequence.strategy:
            raise BadModelConfig("sequence_batching does not go with max_active: a step has many requests")
        # The callable joins requests itself, and an instance begins every request that it is given.
        batching = options["batching"] = dataclasses.replace(batching, merge=False)
        options["prefetch"] = 0
    if not batching.max_batch_elements and any(one.ragged for one in input_specs):
        options["batching"] = dataclasses.replace(batching, max_batch_elements=RAGGED_BATCH_ELEMENTS)
    options.setdefault("labels", label_specs(outputs, output_specs))
    spec = ModelSpec(
        name=name,
        inputs=input_specs,
        outputs=output_specs,
        instances=instances,
        warmup=with_control_inputs(warmed, sequence),
        **options,
    )
    check_ragged(spec)
    return spec


def _option(name: str, value: Any) -> Any:
    """Return the value of a ``ModelSpec`` option; raise ValueError if the option cannot have the value."""
    row = rows(ModelSpec)[name]
    # A default may lie outside the range that may be given, such as the 0 of concurrency.
    return value if value is row.default else checked(row, value, name)


def ensemble_spec(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    steps: Sequence[Step],
    version: int,
    max_batch_size: int,
    decoupled: bool,
) -> ModelSpec:
    """Return the ensemble of ``Server.ensemble()``'s arguments, models unchecked; raise BindError."""
    check_model_name(name)
    input_specs, output_specs = tensor_specs(inputs, "INPUT"), tensor_specs(outputs, "OUTPUT")
    if any(one.memory is not None for one in inputs):
        raise BadModelConfig(f"ensemble {name!r}: memory is for the inputs of the models of its steps")
    where = f"ensemble {name!r}: steps"
    if not isinstance(steps, Sequence) or not steps or not all(isinstance(one, Step) for one in steps):
        raise BadModelConfig(f"{where} must be a non-empty list of Step, got {steps!r:.200}")
    with value_errors_as_bad_config():
        spec = ModelSpec(
            name=name,
            version=_option("version", version),
            inputs=input_specs,
            outputs=output_specs,
            max_batch_size=_option("max_batch_size", max_batch_size),
            decoupled=_option("decoupled", decoupled),
            steps=tuple(_written(StepSpec, one, f"{where}[{number}]") for number, one in enumerate(steps)),
            labels=label_specs(outputs, output_specs),
        )
    check_ensemble(spec)
    return spec
