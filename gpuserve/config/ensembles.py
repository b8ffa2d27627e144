"""The ensembles of a config file: what they come to, and what is wrong with them.

How one fits the models of its steps is looked at once all of them are known to hold by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from gpuserve import ensembles
from gpuserve.config.ensemble_entry import EnsembleEntry
from gpuserve.config.plain import Violation
from gpuserve.config.positions import Path
from gpuserve.ensemble_spec import StepSpec
from gpuserve.spec import ModelSpec

#: What an ensemble has of its own. All else of a model is about its callable and its queue.
_KEYS: Final = frozenset({"name", "version", "inputs", "outputs", "max_batch_size", "ensemble"})


def step_specs(entry: EnsembleEntry | None) -> tuple[StepSpec, ...]:
    """What ``ensemble`` says."""
    if entry is None:
        return ()
    return tuple(
        StepSpec(one.model, one.version or 0, tuple(one.inputs.items()), tuple(one.outputs.items()))
        for one in entry.steps
    )


def key_violations(model: dict[str, Any], path: Path) -> Iterator[Violation]:
    """Plain data of a model with neither a callable nor steps, or with steps and what a callable has."""
    if model.get("ensemble") is None:
        if model.get("callable") is None:
            yield Violation(path, f"missing key 'callable', or 'ensemble', in models[{path[-1]}]")
        return
    for key, value in model.items():
        if key not in _KEYS and value is not None:
            text = f"{key} does not go with ensemble: it is for the models of the steps"
            yield Violation((*path, key), text)


def violations(models: Sequence[ModelSpec]) -> Iterator[Violation]:
    """What is wrong with ensembles, in themselves and with the models of their steps."""
    known = ensembles.by_name(models)
    for index, spec in enumerate(models):
        if spec.is_ensemble:
            faults = list(ensembles.faults(spec)) or ensembles.member_faults(spec, known)
            for place, text in faults:
                within: Path = ("ensemble", *place) if place[0] == "steps" else place
                yield Violation(("models", index, *within), text)
