"""What a model's configuration says of its sequences and of the resources of its instances. Pure."""

from __future__ import annotations

from typing import Any, Final

from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.rate_spec import RateSpec
from gpuserve.sequence_spec import CORRID, DIRECT, ControlSpec
from gpuserve.spec import ModelSpec
from gpuserve_worker.tensor import BYTES

#: The fields that hold what a flag is told by.
_FALSE_TRUE: Final = {"INT32": "int32_false_true", "FP32": "fp32_false_true", "BOOL": "bool_false_true"}


def sequence_batching(spec: ModelSpec) -> Any:
    """The ``ModelSequenceBatching`` message of a model of sequences."""
    sequence, batching = spec.sequence, spec.batching
    config = pb.ModelSequenceBatching(
        max_sequence_idle_microseconds=sequence.max_idle_us,
        control_input=[_control(one) for one in sequence.controls],
    )
    if sequence.strategy == DIRECT:
        config.direct.max_queue_delay_microseconds = batching.max_queue_delay_us
        config.direct.minimum_slot_utilization = sequence.minimum_slot_utilization
    else:
        config.oldest.max_candidate_sequences = sequence.seats(spec.max_batch_size)
        config.oldest.preferred_batch_size.extend(batching.preferred_batch_sizes)
        config.oldest.max_queue_delay_microseconds = batching.max_queue_delay_us
        config.oldest.preserve_ordering = batching.preserve_ordering
    return config


def rate_limiter(rate: RateSpec) -> Any:
    """The ``ModelRateLimiter`` message of an instance group."""
    resources = []
    for one in rate.resources:
        resource = pb.ModelRateLimiter.Resource(name=one.name, count=one.count)
        setattr(resource, "global", one.shared)
        resources.append(resource)
    return pb.ModelRateLimiter(resources=resources, priority=rate.priority)


def _control(control: ControlSpec) -> Any:
    kind = pb.ModelSequenceBatching.Control.Kind.Value(f"CONTROL_SEQUENCE_{control.kind.upper()}")
    told = pb.ModelSequenceBatching.Control(kind=kind)
    if control.kind == CORRID:
        datatype = "STRING" if control.datatype == BYTES else control.datatype
        told.data_type = pb.DataType.Value(f"TYPE_{datatype}")
    else:
        getattr(told, _FALSE_TRUE[control.datatype]).extend([control.false, control.true])
    return pb.ModelSequenceBatching.ControlInput(name=control.name, control=[told])
