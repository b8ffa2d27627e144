"""What must hold between the keys of ``queue`` and of ``batching``; as in ``rules``, of plain data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuserve.config.plain import Violation, is_int, mapping
from gpuserve.config.positions import Path


def violations(model: dict[str, Any], path: Path) -> Iterator[Violation]:
    """Every broken rule of one model's batching and queue."""
    batching, queue = mapping(model.get("batching")), mapping(model.get("queue"))
    yield from _batching(batching, model.get("max_batch_size", 0), (*path, "batching"))
    yield from _priorities(queue, (*path, "queue"))
    if batching.get("preserve_ordering") is True:
        yield from _ordering(queue, (*path, "queue"))


def _batching(batching: dict[str, Any], limit: Any, path: Path) -> Iterator[Violation]:
    if not is_int(limit) or limit < 0:
        return
    if limit == 0:
        yield from _without_effect(batching, path, "a max_batch_size of at least 1; the model does not batch")
        return
    if batching.get("merge") is False:
        yield from _without_effect(batching, path, "merge: every request is its own batch")
    sizes = batching.get("preferred_batch_sizes")
    for index, size in enumerate(sizes if isinstance(sizes, list) else ()):
        if is_int(size) and size > limit:
            yield Violation(
                (*path, "preferred_batch_sizes", index),
                f"expected a preferred batch size of at most max_batch_size, which is {limit}, given {size}",
            )


def _without_effect(batching: dict[str, Any], path: Path, without: str) -> Iterator[Violation]:
    for key in ("preferred_batch_sizes", "max_queue_delay_us"):
        if batching.get(key):
            yield Violation((*path, key), f"{key} has no effect without {without}")


def _priorities(queue: dict[str, Any], path: Path) -> Iterator[Violation]:
    levels, default = queue.get("priority_levels", 0), queue.get("default_priority", 0)
    if not is_int(levels) or levels < 0:
        return
    at = (*path, "default_priority" if "default_priority" in queue else "priority_levels")
    if is_int(default) and levels and not 1 <= default <= levels:
        yield Violation(at, f"the default_priority must be between 1 and {levels}, given {default}")
    if is_int(default) and default and not levels:
        yield Violation(at, "default_priority has no effect without priority_levels")
    for level in mapping(queue.get("policies")):
        if not levels:
            yield Violation((*path, "policies"), "policies have no effect without priority_levels")
            return
        if str(level).isdecimal() and not 1 <= int(level) <= levels:
            yield Violation(
                (*path, "policies", level), f"the level must be between 1 and {levels}, given {level}"
            )


def _ordering(queue: dict[str, Any], path: Path) -> Iterator[Violation]:
    """What takes requests out of their order cannot keep the order of their answers."""
    levels = queue.get("priority_levels", 0)
    if is_int(levels) and levels > 1:
        yield Violation(
            (*path, "priority_levels"), f"preserve_ordering goes with one level of priority, given {levels}"
        )
    policies = [(*path, "policies", level) for level in mapping(queue.get("policies"))]
    for place in [(*path, "policy"), *policies]:
        found = queue.get("policy") if place[-1] == "policy" else queue["policies"][place[-1]]
        policy = mapping(found)
        if policy.get("timeout_action") == "delay" and policy.get("default_timeout_us"):
            yield Violation(
                (*place, "timeout_action"), "preserve_ordering does not go with delay; expected 'reject'"
            )
