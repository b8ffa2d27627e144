"""From a placed model to the same model with another number of instances on each of its devices. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterator

from gpuserve.errors import InvalidArgument
from gpuserve.model.spec import MAX_INSTANCES, InstanceSpec, ModelSpec


def instances_by_device(spec: ModelSpec) -> dict[str, int]:
    return dict(Counter(one.device for one in spec.instances))


def with_count(spec: ModelSpec, count: int, down: Collection[str] = ()) -> ModelSpec:
    """The model with ``count`` instances on each device that it has: those that are ``down`` are gone, then
    its last ones; or new ones are like its first one there. Raises InvalidArgument: there cannot be so many.
    """
    _check(spec, count)
    on_device = all(one.name.startswith(f"{one.device}#") for one in spec.instances)
    taken = {one.name for one in spec.instances}
    instances: list[InstanceSpec] = []
    for device in instances_by_device(spec):
        there = [one for one in spec.instances if one.device == device]
        staying = sorted(there, key=lambda one: one.name in down)[:count]
        here = [one for one in there if one in staying]
        names = list(itertools.islice(_names(f"{device}#" if on_device else "", taken), count - len(here)))
        taken.update(names)
        instances += [*here, *(dataclasses.replace(here[0], name=name) for name in names)]
    return dataclasses.replace(spec, instances=tuple(instances))


def joined(spec: ModelSpec, wanted: ModelSpec, name: str) -> ModelSpec:
    """The model with one more of the instances that it is to have, which all are before those to go."""
    names = {name, *(one.name for one in spec.instances)}
    there = [one for one in wanted.instances if one.name in names]
    going = [one for one in spec.instances if one not in there]
    return dataclasses.replace(spec, instances=(*there, *going))


def _check(spec: ModelSpec, count: int) -> None:
    if spec.is_ensemble:
        raise InvalidArgument(
            f"model '{spec.name}' is an ensemble and has no instances of its own: scale the models of its "
            "steps"
        )
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidArgument(
            f"model '{spec.name}': expected the number of instances on each device, 1 at least, got {count!r}"
        )
    present = instances_by_device(spec)
    if count * len(present) > MAX_INSTANCES:
        raise InvalidArgument(
            f"model '{spec.name}': a model may have {MAX_INSTANCES} instances at most, given {count}"
            f"{f' on each of {len(present)} devices' if len(present) > 1 else ''}"
        )
    first = spec.instances[0]
    if any(one.source != first.source for one in spec.instances) and {count} != set(present.values()):
        raise InvalidArgument(
            f"the {len(spec.instances)} instances of model '{spec.name}' have different callables: there "
            f"cannot be {count} on each device"
        )


def _names(place: str, taken: Collection[str]) -> Iterator[str]:
    """Names that no instance has: numbered on each device where all are, or else by position."""
    return (name for number in itertools.count() if (name := f"{place}{number}") not in taken)
