"""The instance groups of a ``ModelConfig`` to ``instances`` of an entry: how many processes, on which
devices. Pure: whether there is a GPU is asked of the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.config.positions import Path
from gpuserve.devices.names import CPU, EVERY_GPU, gpu_name
from gpuserve.repository.draft import Draft

_KIND: Final = pb.ModelInstanceGroup.Kind


def place_instances(draft: Draft, has_gpu: Callable[[], bool]) -> None:
    """Write the instances. Without a group there is one on each GPU, or on the CPU where there is none."""
    groups = list(draft.message.instance_group)
    if not groups:
        draft.put("instances", [{"device": EVERY_GPU if has_gpu() else CPU}])
        return
    instances: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        origin: Path = ("instance_group", number)
        for place, device in enumerate(_devices(draft, group, origin, has_gpu)):
            into: Path = ("instances", len(instances))
            draft.came(into, origin)
            draft.came((*into, "device"), (*origin, "gpus", place) if group.gpus else (*origin, "kind"))
            draft.came((*into, "count"), (*origin, "count"))
            instances.append(_instance(group, device))
    draft.put("instances", instances, "instance_group")


def _devices(draft: Draft, group: Any, origin: Path, has_gpu: Callable[[], bool]) -> list[str]:
    kind = _KIND.Name(group.kind)
    if kind in {"KIND_CPU", "KIND_MODEL"}:  # a model that decides itself finds all GPUs in its process
        if group.gpus:
            draft.fault((*origin, "gpus"), f"gpus do not go with {kind}; expected KIND_GPU, or no gpus")
        return [CPU]
    if kind == "KIND_AUTO" and not has_gpu():
        return [CPU]
    return [gpu_name(one) for one in group.gpus] or [EVERY_GPU]


def _instance(group: Any, device: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"device": device, "count": group.count or 1}
    if group.HasField("rate_limiter"):
        given = group.rate_limiter
        entry["rate_limiter"] = {
            "priority": given.priority,
            "resources": [
                {"name": one.name, "count": one.count or 1, "shared": getattr(one, "global")}
                for one in given.resources
            ],
        }
    return entry
