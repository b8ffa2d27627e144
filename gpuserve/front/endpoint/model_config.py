"""A model's configuration as clients are told it: ``ModelSpec`` to Triton's ``ModelConfig`` message, and
that to JSON with the names of its fields.

Pure. What the configuration leaves out of ``ModelSpec`` (queue limits in bytes, warm-up) has no field there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.ensemble_spec import StepSpec
from gpuserve.front.endpoint.http_json import compact
from gpuserve.front.endpoint.sequence_config import rate_limiter, sequence_batching
from gpuserve.rate_spec import NO_RATE, RateSpec
from gpuserve.spec import InstanceSpec, ModelSpec, PolicySpec
from gpuserve_worker.tensor import BYTES, TensorSpec

BACKEND: Final = "python"
#: The platform of what has no backend.
ENSEMBLE: Final = "ensemble"
_CUDA: Final = "cuda:"
#: What a step says that takes whichever version is the latest.
_LATEST: Final = -1


def model_config(spec: ModelSpec, versions: Sequence[int] = ()) -> Any:
    """The ``ModelConfig`` message of a model. Shapes are without the batch axis where the model batches.

    ``versions`` are those that are served, where they are more than this one.
    """
    files = {one.output: one.filename for one in spec.labels}
    config = pb.ModelConfig(
        name=spec.name,
        platform=ENSEMBLE if spec.is_ensemble else BACKEND,
        backend="" if spec.is_ensemble else BACKEND,
        max_batch_size=spec.max_batch_size,
        input=[_input(one) for one in spec.inputs],
        output=[_output(one, files.get(one.name, "")) for one in spec.outputs],
        instance_group=_instance_groups(spec.name, spec.instances),
    )
    config.version_policy.specific.versions.extend(versions or (spec.version,))
    config.model_transaction_policy.decoupled = spec.decoupled
    config.response_cache.enable = spec.response_cache
    if spec.is_ensemble:
        config.ensemble_scheduling.step.extend(_step(one) for one in spec.steps)
    elif spec.in_sequences:
        config.sequence_batching.CopyFrom(sequence_batching(spec))
    elif spec.max_batch_size > 0 and spec.batching.merge:
        config.dynamic_batching.CopyFrom(_dynamic_batching(spec))
    return config


def _step(step: StepSpec) -> Any:
    return pb.ModelEnsembling.Step(
        model_name=step.model,
        model_version=step.version or _LATEST,
        input_map=dict(step.inputs),
        output_map=dict(step.outputs),
    )


def model_config_body(config: Any) -> bytes:
    """The answer of ``/v2/models/{m}/config``."""
    return compact(plain(config)).encode()


def plain(message: Any) -> dict[str, Any]:
    """A protobuf message as JSON knows it, with the names of its fields and with those that are not set,
    but for messages. Unlike protobuf's own JSON, 64-bit integers are numbers.
    """
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


def _data_type(datatype: str) -> int:
    number: int = pb.DataType.Value("TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}")
    return number


def _input(spec: TensorSpec) -> Any:
    data_type = _data_type(spec.datatype)
    return pb.ModelInput(name=spec.name, data_type=data_type, dims=spec.shape, optional=spec.optional)


def _output(spec: TensorSpec, label_filename: str) -> Any:
    return pb.ModelOutput(
        name=spec.name,
        data_type=_data_type(spec.datatype),
        dims=spec.shape,
        label_filename=label_filename,
    )


def _instance_groups(model_name: str, instances: tuple[InstanceSpec, ...]) -> list[Any]:
    """One group a device and rate. A single group has the model's name, several are numbered."""
    counts: dict[tuple[str, RateSpec], int] = {}
    for one in instances:
        counts[one.device, one.rate] = counts.get((one.device, one.rate), 0) + 1
    groups = []
    for number, ((device, rate), count) in enumerate(counts.items()):
        name = model_name if len(counts) == 1 else f"{model_name}_{number}"
        group = pb.ModelInstanceGroup(name=name, count=count, kind=pb.ModelInstanceGroup.KIND_CPU)
        if device.startswith(_CUDA):
            group.kind = pb.ModelInstanceGroup.KIND_GPU
            group.gpus.append(int(device.removeprefix(_CUDA)))
        if rate != NO_RATE:
            group.rate_limiter.CopyFrom(rate_limiter(rate))
        groups.append(group)
    return groups


def _dynamic_batching(spec: ModelSpec) -> Any:
    queue = spec.queue
    batching = pb.ModelDynamicBatching(
        preferred_batch_size=spec.batching.preferred_batch_sizes or (spec.max_batch_size,),
        max_queue_delay_microseconds=spec.batching.max_queue_delay_us,
        preserve_ordering=spec.batching.preserve_ordering,
        priority_levels=queue.priority_levels,
        default_priority_level=queue.default_priority,
    )
    if queue.policy != PolicySpec():
        batching.default_queue_policy.CopyFrom(_queue_policy(queue.policy))
    for level, policy in queue.policies:
        batching.priority_queue_policy[level].CopyFrom(_queue_policy(policy))
    return batching


def _queue_policy(policy: PolicySpec) -> Any:
    return pb.ModelQueuePolicy(
        timeout_action=pb.ModelQueuePolicy.TimeoutAction.Value(policy.on_timeout.upper()),
        default_timeout_microseconds=policy.default_timeout_us,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_requests,
    )
