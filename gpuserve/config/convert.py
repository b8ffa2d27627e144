"""From what is written to what is run: validated entries as ``ServerSettings`` and ``ModelSpec``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpuserve.config.model_entry import (
    BatchingEntry,
    InputEntry,
    ModelEntry,
    OutputEntry,
    PolicyEntry,
    QueueEntry,
)
from gpuserve.config.server_entry import ServerEntry
from gpuserve.config.warmups import warmups
from gpuserve.settings import ServerSettings
from gpuserve.spec import BatchingSpec, InstanceSpec, ModelSpec, PolicySpec, QueueSpec
from gpuserve_worker.tensor import TensorSpec, datatype_of

CPU = "cpu"


def server_settings(entry: ServerEntry) -> ServerSettings:
    """The settings that a server entry stands for."""
    return ServerSettings(**entry.model_dump())


def model_spec(entry: ModelEntry, base_dir: str) -> ModelSpec:
    """The model that an entry stands for; its callable is found from ``base_dir``."""
    instances = _instances(entry, base_dir)
    prefetch = entry.prefetch
    if prefetch is None:
        prefetch = int(any(instance.device != CPU for instance in instances))
    inputs = tensors(entry.inputs)
    return ModelSpec(
        name=entry.name,
        inputs=inputs,
        outputs=tensors(entry.outputs),
        max_batch_size=entry.max_batch_size,
        instances=instances,
        version=entry.version,
        batching=_batching(entry.batching),
        queue=_queue(entry.queue),
        prefetch=prefetch,
        concurrency=entry.concurrency or 0,
        strict=entry.strict,
        decoupled=entry.decoupled,
        response_cache=entry.response_cache,
        read_only_inputs=entry.read_only_inputs,
        retry_on_worker_death=entry.retry_on_worker_death and not entry.decoupled,
        on_unrecoverable=entry.on_unrecoverable,
        warmup=warmups(entry, inputs, base_dir),
    )


def _batching(entry: BatchingEntry) -> BatchingSpec:
    sizes = tuple(entry.preferred_batch_sizes)
    return BatchingSpec(entry.max_queue_delay_us, sizes, entry.merge, entry.preserve_ordering)


def _queue(entry: QueueEntry) -> QueueSpec:
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
    instances = []
    for group in entry.instances:
        for _ in range(group.count):
            source = {"path": entry.callable, "base_dir": base_dir, "kwargs": entry.kwargs}
            instances.append(InstanceSpec(f"{group.device}#{numbers[group.device]}", group.device, source))
            numbers[group.device] += 1
    return tuple(instances)


def tensors(entries: Sequence[OutputEntry]) -> tuple[TensorSpec, ...]:
    """Tensors as they are declared."""
    return tuple(
        TensorSpec(
            entry.name,
            datatype_of(entry.dtype),
            tuple(entry.shape),
            isinstance(entry, InputEntry) and entry.optional,
        )
        for entry in entries
    )
