"""From what is written to what is run: validated entries as ``ServerSettings`` and ``ModelSpec``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpuserve.config.schema import InputEntry, ModelEntry, OutputEntry, ServerEntry
from gpuserve.settings import ServerSettings
from gpuserve.spec import BatchingSpec, InstanceSpec, ModelSpec, QueueSpec
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
    batching = entry.batching
    return ModelSpec(
        name=entry.name,
        inputs=_tensors(entry.inputs),
        outputs=_tensors(entry.outputs),
        max_batch_size=entry.max_batch_size,
        instances=instances,
        version=entry.version,
        batching=BatchingSpec(batching.max_queue_delay_us, tuple(batching.preferred_batch_sizes)),
        queue=QueueSpec(entry.queue.max_requests, entry.queue.max_nbytes),
        prefetch=prefetch,
        strict=entry.strict,
        read_only_inputs=entry.read_only_inputs,
        retry_on_worker_death=entry.retry_on_worker_death,
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


def _tensors(entries: Sequence[OutputEntry]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            entry.name,
            datatype_of(entry.dtype),
            tuple(entry.shape),
            isinstance(entry, InputEntry) and entry.optional,
        )
        for entry in entries
    )
