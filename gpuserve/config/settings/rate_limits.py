"""The amounts of resources that instances hold while they execute, on a server with ``rate_limit``."""

from __future__ import annotations

from collections.abc import Iterable

from gpuserve.config.settings.server import EXECUTION_COUNT, ResourceLimit, ServerSettings
from gpuserve.core.errors import StartupError
from gpuserve.model.spec import DeviceResource, ModelSpec


def limit_of(resource: DeviceResource, limits: Iterable[ResourceLimit]) -> int | None:
    """Return the operator's limit of a resource, on its device or on every device, or None."""
    name, device = resource
    counts = {limit.device: limit.count for limit in limits if limit.name == name}
    return counts.get(device, counts.get(""))


def resource_limits(settings: ServerSettings) -> tuple[ResourceLimit, ...] | None:
    """Return the operator's limits, or None if rates are not limited. Raise ValueError if malformed."""
    if settings.rate_limit != EXECUTION_COUNT:
        return None
    return tuple(ResourceLimit.parse(text) for text in settings.rate_limit_resources)


def check_rates(specs: Iterable[ModelSpec], settings: ServerSettings) -> None:
    """Raise StartupError unless every instance of the models can execute: a limit may be too low, or a
    resource may be shared for one instance and per device for another.
    """
    limits = resource_limits(settings)
    if limits is None:
        return
    most: dict[DeviceResource, int] = {}
    for instance in (one for spec in specs for one in spec.instances):
        for resource, count in instance.rate.needs(instance.device).items():
            most[resource] = max(most.get(resource, 0), count)
    shared = {name for name, device in most if not device}
    for name, device in most:
        if device and name in shared:
            raise StartupError(
                f'Resource "{name}" is present as both global and device-specific resource in the model '
                "configuration."
            )
    for resource, count in most.items():
        limit = limit_of(resource, limits)
        if limit is not None and limit < count:
            raise StartupError(
                f'Resource count for "{resource[0]}" is limited to {limit} which will prevent scheduling of '
                f"one or more model instances, the minimum required count is {count}"
            )
