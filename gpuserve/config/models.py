"""The models of a config file: from validated entries to ``ModelSpec``, and what is wrong with them that only
shows once their own keys hold: warm-ups, labels, controls, and how models go together.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from gpuserve.config.entries.model import InputEntry, ModelEntry, OutputEntry
from gpuserve.config.positions import Path
from gpuserve.config.rules import Violation
from gpuserve.declare import ensembles, openai
from gpuserve.declare.model import RANDOM, ModelWarmup, Tensor, WarmupInput
from gpuserve.declare.rates import check_rates
from gpuserve.declare.rules import check_sequences, whole_control
from gpuserve.declare.spec import (
    NO_RATE,
    InstanceSpec,
    LabelSpec,
    ModelSpec,
    RateLimiter,
    SequenceBatching,
    StepSpec,
)
from gpuserve.declare.tensors import labels_from, labels_in, tensor_specs
from gpuserve.declare.warmups import faults as warmup_faults
from gpuserve.declare.written import sequence_of, whole_model
from gpuserve.errors import BadModelConfig, StartupError
from gpuserve.options import checked, declared, rows
from gpuserve.runtimes.table import source_of
from gpuserve.settings.server import ServerSettings


def model_spec(entry: ModelEntry, base_dir: str) -> ModelSpec:
    """The model that an entry without violations stands for; its files are found from ``base_dir``."""
    given = entry.plain()
    options = {name: checked(row, given[name], name) for name, row in rows(ModelSpec).items()}
    sequence = given["sequence_batching"]
    return whole_model(
        entry.name,
        _tensors(entry.inputs),
        _tensors(entry.outputs),
        _instances(entry, base_dir),
        given,
        _warmups(entry, base_dir),
        sequence=sequence_of(sequence and declared(SequenceBatching, sequence)),
        labels=_label_specs(entry, base_dir),
        steps=tuple(declared(StepSpec, one) for one in (given["ensemble"] or {}).get("steps", ())),
        **options,
    )


def _instances(entry: ModelEntry, base_dir: str) -> tuple[InstanceSpec, ...]:
    """One a process, numbered per device: ``cuda:0#0``, ``cuda:0#1``, ``cpu#0``."""
    if entry.ensemble is not None:
        return ()
    path, kwargs = callable_of(entry, base_dir)
    numbers: Counter[str] = Counter()
    instances: list[InstanceSpec] = []
    for group in entry.instances:
        limiter = group.rate_limiter
        rate = NO_RATE if limiter is None else declared(RateLimiter, limiter.plain())
        for _ in range(group.count):
            source = {"path": path, "base_dir": base_dir, "kwargs": kwargs}
            if entry.python:
                source["python"] = os.path.join(base_dir, entry.python)
            if entry.openai:
                source["adapter"] = openai.ADAPTER
            name = f"{group.device}#{numbers[group.device]}"
            instances.append(InstanceSpec(name, group.device, source, rate))
            numbers[group.device] += 1
    return tuple(instances)


def callable_of(entry: ModelEntry, base_dir: str) -> tuple[str, dict[str, Any]]:
    """The import path of what an entry has as its callable, and the arguments of that."""
    return source_of(entry.callable, entry.kwargs, base_dir, sum(one.count for one in entry.instances))


def _tensors(entries: Sequence[InputEntry | OutputEntry]) -> list[Tensor]:
    plain = [one.plain() for one in entries]
    return [Tensor(**{key: value for key, value in one.items() if key != "label_filename"}) for one in plain]


# ---- what is wrong with one model ---------------------------------------------------------------


def violations(entry: ModelEntry, base_dir: str, path: Path) -> Iterator[Violation]:
    inputs = tensor_specs(_tensors(entry.inputs), "INPUT", entry.array)
    for index, one in enumerate(_warmups(entry, base_dir)):
        for place, text in warmup_faults(one, inputs, entry.max_batch_size):
            yield Violation((*path, "warmup", index, *place), text)
    yield from _control_violations(entry, path)
    yield from _label_violations(entry, base_dir, path)


