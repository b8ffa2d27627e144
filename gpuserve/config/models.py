"""The models of a config file: from validated entries to ``ModelSpec``, and what is wrong with them that only
shows once their own keys hold: warm-ups, labels, controls, and how models go together.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Sequence

from gpuserve.config.entries.model import (
    InputEntry,
    ModelEntry,
    OutputEntry,
    TensorEntry,
    WarmupEntry,
    WarmupInputEntry,
)
from gpuserve.config.positions import Path
from gpuserve.config.rules import Violation
from gpuserve.declare import ensembles
from gpuserve.declare.rates import check_rates
from gpuserve.declare.rules import check_sequences, whole_control, with_controls
from gpuserve.declare.spec import (
    NO_RATE,
    NO_SEQUENCES,
    InstanceSpec,
    LabelSpec,
    ModelSpec,
    RateLimiter,
    SequenceBatching,
    StepSpec,
)
from gpuserve.declare.tensors import array_of, labels_in, memory_of
from gpuserve.declare.warmups import FILE, Warmup, check_batch_size, check_input, check_known
from gpuserve.devices.names import CPU
from gpuserve.errors import BadModelConfig, BindError, StartupError
from gpuserve.options import checked, declared, rows
from gpuserve.settings.server import ServerSettings
from gpuserve_worker.protocol.tensor import TensorSpec, datatype_of


def model_spec(entry: ModelEntry, base_dir: str) -> ModelSpec:
    """The model that an entry without violations stands for; its files are found from ``base_dir``."""
    given = entry.model_dump()
    options = {name: checked(row, given[name], name) for name, row in rows(ModelSpec).items()}
    instances = _instances(entry, base_dir)
    if entry.prefetch is None:
        options["prefetch"] = int(any(instance.device != CPU for instance in instances))
    inputs = tensors(entry.inputs, entry.array)
    sequence = _sequence(entry)
    options["array"] = array_of(entry.array, [one.memory for one in entry.inputs])
    options["retry_on_worker_death"] &= not (entry.decoupled or sequence.strategy)
    return ModelSpec(
        name=entry.name,
        inputs=inputs,
        outputs=tensors(entry.outputs),
        instances=instances,
        warmup=with_controls(_warmups(entry, inputs, base_dir), sequence),
        sequence=sequence,
        labels=_label_specs(entry, base_dir),
        steps=tuple(declared(StepSpec, one) for one in (given["ensemble"] or {}).get("steps", ())),
        **options,
    )


def _sequence(entry: ModelEntry) -> SequenceBatching:
    if entry.sequence_batching is None:
        return NO_SEQUENCES
    made = declared(SequenceBatching, entry.sequence_batching.model_dump())
    return dataclasses.replace(made, controls=tuple(map(whole_control, made.controls)))


def _instances(entry: ModelEntry, base_dir: str) -> tuple[InstanceSpec, ...]:
    """One a process, numbered per device: ``cuda:0#0``, ``cuda:0#1``, ``cpu#0``."""
    numbers: Counter[str] = Counter()
    instances: list[InstanceSpec] = []
    for group in entry.instances if entry.ensemble is None else ():
        limiter = group.rate_limiter
        rate = NO_RATE if limiter is None else declared(RateLimiter, limiter.model_dump())
        for _ in range(group.count):
            source = {"path": entry.callable, "base_dir": base_dir, "kwargs": entry.kwargs}
            name = f"{group.device}#{numbers[group.device]}"
            instances.append(InstanceSpec(name, group.device, source, rate))
            numbers[group.device] += 1
    return tuple(instances)


def tensors(entries: Sequence[TensorEntry], array: str | None = None) -> tuple[TensorSpec, ...]:
    """Tensors as they are declared, for a model with this ``array``."""
    return tuple(_tensor(entry, datatype_of(entry.dtype), array) for entry in entries)


def _tensor(entry: TensorEntry, datatype: str, array: str | None) -> TensorSpec:
    if not isinstance(entry, InputEntry):
        return TensorSpec(entry.name, datatype, tuple(entry.shape))
    memory = memory_of(entry.memory, datatype, array)
    return TensorSpec(entry.name, datatype, tuple(entry.shape), entry.optional, memory)


# ---- what is wrong with one model ---------------------------------------------------------------


