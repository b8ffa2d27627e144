"""How much there is of the resources that instances hold while they run, and whether all models of a server
could run with it. Pure; which instance runs next is the front's to say.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpuserve.declare.spec import DeviceResource, ModelSpec
from gpuserve.errors import StartupError
from gpuserve.settings.server import EXECUTION_COUNT, ResourceLimit, ServerSettings


def limit_of(resource: DeviceResource, limits: Iterable[ResourceLimit]) -> int | None:
    """What the operator says of a resource: for its device, or else for every one. None: nothing."""
    name, device = resource
    said = {limit.device: limit.count for limit in limits if limit.name == name}
    return said.get(device, said.get(""))


def resource_limits(settings: ServerSettings) -> tuple[ResourceLimit, ...] | None:
    """What the operator says there is of resources; None where rates are not limited. Raises ValueError: one
    of the limits is written wrongly.
    """
    if settings.rate_limit != EXECUTION_COUNT:
        return None
    return tuple(ResourceLimit.parse(text) for text in settings.rate_limit_resources)


def check_rates(specs: Iterable[ModelSpec], settings: ServerSettings) -> None:
    """Raise StartupError unless every instance of all these models could run: there is less of a resource
    than one of them needs, or it is shared by all devices for one of them and not for another.
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
