"""What the command line of ``gpuserve export`` says besides the config file. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT_NAME: Final = "gpuserve"
GPU_RESOURCE: Final = "nvidia.com/gpu"
PROMETHEUS: Final = "http://prometheus-operated.monitoring:9090"
DEFAULT_REPLICAS: Final = 2
#: Where there is no word of it, so many times as many pods as ``replicas`` at most.
GROWTH: Final = 4


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """``name`` "": that of the only model, or ``gpuserve``. None: not given, and so not checked."""

    image: str = ""
    name: str = ""
    namespace: str = ""
    replicas: int = DEFAULT_REPLICAS
    max_replicas: int | None = None
    gpus_per_node: int | None = None
    #: What the device plugin calls a GPU, or a MIG slice: nvidia.com/gpu, nvidia.com/mig-1g.10gb.
    gpu_resource: str = GPU_RESOURCE
    node_cpus: int | None = None
    node_memory_nbytes: int | None = None
    gpu_memory_nbytes: int | None = None
    #: The Secret with tls.crt and tls.key (and ca.crt), where the config file names no certificate.
    tls_secret: str = ""
    prometheus: str = PROMETHEUS

    @property
    def most_replicas(self) -> int:
        """How many pods an autoscaler may start."""
        return self.replicas * GROWTH if self.max_replicas is None else self.max_replicas
