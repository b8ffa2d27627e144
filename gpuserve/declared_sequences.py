"""From what users declare of sequences to a ``SequenceSpec``, and what cannot be. Pure.

``bind()`` and the config file come here alike, so that they refuse the same in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from gpuserve.declared_batcher import integer
from gpuserve.errors import BadModelConfig
from gpuserve.model import SequenceBatching, SequenceControl
from gpuserve.sequence_spec import (
    CONTROL_KINDS,
    CORRID,
    CORRID_DATATYPES,
    DIRECT,
    FLAG_DATATYPES,
    NO_SEQUENCES,
    OLDEST,
    STRATEGIES,
    ControlSpec,
    SequenceSpec,
)
from gpuserve.spec import BatchingSpec, PolicySpec, QueueSpec
from gpuserve_worker.tensor import TensorSpec, datatype_of

#: As many seats are made at every instance.
MAX_CANDIDATES: Final = 1 << 16
_DEFAULTS: Final = {True: "UINT64", False: "INT32"}


def sequence_spec(declared: SequenceBatching | None) -> SequenceSpec:
    """What ``ModelConfig.sequence_batching`` says.

    Raises:
        BadModelConfig: a value that cannot be; the text names it.
    """
    if declared is None:
        return NO_SEQUENCES
    if not isinstance(declared, SequenceBatching):
        raise BadModelConfig(
            f"sequence_batching must be a SequenceBatching or None, got an object of type "
            f"{type(declared).__name__}"
        )
    if declared.strategy not in STRATEGIES:
        raise BadModelConfig(f"strategy must be 'direct' or 'oldest', got {declared.strategy!r}")
    if not isinstance(declared.controls, Sequence):
        raise BadModelConfig(f"controls must be a list of SequenceControl, got {declared.controls!r:.200}")
    return SequenceSpec(
        declared.strategy,
        integer("max_sequence_idle_microseconds", declared.max_sequence_idle_microseconds, 1),
        integer("max_candidate_sequences", declared.max_candidate_sequences),
        _utilization(declared.minimum_slot_utilization),
        tuple(_control(one) for one in declared.controls),
    )


def check_sequences(
    sequence: SequenceSpec,
    batching: BatchingSpec,
    queue: QueueSpec,
    inputs: Iterable[TensorSpec],
    *,
    model: str,
    response_cache: bool,
) -> None:
    """Do nothing if the model's other properties go with its sequences, if it knows any.

    Raises:
        BadModelConfig: they do not.
    """
    if not sequence.strategy:
        return
    check_declared(sequence)
    _check_strategy(sequence, batching)
    _check_controls(sequence.controls, {one.name for one in inputs})
    if response_cache:
        raise BadModelConfig(
            f"Response Cache does not currently support model {model} with sequence batching scheduler. "
            "Please disable the response cache."
        )
    if queue.priority_levels or queue.policy != PolicySpec():
        raise BadModelConfig(
            "sequence batching goes with one level of priority and without a queue policy: the requests of a "
            "sequence are taken in their order"
        )


def control_spec(name: str, kind: str, dtype: Any, false_true: Sequence[Any]) -> ControlSpec:
    """An input that tells of the sequence; ``dtype`` None is INT32, or UINT64 for the correlation id.

    Raises:
        BadModelConfig: it cannot be.
    """
    if not isinstance(name, str) or not name:
        raise BadModelConfig(f"the name of a sequence control must be a non-empty string, got {name!r}")
    if kind not in CONTROL_KINDS:
        raise BadModelConfig(
            f"the kind of sequence control {name!r} must be one of {', '.join(CONTROL_KINDS)}, got {kind!r}"
        )
    allowed = CORRID_DATATYPES if kind == CORRID else FLAG_DATATYPES
    try:
        datatype = _DEFAULTS[kind == CORRID] if dtype is None else datatype_of(dtype)
    except ValueError as error:
        raise BadModelConfig(f"sequence control {name!r}: {error}") from None
    if datatype not in allowed:
        raise BadModelConfig(
            f"the dtype of sequence control {name!r} of kind {kind} must be one of {', '.join(allowed)}, got "
            f"{datatype}"
        )
    false, true = _false_true(name, datatype, false_true)
    return ControlSpec(name, kind, datatype, false, true)


def check_declared(sequence: SequenceSpec) -> None:
    """Do nothing if a spec, which may be of another program, is one that could be declared.

    Raises:
        BadModelConfig: it is not.
    """
    if sequence.strategy not in ("", *STRATEGIES):
        raise BadModelConfig(f"strategy must be 'direct' or 'oldest', got {sequence.strategy!r}")
    _utilization(sequence.minimum_slot_utilization)
    if sequence.max_candidates > MAX_CANDIDATES:
        raise BadModelConfig(
            f"max_candidate_sequences must be at most {MAX_CANDIDATES}, got {sequence.max_candidates}"
        )
    for one in sequence.controls:
        control_spec(one.name, one.kind, one.datatype, (one.false, one.true))


def with_controls(warmups: Sequence[tuple[Any, ...]], sequence: SequenceSpec) -> tuple[Any, ...]:
    """Warm-ups of a model (``wire.Init.warmup``) with the inputs that tell of the sequence, all zero."""
    controls = tuple((one.name, one.datatype, (1,), "zero", "") for one in sequence.controls)
    return tuple((name, size, count, (*inputs, *controls)) for name, size, count, inputs in warmups)


def _control(declared: Any) -> ControlSpec:
    if not isinstance(declared, SequenceControl):
        raise BadModelConfig(
            f"controls must be a list of SequenceControl, got an object of type {type(declared).__name__}"
        )
    return control_spec(declared.name, declared.kind, declared.dtype, declared.false_true)


def _false_true(name: str, datatype: str, given: Sequence[Any]) -> tuple[Any, Any]:
    kinds = {"BOOL": bool | int, "FP32": int | float}.get(datatype, int)
    if (
        not isinstance(given, list | tuple)
        or len(given) != 2
        or not all(isinstance(one, kinds) for one in given)
    ):
        raise BadModelConfig(
            f"false_true of sequence control {name!r} must be two values of {datatype}, got {given!r:.100}"
        )
    false, true = given
    if false == true or (datatype == "INT32" and not all(-(1 << 31) <= one < 1 << 31 for one in given)):
        raise BadModelConfig(
            f"false_true of sequence control {name!r} must be two different values of {datatype}, got "
            f"{given!r}"
        )
    return false, true


def _utilization(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise BadModelConfig(f"minimum_slot_utilization must be a number from 0 to 1, got {value!r}")
    return float(value)


def _check_strategy(sequence: SequenceSpec, batching: BatchingSpec) -> None:
    if sequence.strategy == DIRECT and sequence.max_candidates:
        raise BadModelConfig("max_candidate_sequences has no effect without the strategy 'oldest'")
    if sequence.strategy == DIRECT and batching.preserve_ordering:
        raise BadModelConfig("preserve_ordering has no effect on sequences without the strategy 'oldest'")
    if sequence.strategy == OLDEST and sequence.minimum_slot_utilization:
        raise BadModelConfig("minimum_slot_utilization has no effect without the strategy 'direct'")


def _check_controls(controls: Sequence[ControlSpec], inputs: set[str]) -> None:
    names, kinds = set(inputs), set[str]()
    for one in controls:
        if one.name in names:
            raise BadModelConfig(f"sequence control {one.name!r} has the name of another input")
        if one.kind in kinds:
            raise BadModelConfig(f"two sequence controls are of kind {one.kind}, expected one at most")
        names.add(one.name)
        kinds.add(one.kind)
