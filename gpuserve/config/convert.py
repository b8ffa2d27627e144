"""From what is written to what is run: validated entries as ``ServerSettings`` and ``ModelSpec``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpuserve.array_spec import array_of, memory_of
from gpuserve.config.ensembles import step_specs
from gpuserve.config.labels import label_specs
from gpuserve.config.model_entry import (
    BatchingEntry,
    InputEntry,
    ModelEntry,
    PolicyEntry,
    QueueEntry,
    TensorEntry,
)
from gpuserve.config.sequences import rate_spec, sequence_spec
from gpuserve.config.server_entry import ServerEntry
from gpuserve.config.warmups import warmups
from gpuserve.declared_sequences import with_controls
from gpuserve.settings import ServerSettings
from gpuserve.spec import BatchingSpec, InstanceSpec, ModelSpec, PolicySpec, QueueSpec
from gpuserve_worker.tensor import TensorSpec, datatype_of

CPU = "cpu"


def server_settings(entry: ServerEntry) -> ServerSettings:
    """The settings that a server entry stands for."""
    return ServerSettings.from_wire(entry.model_dump())


def model_spec(entry: ModelEntry, base_dir: str) -> ModelSpec:
    """The model that an entry stands for; its callable is found from ``base_dir``."""
    instances = _instances(entry, base_dir)
    prefetch = entry.prefetch
    if prefetch is None:
        prefetch = int(any(instance.device != CPU for instance in instances))
    inputs = tensors(entry.inputs, entry.array)
    sequence = sequence_spec(entry.sequence_batching)
    return ModelSpec(
        name=entry.name,
        inputs=inputs,
        outputs=tensors(entry.outputs),
        max_batch_size=entry.max_batch_size,
        instances=instances,
        version=entry.version,
        batching=batching_spec(entry.batching),
        queue=queue_spec(entry.queue),
        prefetch=prefetch,
        concurrency=entry.concurrency or 0,
        strict=entry.strict,
        decoupled=entry.decoupled,
        response_cache=entry.response_cache,
        read_only_inputs=entry.read_only_inputs,
        array=array_of(entry.array, [one.memory for one in entry.inputs]),
        retry_on_worker_death=entry.retry_on_worker_death and not (entry.decoupled or sequence.strategy),
        on_unrecoverable=entry.on_unrecoverable,
        warmup=with_controls(warmups(entry, inputs, base_dir), sequence),
        sequence=sequence,
        labels=label_specs(entry, base_dir),
        steps=step_specs(entry.ensemble),
    )


def batching_spec(entry: BatchingEntry) -> BatchingSpec:
    sizes = tuple(entry.preferred_batch_sizes)
    return BatchingSpec(entry.max_queue_delay_us, sizes, entry.merge, entry.preserve_ordering)


def queue_spec(entry: QueueEntry) -> QueueSpec:
    policies = [(int(level), _policy(entry.policies[level])) for level in sorted(entry.policies, key=int)]
    return QueueSpec(
        entry.max_requests,
        entry.max_nbytes,
        entry.priority_levels,
        entry.default_priority,
        _policy(entry.policy),
        tuple(policies),
    )


def _policy(entry: PolicyEntry) -> PolicySpec:
    return PolicySpec(
        entry.timeout_action, entry.default_timeout_us, entry.allow_timeout_override, entry.max_requests
    )


def _instances(entry: ModelEntry, base_dir: str) -> tuple[InstanceSpec, ...]:
    """One a process, numbered per device: ``cuda:0#0``, ``cuda:0#1``, ``cpu#0``."""
    numbers: Counter[str] = Counter()
    instances: list[InstanceSpec] = []
    for group in entry.instances if entry.ensemble is None else ():
        for _ in range(group.count):
            source = {"path": entry.callable, "base_dir": base_dir, "kwargs": entry.kwargs}
            name = f"{group.device}#{numbers[group.device]}"
            instances.append(InstanceSpec(name, group.device, source, rate_spec(group.rate_limiter)))
            numbers[group.device] += 1
    return tuple(instances)


def tensors(entries: Sequence[TensorEntry], array: str | None = None) -> tuple[TensorSpec, ...]:
    """Tensors as they are declared, for a model with this ``array``."""
    return tuple(_tensor(entry, datatype_of(entry.dtype), array) for entry in entries)


def _tensor(entry: TensorEntry, datatype: str, array: str | None) -> TensorSpec:
    if not isinstance(entry, InputEntry):
        return TensorSpec(entry.name, datatype, tuple(entry.shape))
    memory = memory_of(entry.memory, datatype, array)
    return TensorSpec(entry.name, datatype, tuple(entry.shape), entry.optional, memory)