def violations(entry: ModelEntry, base_dir: str, path: Path) -> Iterator[Violation]:
    """What is wrong with a model whose keys hold by themselves."""
    yield from _warmup_violations(entry, tensors(entry.inputs), base_dir, path)
    yield from _control_violations(entry, path)
    yield from _label_violations(entry, base_dir, path)


def _control_violations(entry: ModelEntry, path: Path) -> Iterator[Violation]:
    if entry.sequence_batching is None:
        return
    given = declared(SequenceBatching, entry.sequence_batching.model_dump())
    for index, one in enumerate(given.controls):
        try:
            whole_control(one)
        except BadModelConfig as error:
            yield Violation((*path, "sequence_batching", "controls", index), str(error))


# ---- what is wrong between several parts ---------------------------------------------------------


def violations_together(
    models: Sequence[ModelSpec], retried: Sequence[bool], settings: ServerSettings
) -> Iterator[Violation]:
    """What does not go together in models without other violations: in one, or in all of them.

    ``retried`` says of which models the file asks for a second run where a worker dies.
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


def _warmups(entry: ModelEntry, inputs: Sequence[TensorSpec], base_dir: str) -> tuple[Warmup, ...]:
    """The warm-ups of a model without violations."""
    return tuple(
        (
            one.name,
            one.batch_size,
            one.count,
            tuple(_warmup_input(one, spec, base_dir) for spec in _given(one, inputs)),
        )
        for one in entry.warmup
    )


def _warmup_violations(
    entry: ModelEntry, inputs: Sequence[TensorSpec], base_dir: str, path: Path
) -> Iterator[Violation]:
    """Every warm-up whose requests the model would refuse, or whose file is not there."""
    for index, one in enumerate(entry.warmup):
        where = (*path, "warmup", index)
        try:
            check_batch_size(f"warm-up {one.name!r}", one.batch_size, entry.max_batch_size)
        except BindError as error:
            yield Violation((*where, "batch_size"), str(error))
        yield from _warmup_input_violations(one, inputs, base_dir, where)


def _warmup_input_violations(
    one: WarmupEntry, inputs: Sequence[TensorSpec], base_dir: str, where: Path
) -> Iterator[Violation]:
    try:
        check_known(f"warm-up {one.name!r}", one.inputs, inputs)
    except BindError as error:
        yield Violation((*where, "inputs"), str(error))
    for spec in _given(one, inputs):
        at: Path = (*where, "inputs", spec.name) if spec.name in one.inputs else where
        text = f"warm-up {one.name!r}: input {spec.name!r}"
        _, datatype, shape, source, file = _warmup_input(one, spec, base_dir)
        if -1 in shape:
            yield Violation(at, f"{text} has no shape, and the model declares {list(spec.shape)}")
            continue
        try:
            check_input(text, spec, datatype, shape)
        except BindError as error:
            yield Violation(at, str(error))
        if source == FILE and not os.path.isfile(file):
            yield Violation((*at, "file"), f"{text}: there is no file {file}")


def _given(one: WarmupEntry, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The inputs that its requests have: all that a request must have, and what it names."""
    return [spec for spec in inputs if spec.name in one.inputs or not spec.optional]


def _warmup_input(
    one: WarmupEntry, spec: TensorSpec, base_dir: str
) -> tuple[str, str, tuple[int, ...], str, str]:
    entry = one.inputs.get(spec.name, WarmupInputEntry())
    datatype = spec.datatype if entry.dtype is None else datatype_of(entry.dtype)
    shape = spec.shape if entry.shape is None else tuple(entry.shape)
    if entry.file is None:
        return spec.name, datatype, shape, entry.values, ""
    return spec.name, datatype, shape, FILE, os.path.join(base_dir, entry.file)


# ---- labels -------------------------------------------------------------------------------------


def _label_specs(entry: ModelEntry, base_dir: str) -> tuple[LabelSpec, ...]:
    """The labels of a model without violations."""
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
            yield Violation((*where, "label_filename"), f"output {one.name!r}: {error}")


def _labels(output: OutputEntry, base_dir: str) -> tuple[str, ...]:
    """The labels themselves.

    Raises:
        OSError: there is no such file.
        ValueError: it is no UTF-8, or too long.
    """
    if output.label_filename is None:
        return tuple(output.labels)
    with open(os.path.join(base_dir, output.label_filename), encoding="utf-8") as file:
        return labels_in(file.read())
