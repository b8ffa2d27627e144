"""What the instances of a configuration take of a node: processes, cores, GPUs and their memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuserve.devices.names import CPU, EVERY_GPU, number_of

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.model_entry import ResourcesEntry
    from gpuserve.config.positions import Path
    from gpuserve.export.options import ExportOptions


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """One entry of ``instances``. ``gpus`` are the numbers of the GPUs that it is on, ``count`` processes
    each; empty on the CPU.
    """

    model: int
    path: Path
    device: str
    count: int
    gpus: tuple[int, ...]
    resources: ResourcesEntry

    @property
    def processes(self) -> int:
        """Worker processes in one pod."""
        return self.count * max(1, len(self.gpus))


def instance_groups(configuration: Configuration, options: ExportOptions) -> list[InstanceGroup]:
    """Every entry of ``instances``; ``cuda:*`` stands for the GPUs of a node."""
    return list(_groups(configuration, options))


def _groups(configuration: Configuration, options: ExportOptions) -> Iterator[InstanceGroup]:
    for index, model in enumerate(configuration.entries.models):
        for position, entry in enumerate(model.instances if model.ensemble is None else ()):
            path: Path = ("models", index, "instances", position)
            gpus = _gpus(entry.device, options.gpus_per_node or 1)
            yield InstanceGroup(index, path, entry.device, entry.count, gpus, entry.resources)


def _gpus(device: str, every: int) -> tuple[int, ...]:
    if device == CPU:
        return ()
    if device == EVERY_GPU:
        return tuple(range(every))
    return (number_of(device) or 0,)


def gpu_count(groups: list[InstanceGroup]) -> int:
    """How many GPUs a pod needs to have one of the highest number: they count from 0 in every pod."""
    return max((number + 1 for group in groups for number in group.gpus), default=0)


def gpu_memory(groups: list[InstanceGroup]) -> dict[int, list[tuple[InstanceGroup, int]]]:
    """By GPU: the groups on it whose memory there is declared, and what their processes take together."""
    taken: dict[int, list[tuple[InstanceGroup, int]]] = {}
    for group in groups:
        if group.resources.gpu_memory_nbytes is not None:
            nbytes = group.count * group.resources.gpu_memory_nbytes
            for number in group.gpus:
                taken.setdefault(number, []).append((group, nbytes))
    return taken
