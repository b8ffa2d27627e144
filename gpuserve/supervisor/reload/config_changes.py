"""Differences between two states of a config: the action for each model, and their order. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from gpuserve.model.spec import ModelSpec, ensemble_members

#: The versions of models as a file declares them, by name.
Declared: TypeAlias = Mapping[str, Sequence[ModelSpec]]


class Action(enum.Enum):
    """The action on a model; the value is the list in the result that names the model."""

    LOAD = "loaded"
    RELOAD = "reloaded"
    SCALE = "scaled"
    UNLOAD = "unloaded"


class ConfigModels(NamedTuple):
    """The models of a config, and the names of those that are loaded at a start with it."""

    declared: Declared
    wanted: Collection[str]


def by_name(specs: Iterable[ModelSpec]) -> dict[str, tuple[ModelSpec, ...]]:
    """Group versions by model, in the order in which they were declared."""
    found: dict[str, tuple[ModelSpec, ...]] = {}
    for one in specs:
        found[one.name] = (*found.get(one.name, ()), one)
    return found


def actions(
    before: ConfigModels,
    now: ConfigModels,
    is_served: Callable[[str], bool],
    touched: Collection[str] = (),
) -> dict[str, Action]:
    """Return the action for each model that has changed.

    A model whose declaration is unchanged gets no action unless its files are ``touched``. A model whose
    declaration has changed is reloaded if it is served. A model that was unloaded by hand, or failed to load,
    stays so until its files are touched, or until an ensemble that is loaded needs it.
    """
    found: dict[str, Action] = {}
    for name in dict.fromkeys([*now.declared, *before.declared]):
        action = _action(name, before, now, is_served(name), is_touched=name in touched)
        if action is not None:
            found[name] = action
    loads = [name for name, action in found.items() if action in (Action.LOAD, Action.RELOAD)]
    for member in sorted(set().union(*(ensemble_members(name, now.declared.get) for name in loads))):
        if not is_served(member):
            found.setdefault(member, Action.LOAD)
    return found


def _action(
    name: str, before: ConfigModels, now: ConfigModels, served: bool, *, is_touched: bool
) -> Action | None:
    old, new = before.declared.get(name), now.declared.get(name)
    is_new = name in now.wanted and (name not in before.wanted or is_touched)
    is_left_out = name in before.wanted and name not in now.wanted
    if served and (new is None or is_left_out):
        return Action.UNLOAD
    if new is None or (not served and not is_new):
        return None
    if not served:
        return Action.LOAD
    if is_touched:
        return Action.RELOAD
    if old == new:
        return None
    is_scale = [_without_counts(one) for one in old or ()] == [_without_counts(one) for one in new]
    return Action.SCALE if is_scale else Action.RELOAD


def _without_counts(spec: ModelSpec) -> ModelSpec:
    kinds = [dataclasses.replace(one, name="") for one in spec.instances]
    return dataclasses.replace(
        spec, instances=tuple(one for place, one in enumerate(kinds) if one not in kinds[:place])
    )


def even_count(placed: Iterable[ModelSpec]) -> int | None:
    """Return the number of instances on each device; None if it, or the instances of a device, differ."""
    counts: set[int] = set()
    for spec in placed:
        counts.update(Counter(one.device for one in spec.instances).values())
        if len(_without_counts(spec).instances) != len({one.device for one in spec.instances}):
            return None
    return counts.pop() if len(counts) == 1 else None


def needs(found: Mapping[str, Action], before: Declared, now: Declared) -> dict[str, set[str]]:
    """Return the models that must be done before each: an ensemble's are loaded first, unloaded last."""
    unloads = {name for name, action in found.items() if action is Action.UNLOAD}
    loads = found.keys() - unloads
    needed = {name: loads.intersection(ensemble_members(name, now.get)) - {name} for name in loads}
    for name in unloads:
        needed[name] = {one for one in unloads - {name} if name in ensemble_members(one, before.get)}
    return needed
