"""From what users declare of an instance's resources to a ``RateSpec``. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpuserve.declared_batcher import boolean, integer
from gpuserve.errors import BadModelConfig
from gpuserve.model import RateLimiter, Resource
from gpuserve.rate_spec import NO_RATE, RateSpec, ResourceSpec


def rate_spec(declared: RateLimiter | None) -> RateSpec:
    """What ``ModelConfig.rate_limiter`` says.

    Raises:
        BadModelConfig: a value that cannot be; the text names it.
    """
    if declared is None:
        return NO_RATE
    if not isinstance(declared, RateLimiter):
        raise BadModelConfig(
            f"rate_limiter must be a RateLimiter or None, got an object of type {type(declared).__name__}"
        )
    if not isinstance(declared.resources, Sequence):
        raise BadModelConfig(f"resources must be a list of Resource, got {declared.resources!r:.200}")
    return RateSpec(
        tuple(_resource(one) for one in declared.resources), integer("priority", declared.priority)
    )


def _resource(declared: object) -> ResourceSpec:
    if not isinstance(declared, Resource):
        raise BadModelConfig(
            f"resources must be a list of Resource, got an object of type {type(declared).__name__}"
        )
    if not isinstance(declared.name, str) or not declared.name:
        raise BadModelConfig(f"the name of a resource must be a non-empty string, got {declared.name!r}")
    count = integer(f"the count of resource {declared.name!r}", declared.count, 1)
    return ResourceSpec(declared.name, count, boolean("shared", declared.shared))
