"""From validated entries of a config file to ``ModelSpec``, and the rules that need valid entries."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from gpuserve.backends.registry import source_of
from gpuserve.config.schema import InputEntry, ModelEntry, OutputEntry
from gpuserve.config.settings.checks import check_memory, check_rates
from gpuserve.config.settings.server import ServerSettings
from gpuserve.config.yaml_document import Path
from gpuserve.core.errors import BadModelConfig, StartupError
from gpuserve.devices.placement import ANYWHERE
from gpuserve.model import openai_declaration as openai
from gpuserve.model.build import build_model_spec, sequence_options, warmup_faults
from gpuserve.model.declaration import (
    RANDOM,
    ModelWarmup,
    Tensor,
    WarmupInput,
    labels_from,
    tensor_specs,
)
from gpuserve.model.options import declared, rows
from gpuserve.model.rules import (
    Violation,
    by_name,
    check_gpu_shares,
    check_ranks,
    check_sequences,
    complete_control,
    ensemble_faults,
    member_faults,
)
from gpuserve.model.spec import (
    NO_RATE,
    InstanceSpec,
    LabelSpec,
    ModelSpec,
    RateLimiter,
    SequenceBatching,
    StepSpec,
)


def model_spec(entry: ModelEntry, base_dir: str) -> ModelSpec:
    """Return the model of an entry without violations; relative paths start at ``base_dir``."""
    given = entry.plain()
    options = {name: given[name] for name in rows(ModelSpec)}
    sequence = given["sequence_batching"]
    return build_model_spec(
        entry.name,
        _tensors(entry.inputs),
        _tensors(entry.outputs),
        _instances(entry, base_dir),
        given,
        _warmups(entry, base_dir),
        sequence=sequence_options(sequence and declared(SequenceBatching, sequence)),
        labels=tuple(
            LabelSpec(one.name, _labels(one, base_dir), one.label_filename or "")
            for one in entry.outputs
            if one.labels or one.label_filename is not None
        ),
        steps=tuple(declared(StepSpec, one) for one in (given["ensemble"] or {}).get("steps", ())),
        **options,
    )


def _instances(entry: ModelEntry, base_dir: str) -> tuple[InstanceSpec, ...]:
    """Return one instance for each process, numbered per device: ``cuda:0#0``, ``cuda:0#1``, ``cpu#0``."""
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
            place = ANYWHERE, group.threads or 0, tuple(group.cpus), group.ranks, group.gpu_share
            instances.append(InstanceSpec(name, group.device, source, rate, *place))
            numbers[group.device] += 1
    return tuple(instances)


def callable_of(entry: ModelEntry, base_dir: str) -> tuple[str, dict[str, Any]]:
    return source_of(entry.callable, entry.kwargs, base_dir, entry.runtime)


def _tensors(entries: Sequence[InputEntry | OutputEntry]) -> list[Tensor]:
    plain = [one.plain() for one in entries]
    return [Tensor(**{key: value for key, value in one.items() if key != "label_filename"}) for one in plain]


def violations(entry: ModelEntry, base_dir: str, path: Path) -> Iterator[Violation]:
    """Yield the broken rules of one valid entry: warm-ups, control inputs, labels."""
    inputs = tensor_specs(_tensors(entry.inputs), "INPUT", entry.array)
    for index, one in enumerate(_warmups(entry, base_dir)):
        for place, text in warmup_faults(one, inputs, entry.max_batch_size):
            yield Violation((*path, "warmup", index, *place), text)
    sequence = entry.sequence_batching
    controls = declared(SequenceBatching, sequence.plain()).controls if sequence is not None else ()
    for index, control in enumerate(controls):
        try:
            complete_control(control)
        except BadModelConfig as error:
            yield Violation((*path, "sequence_batching", "controls", index), str(error))
    yield from _label_violations(entry, base_dir, path)


def violations_together(
    models: Sequence[ModelSpec], retried: Sequence[bool], settings: ServerSettings
) -> Iterator[Violation]:
    """Yield the broken rules between parts of a model or between models, for models without other violations.
    ``retried`` says for which models the file asks for ``retry_on_worker_death``.
    """
    checks: list[tuple[str, Callable[[ModelSpec], None]]] = [
        ("sequence_batching", check_sequences),
        ("instances", check_ranks),
        ("instances", check_gpu_shares),
        ("memory_nbytes", partial(check_memory, settings=settings)),
    ]
    for index, (spec, retry) in enumerate(zip(models, retried, strict=True)):
        path: Path = ("models", index)
        for key, check in checks:
            try:
                check(spec)
            except (BadModelConfig, StartupError) as error:
                yield Violation((*path, key), str(error))
        if retry and spec.in_sequences:
            text = "retry_on_worker_death does not go with sequence_batching: what the callable kept of a "
            text += "sequence dies with its worker"
            yield Violation((*path, "retry_on_worker_death"), text)
    try:
        check_rates(models, settings)
    except StartupError as error:
        yield Violation(("server", "rate_limit_resources"), str(error))
    known = by_name(models)
    for index, spec in enumerate(models):
        if spec.is_ensemble:
            faults = list(ensemble_faults(spec)) or member_faults(spec, known)
            for place, text in faults:
                within: Path = ("ensemble", *place) if place[0] == "steps" else place
                yield Violation(("models", index, *within), text)


def _warmups(entry: ModelEntry, base_dir: str) -> list[ModelWarmup]:
    """Return the warm-ups, with random values for required inputs that are left out."""
    left_out = {one.name: WarmupInput(values=RANDOM) for one in entry.inputs if not one.optional}
    found = []
    for one in entry.warmup:
        inputs = dict(left_out)
        for name, given in one.inputs.items():
            file = given.file and os.path.join(base_dir, given.file)
            inputs[name] = WarmupInput(given.dtype, given.shape, file=file, values=given.values or RANDOM)
        found.append(ModelWarmup(one.name, one.batch_size, inputs, one.count))
    return found


def _label_violations(entry: ModelEntry, base_dir: str, path: Path) -> Iterator[Violation]:
    """Yield outputs with two sources of labels, or with a label file that cannot be read."""
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
    if output.label_filename is None:
        return labels_from(output.labels or ())
    with open(os.path.join(base_dir, output.label_filename), encoding="utf-8") as file:
        return labels_from(file.read().splitlines())
