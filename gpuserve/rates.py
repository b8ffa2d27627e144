"""Whether all models of a server could run under its limits. Pure; who runs when is the front's to say."""

from __future__ import annotations

from collections.abc import Iterable

from gpuserve.errors import ConfigError, StartupError
from gpuserve.rate_spec import EXECUTION_COUNT, OFF, Resource, ResourceLimit, limit_of
from gpuserve.settings import ServerSettings
from gpuserve.spec import ModelSpec


def resource_limits(settings: ServerSettings) -> tuple[ResourceLimit, ...] | None:
    """What the operator says there is of resources; None where rates are not limited.

    Raises:
        ValueError: one of the limits is written wrongly.
    """
    if settings.rate_limit != EXECUTION_COUNT:
        return None
    return tuple(ResourceLimit.parse(text) for text in settings.rate_limit_resources)


def check_rate_settings(settings: ServerSettings) -> None:
    """Do nothing if the settings of rates can be.

    Raises:
        ConfigError: they cannot; the text names which.
    """
    if settings.rate_limit not in (OFF, EXECUTION_COUNT):
        raise ConfigError(f"rate_limit must be {OFF!r} or {EXECUTION_COUNT!r}, got {settings.rate_limit!r}")
    for text in settings.rate_limit_resources:
        try:
            ResourceLimit.parse(text)
        except ValueError as error:
            raise ConfigError(f"rate_limit_resources: {error}") from None


def check_rates(specs: Iterable[ModelSpec], settings: ServerSettings) -> None:
    """Do nothing if every instance of all these models could run.

    Raises:
        StartupError: there is less of a resource than one of them needs, or it is shared by all devices for
            one of them and not for another.
    """
    limits = resource_limits(settings)
    if limits is None:
        return
    most: dict[Resource, int] = {}
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
