"""Model configurations for clients: ``ModelSpec`` to Triton's ``ModelConfig``, and that to JSON. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.devices.names import devices_of
from gpuserve.model.options import key_and_value, rows
from gpuserve.model.spec import (
    CORRID,
    DIRECT,
    NO_RATE,
    InstanceSpec,
    ModelSpec,
    PolicySpec,
    SequenceControl,
)
from gpuserve_worker.protocol.tensor import BYTES, TensorSpec

BACKEND: Final = "python"
#: The platform of a model without a backend.
ENSEMBLE: Final = "ensemble"
#: Fields that clients see as the repository has them.
_KEPT: Final = (
    "platform", "backend", "version_policy", "optimization", "default_model_filename", "parameters",
    "metric_tags", "model_warmup", "input", "output", "sequence_batching",
)  # fmt: skip
_CUDA: Final = "cuda:"
#: The version of a step that uses the latest one.
LATEST: Final = -1
#: The fields with the values of a sequence flag.
_FALSE_TRUE: Final = {"INT32": "int32_false_true", "FP32": "fp32_false_true", "BOOL": "bool_false_true"}


def model_config(spec: ModelSpec, versions: Sequence[int] = ()) -> Any:
    """Return the ``ModelConfig`` message of a model, served in ``versions``; shapes have no batch axis."""
    files = {one.output: one.filename for one in spec.labels}
    config = _of_repository(spec)
    config.name = spec.name
    _set_tensors(
        config.input, spec.inputs, lambda one: {"allow_ragged_batch": one.ragged, "optional": one.optional}
    )
    _set_tensors(config.output, spec.outputs, lambda one: {"label_filename": files.get(one.name)})
    config.instance_group.extend(_instance_groups(spec.name, spec.instances))
    if not config.HasField("version_policy"):
        config.version_policy.specific.versions.extend(versions or (spec.version,))
    rows = config.max_batch_size
    fill(config, spec)
    if spec.max_active and rows:  # iterative sequences: requests have one row, and batches more
        config.max_batch_size = rows
    if spec.is_ensemble:
        for step in spec.steps:
            maps = {"input_map": dict(step.inputs), "output_map": dict(step.outputs)}
            config.ensemble_scheduling.step.add(
                model_name=step.model, model_version=step.version or LATEST, **maps
            )
    elif spec.in_sequences:
        states = list(config.sequence_batching.state)
        config.sequence_batching.CopyFrom(_sequence_batching(spec))
        config.sequence_batching.state.extend(states)
    elif spec.max_batch_size > 0 and spec.batching.merge:
        fill(config.dynamic_batching, spec.batching)
        fill(config.dynamic_batching, spec.queue)
        if not spec.batching.preferred_batch_sizes:
            config.dynamic_batching.preferred_batch_size.append(spec.max_batch_size)
    return config


def _of_repository(spec: ModelSpec) -> Any:
    """Return the repository's part of the config, or only the backend without a repository config."""
    if spec.triton_config:
        return pb.ModelConfig.FromString(spec.triton_config)
    platform, backend = (ENSEMBLE, "") if spec.is_ensemble else (BACKEND, BACKEND)
    return pb.ModelConfig(platform=platform, backend=backend)


def _set_tensors(
    field: Any, tensors: Sequence[TensorSpec], further: Callable[[TensorSpec], Mapping[str, Any]]
) -> None:
    """Replace the tensors of a field; tensors of the same name keep their reshape."""
    reshapes = {one.name: one.reshape for one in field if one.HasField("reshape")}
    del field[:]
    for one in tensors:
        more = {"reshape": reshapes.get(one.name), **further(one)}
        field.add(name=one.name, data_type=_data_type(one.datatype), dims=one.shape, **more)


def kept_config(config: Any) -> bytes:
    """Return the part of a repository's ``ModelConfig`` that ``ModelSpec.triton_config`` holds."""
    kept = pb.ModelConfig()
    kept.CopyFrom(config)
    for field in config.DESCRIPTOR.fields:
        if field.name not in _KEPT:
            kept.ClearField(field.name)
    if config.sequence_batching.iterative_sequence:
        kept.max_batch_size = config.max_batch_size
    return bytes(kept.SerializeToString(deterministic=True))


def platform_of(spec: ModelSpec) -> str:
    """Return the platform of a model as clients see it."""
    config = _of_repository(spec)
    return str(config.platform or config.backend)


def model_config_body(config: Any) -> bytes:
    return json.dumps(plain(config), separators=(",", ":")).encode()


