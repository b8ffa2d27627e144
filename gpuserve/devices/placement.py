"""Where the worker process of one instance runs: the GPU that it sees, the CPUs and the memory beside it.
Plain values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuserve.devices.names import BY_BUS, ORDER_VARIABLE, VARIABLE

if TYPE_CHECKING:
    from gpuserve.devices.visible import Device


@dataclass(frozen=True, slots=True)
class Placement:
    """``gpu_uuid`` is that of the GPU or MIG instance, "" for none or where it is not known.

    ``visible`` is what ``CUDA_VISIBLE_DEVICES`` is in the process, "" where it is left alone. ``cpus``: all,
    where empty; ``numa_nodes`` has one, or none.
    """

    gpu_uuid: str = ""
    visible: str = ""
    cpus: tuple[int, ...] = ()
    numa_nodes: tuple[int, ...] = ()

    @property
    def numa_node(self) -> int:
        """As ``wire.Init`` has it; -1 for none."""
        return self.numa_nodes[0] if self.numa_nodes else -1

    def environment(self) -> dict[str, str]:
        """What the process's environment has besides its parent's.

        CUDA numbers GPUs by speed unless told otherwise; a number in ``visible`` counts them by the bus.
        """
        return {VARIABLE: self.visible, ORDER_VARIABLE: BY_BUS} if self.visible else {}


ANYWHERE: Final = Placement()


def placement_on(device: Device, *, numa_affinity: bool) -> Placement:
    """For a worker process of that device; with ``numa_affinity`` it stays beside it."""
    gpu = device.gpu
    if not numa_affinity:
        return Placement(device.uuid, device.entry)
    return Placement(device.uuid, device.entry, gpu.cpus, (gpu.numa_node,) if gpu.numa_node >= 0 else ())
