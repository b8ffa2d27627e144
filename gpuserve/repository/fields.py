"""What becomes of each field of a ``ModelConfig`` and of the messages in it: one row a field. A field is
honoured, has no effect here, or is refused with what to use instead. A test holds the tables to the
descriptor of the message, so a field of a later Triton is not passed over in silence. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.config.positions import Path


class Treatment(enum.Enum):
    """What this server does with a field that a config.pbtxt has."""

    HONOURED = "honoured"
    WITHOUT_EFFECT = "without effect"
    REFUSED = "refused"


class FieldRule(NamedTuple):
    """What becomes of a field. ``text`` says why it has no effect, or what to use in its place."""

    treatment: Treatment
    text: str = ""


class Finding(NamedTuple):
    """A field that is set and not honoured, and where it stands."""

    path: Path
    rule: FieldRule


Table: TypeAlias = Mapping[str, FieldRule]

YES: Final = FieldRule(Treatment.HONOURED)


def _idle(text: str) -> FieldRule:
    return FieldRule(Treatment.WITHOUT_EFFECT, text)


def _no(text: str) -> FieldRule:
    return FieldRule(Treatment.REFUSED, text)


def _honoured(*names: str) -> dict[str, FieldRule]:
    return dict.fromkeys(names, YES)


_TENSORRT: Final = _no("only TensorRT has such tensors; leave it out")
_RAGGED: Final = _no(
    "requests are batched by their first axis; pad them to one shape, or give the lengths as "
    "an input of their own"
)
_STATE: Final = _no(
    "the server keeps no state between the requests of a sequence; keep it in the model, by the "
    "correlation id, from the start flag of a sequence to its end flag"
)
_CUDA_GRAPHS: Final = _idle("only TensorRT captures graphs by a configuration")
_QUICK: Final = _idle("the server decides itself how tensors are copied")

#: By the name of the message, without the package; without those that only fields that are not honoured have.
TABLES: Final[Mapping[str, Table]] = {
    "ModelConfig": {
        **_honoured("name", "platform", "backend", "version_policy", "max_batch_size", "input", "output"),
        **_honoured("dynamic_batching", "sequence_batching", "ensemble_scheduling", "instance_group"),
        **_honoured("default_model_filename", "parameters", "model_warmup", "model_transaction_policy"),
        **_honoured("optimization", "response_cache"),
        "runtime": _no("a backend is not chosen by its library; leave it out"),
        "batch_input": _RAGGED,
        "batch_output": _RAGGED,
        "cc_model_filenames": _no(
            "a model has one file for all GPUs; give its name as default_model_filename"
        ),
        "metric_tags": _idle("metrics have the labels model and version"),
        "model_operations": _no("libraries of operators are loaded by the model itself: in a model.py"),
        "model_repository_agents": _no(
            "nothing is done to a model before it is loaded; check or decrypt it before the server starts"
        ),
        "model_metrics": _idle("histograms have the buckets of this server"),
    },
    "ModelVersionPolicy": _honoured("latest", "all", "specific"),
    "ModelVersionPolicy.Latest": _honoured("num_versions"),
    "ModelVersionPolicy.All": {},
    "ModelVersionPolicy.Specific": _honoured("versions"),
    "ModelInput": {
        **_honoured("name", "data_type", "dims", "reshape", "optional"),
        "format": _idle("it describes the axes; the dims say how long they are"),
        "is_shape_tensor": _TENSORRT,
        "allow_ragged_batch": _idle("requests of different shapes run in batches of their own"),
        "is_non_linear_format_io": _TENSORRT,
    },
    "ModelTensorReshape": _honoured("shape"),
    "ModelOutput": {
        **_honoured("name", "data_type", "dims", "reshape", "label_filename"),
        "is_shape_tensor": _TENSORRT,
        "is_non_linear_format_io": _TENSORRT,
    },
    "ModelOptimizationPolicy": {
        "graph": _idle("the runtimes have levels of optimization of their own"),
        "priority": _idle("models have no priority over one another on a GPU"),
        "cuda": _CUDA_GRAPHS,
        "execution_accelerators": _no(
            "a model runs by what its runtime brings; for another, call it in a model.py"
        ),
        "input_pinned_memory": _QUICK,
        "output_pinned_memory": _QUICK,
        "gather_kernel_buffer_threshold": _QUICK,
        "eager_batching": _idle("a batch is formed when an instance has room for it"),
    },
    "ModelDynamicBatching": _honoured(
        *("preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering", "priority_levels"),
        *("default_priority_level", "default_queue_policy", "priority_queue_policy"),
    ),
    "ModelQueuePolicy": _honoured(
        "timeout_action", "default_timeout_microseconds", "allow_timeout_override", "max_queue_size"
    ),
    "ModelSequenceBatching": {
        **_honoured("direct", "oldest", "max_sequence_idle_microseconds", "control_input"),
        "state": _STATE,
        "iterative_sequence": _no(
            "a request goes to the model once; answer it step by step in a decoupled model.py"
        ),
    },
    "ModelSequenceBatching.StrategyDirect": _honoured(
        "max_queue_delay_microseconds", "minimum_slot_utilization"
    ),
    "ModelSequenceBatching.StrategyOldest": _honoured(
        *("max_candidate_sequences", "preferred_batch_size"),
        *("max_queue_delay_microseconds", "preserve_ordering"),
    ),
    "ModelSequenceBatching.ControlInput": _honoured("name", "control"),
    "ModelSequenceBatching.Control": _honoured(
        "kind", "int32_false_true", "fp32_false_true", "bool_false_true", "data_type"
    ),
    "ModelEnsembling": {
        **_honoured("step"),
        "max_inflight_requests": _idle("each step waits in the queue of its model, which has the limits"),
    },
    "ModelEnsembling.Step": {
        **_honoured("model_name", "model_version", "input_map", "output_map"),
        "model_namespace": _no("models of all repositories have one namespace; leave it out"),
    },
    "ModelInstanceGroup": {
        **_honoured("kind", "count", "rate_limiter", "gpus"),
        "name": _idle("instances are named by their device"),
        "secondary_devices": _no("an instance has one device; a model.py may use others itself"),
        "profile": _no("only TensorRT has optimization profiles; leave it out"),
        "passive": _no("every instance takes requests; leave the group out"),
        "host_policy": _idle("a worker stays beside its GPU (numa_affinity)"),
    },
    "ModelRateLimiter": _honoured("resources", "priority"),
    "ModelRateLimiter.Resource": _honoured("name", "global", "count"),
    "ModelParameter": _honoured("string_value"),
    "ModelWarmup": _honoured("name", "batch_size", "inputs", "count"),
    "ModelWarmup.Input": _honoured("data_type", "dims", "zero_data", "random_data", "input_data_file"),
    "ModelTransactionPolicy": _honoured("decoupled"),
    "ModelResponseCache": _honoured("enable"),
}
_UNKNOWN: Final = _no("this server does not know it; leave it out")


def findings(message: Any, path: Path = ()) -> Iterator[Finding]:
    """The fields of a message, and of those in it, that are set and not honoured."""
    table = TABLES.get(message.DESCRIPTOR.full_name.removeprefix("inference."), {})
    for field, value in message.ListFields():
        rule = table.get(field.name, _UNKNOWN)
        if rule is not YES:
            yield Finding((*path, field.name), rule)
        elif field.message_type is not None:
            for place, one in _messages(field, value):
                yield from findings(one, (*path, field.name, *place))


def _messages(field: Any, value: Any) -> Iterator[tuple[Path, Any]]:
    if field.message_type.GetOptions().map_entry:
        if field.message_type.fields_by_name["value"].message_type is not None:
            yield from (((str(key), "value"), one) for key, one in value.items())
    elif field.is_repeated:
        yield from (((number,), one) for number, one in enumerate(value))
    else:
        yield (), value
