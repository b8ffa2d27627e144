"""The division of a server's cores among instances, whose libraries would otherwise use all cores each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from gpuserve.devices.placement import THREADS_VARIABLE, threads_of_environment
from gpuserve.model.spec import InstanceSpec

_OWN: Final = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
#: The front and the ingress processes have cores of their own if these are at most this part of all cores. On
#: smaller machines they would take more from large models than they need.
_RESERVED_PART: Final = 1 / 8


def cores_of_instances(processors: float, ingress_processes: int) -> float:
    """Return the cores that the instances of a server share."""
    needed = 1 + (ingress_processes if ingress_processes > 1 else 0)
    return processors - min(needed, int(processors * _RESERVED_PART))


def n_threads(instance: InstanceSpec, instances: Sequence[InstanceSpec], cores: float) -> int:
    """Return the threads of an instance's process: of the config, the environment or a share of ``cores``."""
    if instance.threads or (from_environment := threads_of_environment()):
        return instance.threads or from_environment
    sharing = [one for one in instances if not one.threads]
    bound = {cpu for one in sharing for cpu in one.cpus}
    left = len(instance.cpus) or cores - len(bound) - sum(one.threads * one.ranks for one in instances)
    return max(1, int(left / max(1, sum(one.ranks for one in sharing if one.cpus == instance.cpus))))


def thread_variables(instance: InstanceSpec, threads: int) -> dict[str, str]:
    """Return a worker's thread-count variables; only the config's ``threads`` overrides the user's."""
    if instance.threads:
        return dict.fromkeys((THREADS_VARIABLE, *_OWN), f"{threads}")
    return {} if THREADS_VARIABLE in os.environ else {THREADS_VARIABLE: f"{threads}"}


def overload(instances: Sequence[InstanceSpec], cores: float) -> str:
    """Return a sentence about instances that together have more threads than there are cores, or ""."""
    total = sum(n_threads(one, instances, cores) * one.ranks for one in instances)
    if total <= max(cores, sum(one.ranks for one in instances)):
        return ""
    return (
        f"{len(instances)} instances have {total} threads for {cores:g} cores, and wait for each other: "
        f"lower instances[].threads or {THREADS_VARIABLE}"
    )
