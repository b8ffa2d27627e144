"""Where the worker process of one instance runs: the GPU that it sees, the CPUs and the memory beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuserve.devices.names import BY_BUS, ORDER_VARIABLE, VARIABLE

if TYPE_CHECKING:
    from gpuserve.devices.visible import VisibleDevice


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a worker runs. ``gpu_uuid`` is of its GPU or MIG instance, "" for none or an unknown one.
    ``visible`` is what ``CUDA_VISIBLE_DEVICES`` is in the process, "" where it is left alone. ``cpus``: all,
    where empty; ``numa_nodes`` has one, or none.
    """

    gpu_uuid: str = ""
    visible: str = ""
    cpus: tuple[int, ...] = ()
    numa_nodes: tuple[int, ...] = ()

    @property
    def numa_node(self) -> int:
        return self.numa_nodes[0] if self.numa_nodes else -1

    def environment(self) -> dict[str, str]:
        """Return what the process's environment has besides its parent's. CUDA numbers GPUs by speed unless
        told otherwise; a number in ``visible`` counts them by the bus.
        """
        return {VARIABLE: self.visible, ORDER_VARIABLE: BY_BUS} if self.visible else {}


ANYWHERE: Final = Placement()


def placement_on(device: VisibleDevice, *, numa_affinity: bool) -> Placement:
    """Place a worker process on a device; with ``numa_affinity`` its CPUs and memory are those beside it."""
    gpu = device.gpu
    if not numa_affinity:
        return Placement(device.uuid, device.entry)
    return Placement(device.uuid, device.entry, gpu.cpus, (gpu.numa_node,) if gpu.numa_node >= 0 else ())