def _control_violations(entry: ModelEntry, path: Path) -> Iterator[Violation]:
    if entry.sequence_batching is None:
        return
    given = declared(SequenceBatching, entry.sequence_batching.plain())
    for index, one in enumerate(given.controls):
        try:
            whole_control(one)
        except BadModelConfig as error:
            yield Violation((*path, "sequence_batching", "controls", index), str(error))


# ---- what is wrong between several parts ---------------------------------------------------------


def violations_together(
    models: Sequence[ModelSpec], retried: Sequence[bool], settings: ServerSettings
) -> Iterator[Violation]:
    """What does not go together in models without other violations: in one, or in all of them. ``retried``
    says of which models the file asks for a second run where a worker dies.
    """
    for index, (spec, retry) in enumerate(zip(models, retried, strict=True)):
        path: Path = ("models", index)
        try:
            check_sequences(spec)
        except BadModelConfig as error:
            yield Violation((*path, "sequence_batching"), str(error))
        if retry and spec.in_sequences:
            yield Violation(
                (*path, "retry_on_worker_death"),
                "retry_on_worker_death does not go with sequence_batching: what the callable kept of a "
                "sequence dies with its worker",
            )
    try:
        check_rates(models, settings)
    except StartupError as error:
        yield Violation(("server", "rate_limit_resources"), str(error))
    yield from _ensemble_violations(models)


def _ensemble_violations(models: Sequence[ModelSpec]) -> Iterator[Violation]:
    """What is wrong with ensembles, in themselves and with the models of their steps."""
    known = ensembles.by_name(models)
    for index, spec in enumerate(models):
        if spec.is_ensemble:
            faults = list(ensembles.faults(spec)) or ensembles.member_faults(spec, known)
            for place, text in faults:
                within: Path = ("ensemble", *place) if place[0] == "steps" else place
                yield Violation(("models", index, *within), text)


# ---- warm-ups -----------------------------------------------------------------------------------


def _warmups(entry: ModelEntry, base_dir: str) -> list[ModelWarmup]:
    """The warm-ups, with random values in the inputs that are left out and must be there."""
    left_out = {one.name: WarmupInput(values=RANDOM) for one in entry.inputs if not one.optional}
    return [
        ModelWarmup(
            one.name,
            one.batch_size,
            left_out | {name: _warmup_input(given, base_dir) for name, given in one.inputs.items()},
            one.count,
        )
        for one in entry.warmup
    ]


def _warmup_input(given: Any, base_dir: str) -> WarmupInput:
    file = given.file and os.path.join(base_dir, given.file)
    return WarmupInput(given.dtype, given.shape, file=file, values=given.values or RANDOM)


# ---- labels -------------------------------------------------------------------------------------


def _label_specs(entry: ModelEntry, base_dir: str) -> tuple[LabelSpec, ...]:
    return tuple(
        LabelSpec(one.name, _labels(one, base_dir), one.label_filename or "")
        for one in entry.outputs
        if one.labels or one.label_filename is not None
    )


def _label_violations(entry: ModelEntry, base_dir: str, path: Path) -> Iterator[Violation]:
    """Every output whose labels are given twice, or whose file cannot be read."""
    for index, one in enumerate(entry.outputs):
        where = (*path, "outputs", index)
        if one.labels and one.label_filename is not None:
            yield Violation(where, f"output {one.name!r} has labels and label_filename, expected one of them")
            continue
        try:
            _labels(one, base_dir)
        except OSError as error:
            text = f"output {one.name!r}: the file cannot be read: {error.strerror}"
            yield Violation((*where, "label_filename"), text)
        except UnicodeDecodeError:
            yield Violation((*where, "label_filename"), f"output {one.name!r}: the file is no UTF-8")
        except ValueError as error:
            key = "labels" if one.labels else "label_filename"
            yield Violation((*where, key), f"output {one.name!r}: {error}")


def _labels(output: OutputEntry, base_dir: str) -> tuple[str, ...]:
    """The labels themselves. Raises OSError: there is no such file; ValueError: it is no UTF-8, or they are
    too many.
    """
    if output.label_filename is None:
        return labels_from(output.labels or ())
    with open(os.path.join(base_dir, output.label_filename), encoding="utf-8") as file:
        return labels_in(file.read())
