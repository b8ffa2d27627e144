"""From a ``DynamicBatcher`` and its ``QueuePolicy`` to a ``BatchingSpec`` and a ``QueueSpec``.

Pure. What only a model as a whole can say, as its largest batch, is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpuserve.errors import BadModelConfig
from gpuserve.model import DynamicBatcher, QueuePolicy, TimeoutAction
from gpuserve.spec import BatchingSpec, PolicySpec, QueueSpec

#: Triton's own level is 32 bits wide.
MAX_PRIORITY_LEVELS: Final = (1 << 32) - 1


def batching_spec(batcher: DynamicBatcher, max_batch_size: int) -> BatchingSpec:
    """When batches are formed.

    Raises:
        BadModelConfig: a value that cannot be; the text names it.
    """
    delay_us = integer("max_queue_delay_microseconds", batcher.max_queue_delay_microseconds)
    return BatchingSpec(
        delay_us,
        _preferred_batch_sizes(batcher.preferred_batch_size, max_batch_size),
        preserve_ordering=boolean("preserve_ordering", batcher.preserve_ordering),
    )


def queue_spec(batcher: DynamicBatcher) -> QueueSpec:
    """In which order requests are taken, and how long they wait.

    Raises:
        BadModelConfig: a value that cannot be, or a level that there is not.
    """
    levels = integer("priority_levels", batcher.priority_levels)
    if levels > MAX_PRIORITY_LEVELS:
        raise BadModelConfig(f"priority_levels must be at most {MAX_PRIORITY_LEVELS}, got {levels}")
    default = integer("default_priority_level", batcher.default_priority_level)
    _check_default_priority(default, levels)
    policy = PolicySpec()
    if batcher.default_queue_policy is not None:
        policy = _policy("default_queue_policy", batcher.default_queue_policy)
    policies = _policies(batcher.priority_queue_policy, levels)
    _check_ordering(batcher.preserve_ordering, levels, [policy, *(one for _, one in policies)])
    return QueueSpec(priority_levels=levels, default_priority=default, policy=policy, policies=policies)


def integer(name: str, value: Any, least: int = 0) -> int:
    """The value, if it is an integer of at least ``least``.

    Raises:
        BadModelConfig: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BadModelConfig(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def boolean(name: str, value: Any) -> bool:
    """The value, if it is True or False.

    Raises:
        BadModelConfig: it is not.
    """
    if not isinstance(value, bool):
        raise BadModelConfig(f"{name} must be True or False, got {value!r}")
    return value


def _preferred_batch_sizes(sizes: Any, max_batch_size: int) -> tuple[int, ...]:
    if sizes is None:
        return ()
    if not isinstance(sizes, Sequence) or not all(_is_size(size, max_batch_size) for size in sizes):
        raise BadModelConfig(
            f"preferred_batch_size must be a list of integers from 1 to max_batch_size ({max_batch_size}), "
            f"got {sizes!r}"
        )
    return tuple(sizes)


def _is_size(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _check_default_priority(default: int, levels: int) -> None:
    if default and not levels:
        raise BadModelConfig(
            f"Provide the `priority_levels` for a `default_priority_level`, which is {default}."
        )
    if levels and not 1 <= default <= levels:
        raise BadModelConfig(f"The `default_priority_level` must be between 1 and {levels}. Got {default}.")


def _policies(policies: Any, levels: int) -> tuple[tuple[int, PolicySpec], ...]:
    if policies is None:
        return ()
    if not isinstance(policies, Mapping):
        raise BadModelConfig(
            f"priority_queue_policy must be a mapping of levels to QueuePolicy, got {type(policies).__name__}"
        )
    if policies and not levels:
        raise BadModelConfig(
            "Provide the `priority_levels` if you want to define `priority_queue_policy` "
            "for Dynamic Batching."
        )
    for level in policies:
        if not _is_size(level, levels):
            raise BadModelConfig(
                f"Invalid `priority`={level!r} provided. The value must be between 1 and {levels}."
            )
    return tuple(
        (level, _policy(f"priority_queue_policy[{level}]", policies[level])) for level in sorted(policies)
    )


def _policy(name: str, policy: Any) -> PolicySpec:
    if not isinstance(policy, QueuePolicy):
        raise BadModelConfig(f"{name} must be a QueuePolicy, got an object of type {type(policy).__name__}")
    if not isinstance(policy.timeout_action, TimeoutAction):
        raise BadModelConfig(f"{name}.timeout_action must be a TimeoutAction, got {policy.timeout_action!r}")
    return PolicySpec(
        policy.timeout_action.value.lower(),
        integer(f"{name}.default_timeout_microseconds", policy.default_timeout_microseconds),
        boolean(f"{name}.allow_timeout_override", policy.allow_timeout_override),
        integer(f"{name}.max_queue_size", policy.max_queue_size),
    )


def _check_ordering(preserve_ordering: bool, levels: int, policies: Sequence[PolicySpec]) -> None:
    """What takes requests out of their order cannot keep the order of their answers."""
    if not preserve_ordering:
        return
    if levels > 1:
        raise BadModelConfig(
            f"preserve_ordering goes with one level of priority, but priority_levels is {levels}"
        )
    if any(one.on_timeout == "delay" and one.default_timeout_us for one in policies):
        raise BadModelConfig(
            "preserve_ordering does not go with a queue policy that delays requests: use TimeoutAction.REJECT"
        )