def plain(message: Any) -> dict[str, Any]:
    """Return a message as JSON by field names: unset fields included, integers as numbers."""
    return {
        field.name: _plain_value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _plain_value(field: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain_value(field, value[key]) for key in value}
    if hasattr(value, "DESCRIPTOR"):
        return plain(value)
    if not isinstance(value, str | bytes | bool | int | float):  # repeated
        return [_plain_value(field, one) for one in value]
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _data_type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}"


def datatype(number: int) -> str:
    """Return the v2 datatype of a ``DataType``."""
    name: str = pb.DataType.Name(number).removeprefix("TYPE_")
    return BYTES if name == "STRING" else name


def _instance_groups(model_name: str, instances: tuple[InstanceSpec, ...]) -> Iterator[Any]:
    """Yield one group for each device and rate; several groups are numbered."""
    counts = Counter((one.device, one.rate) for one in instances)
    for number, ((device, rate), count) in enumerate(counts.items()):
        name = model_name if len(counts) == 1 else f"{model_name}_{number}"
        gpus = (
            [int(gpu.removeprefix(_CUDA)) for gpu in devices_of(device)] if device.startswith(_CUDA) else []
        )
        kind = "KIND_MODEL" if len(gpus) > 1 else "KIND_GPU" if gpus else "KIND_CPU"
        group = pb.ModelInstanceGroup(name=name, count=count, kind=kind, gpus=gpus)
        if rate != NO_RATE:
            needs = [{"name": one.name, "count": one.count, "global": one.shared} for one in rate.resources]
            group.rate_limiter.CopyFrom(pb.ModelRateLimiter(resources=needs, priority=rate.priority))
        yield group


def fill(message: Any, table: Any) -> None:
    """Set the fields of a message from the options of a table, except policies that limit nothing."""
    for name, row in rows(type(table)).items():
        if not row.option.triton:
            continue
        *parents, field = row.option.triton.split(".")
        inner = message
        for parent in parents:
            inner = getattr(inner, parent)
        value = getattr(table, name)
        if isinstance(value, PolicySpec):
            if value != PolicySpec():
                fill(getattr(inner, field), value)
        elif key_and_value(row.hint) is not None:
            for key, one in value:
                fill(getattr(inner, field)[key], one)
        elif isinstance(value, tuple):
            getattr(inner, field).extend(value)
        else:
            enum = inner.DESCRIPTOR.fields_by_name[field].enum_type
            setattr(inner, field, value if enum is None else enum.values_by_name[value.upper()].number)


def options_of(message: Any, table: type) -> dict[str, Any]:
    """Return the options of a table that a message sets to other values than the field's default."""
    found: dict[str, Any] = {}
    for row in rows(table).values():
        field = message.DESCRIPTOR.fields_by_name.get(row.option.triton)
        value = None if field is None else getattr(message, field.name)
        if not value:
            continue
        if field.enum_type is not None:
            value = field.enum_type.values_by_number[value].name.lower()
        elif (pair := key_and_value(row.hint)) is not None:
            value = {str(key): options_of(one, pair[1]) for key, one in sorted(value.items())}
        elif hasattr(value, "DESCRIPTOR"):
            value = options_of(value, row.hint)
        elif not isinstance(value, bool | int | float | str):  # repeated
            value = list(value)
        if value:
            found[row.name] = value
    return found


def _sequence_batching(spec: ModelSpec) -> Any:
    sequence, batching = spec.sequence, spec.batching
    config = pb.ModelSequenceBatching(control_input=[_control(one) for one in sequence.controls])
    fill(config, sequence)
    if sequence.strategy == DIRECT:
        config.direct.max_queue_delay_microseconds = batching.max_queue_delay_us
        config.direct.minimum_slot_utilization = sequence.minimum_slot_utilization
    else:
        config.oldest.max_candidate_sequences = sequence.seats(spec.max_batch_size)
        config.oldest.preferred_batch_size.extend(batching.preferred_batch_sizes)
        config.oldest.max_queue_delay_microseconds = batching.max_queue_delay_us
        config.oldest.preserve_ordering = batching.preserve_ordering
    return config


def _control(control: SequenceControl) -> dict[str, Any]:
    values: dict[str, Any] = {"data_type": _data_type(control.dtype)}
    if control.kind != CORRID:
        values = {_FALSE_TRUE[control.dtype]: control.false_true}
    return {
        "name": control.name,
        "control": [{"kind": f"CONTROL_SEQUENCE_{control.kind.upper()}", **values}],
    }
