"""What must hold between several options of a model: the same for a program, a file and a client. Pure. The
rules of batching and of the queue look at plain data with the names of a file, which a schema may have found
wrong as well, so that a file shows all its mistakes at once: what has the wrong type is passed over. A fault
has a place in the model, so that a file can show where it is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.declare.spec import (
    CLIENT,
    CORRID,
    DELAY,
    DIRECT,
    NO_SEQUENCES,
    NONE,
    OLDEST,
    BatchingSpec,
    ModelSpec,
    PolicySpec,
    QueueSpec,
    SequenceBatching,
    SequenceControl,
)
from gpuserve.errors import BadModelConfig
from gpuserve.options import declared, rows
from gpuserve_worker.protocol.tensor import datatype_of

Place: TypeAlias = tuple[str | int, ...]
#: Datatypes of the inputs for start, end and ready, and of that for the correlation id; the first is usual.
_FLAG_DTYPES: Final = ("INT32", "FP32", "BOOL")
_CORRID_DTYPES: Final = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")


class DeclarationFault(NamedTuple):
    """Something that cannot be, with the keys that lead to it from the model."""

    place: Place
    text: str


@contextmanager
def told_as_config() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise BadModelConfig(str(error)) from None


def mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# ---- batches and the queue ----------------------------------------------------------------------


def check_batching(
    max_batch_size: int | None, batching: BatchingSpec, queue: QueueSpec, *, in_tritons_names: bool = False
) -> None:
    """Raise BadModelConfig unless these options go together; ``max_batch_size`` None is not known yet."""
    batches, queued = dataclasses.asdict(batching), dataclasses.asdict(queue)
    batches["preferred_batch_sizes"] = list(batching.preferred_batch_sizes)
    queued["policies"] = dict(queued["policies"])
    model = {"max_batch_size": max_batch_size, "batching": batches, "queue": queued}
    for _, text in batching_faults(model):
        raise BadModelConfig(_renamed(text) if in_tritons_names else text)


def _renamed(text: str) -> str:
    for row in (*rows(BatchingSpec).values(), *rows(QueueSpec).values()):
        if row.option.triton:
            text = re.sub(rf"\b{row.name}\b", row.option.triton, text)
    return text


def batching_faults(model: Mapping[str, Any]) -> Iterator[DeclarationFault]:
    """Every broken rule of ``batching`` and ``queue`` in the plain data of one model."""
    batching, queue = mapping(model.get("batching")), mapping(model.get("queue"))
    yield from _batching(batching, model.get("max_batch_size", 0))
    yield from _priorities(queue)
    if queue.get("fairness_header") and queue.get("fairness") != CLIENT:
        text = "fairness_header has no effect without fairness: client"
        yield DeclarationFault(("queue", "fairness_header"), text)
    if batching.get("preserve_ordering") is True:
        yield from _ordering(queue)


def _batching(batching: Mapping[str, Any], limit: Any) -> Iterator[DeclarationFault]:
    if not is_int(limit) or limit < 0:
        return
    if limit == 0:
        yield from _without_effect(batching, "a max_batch_size of at least 1; the model does not batch")
        return
    if batching.get("merge") is False:
        yield from _without_effect(batching, "merge: every request is its own batch")
    sizes = batching.get("preferred_batch_sizes")
    for index, size in enumerate(sizes if isinstance(sizes, list) else ()):
        if is_int(size) and size > limit:
            yield DeclarationFault(
                ("batching", "preferred_batch_sizes", index),
                f"expected a preferred batch size of at most max_batch_size, which is {limit}, given {size}",
            )


def _without_effect(batching: Mapping[str, Any], without: str) -> Iterator[DeclarationFault]:
    for key in ("preferred_batch_sizes", "max_queue_delay_us"):
        if batching.get(key):
            yield DeclarationFault(("batching", key), f"{key} has no effect without {without}")


def _priorities(queue: Mapping[str, Any]) -> Iterator[DeclarationFault]:
    levels, default = queue.get("priority_levels", 0), queue.get("default_priority", 0)
    if not is_int(levels) or levels < 0:
        return
    at = ("queue", "default_priority" if "default_priority" in queue else "priority_levels")
    if is_int(default) and levels and not 1 <= default <= levels:
        yield DeclarationFault(at, f"The `default_priority` must be between 1 and {levels}. Got {default}.")
    if is_int(default) and default and not levels:
        text = f"Provide the `priority_levels` for a `default_priority`, which is {default}."
        yield DeclarationFault(at, text)
    for level in mapping(queue.get("policies")):
        if not levels:
            text = "Provide the `priority_levels` if you want to define `policies` for Dynamic Batching."
            yield DeclarationFault(("queue", "policies"), text)
            return
        if str(level).isdecimal() and not 1 <= int(level) <= levels:
            text = f"Invalid `priority`={level} provided. The value must be between 1 and {levels}."
            yield DeclarationFault(("queue", "policies", level), text)


def _ordering(queue: Mapping[str, Any]) -> Iterator[DeclarationFault]:
    """What takes requests out of their order cannot keep the order of their answers."""
    levels = queue.get("priority_levels", 0)
    if is_int(levels) and levels > 1:
        text = f"preserve_ordering goes with one level of priority, given {levels}"
        yield DeclarationFault(("queue", "priority_levels"), text)
    if queue.get("fairness") == CLIENT:
        text = "preserve_ordering does not go with fairness; expected 'none'"
        yield DeclarationFault(("queue", "fairness"), text)
    policies: dict[Place, Any] = {("policy",): queue.get("policy")}
    policies |= {("policies", level): one for level, one in mapping(queue.get("policies")).items()}
    for place, one in policies.items():
        policy = mapping(one)
        if policy.get("timeout_action") == DELAY and policy.get("default_timeout_us"):
            text = "preserve_ordering does not go with delay; expected 'reject'"
            yield DeclarationFault(("queue", *place, "timeout_action"), text)


# ---- sequences ----------------------------------------------------------------------------------


def check_sequences(model: ModelSpec) -> None:
    """Raise BadModelConfig unless the model's other options go with its sequences, if it knows any."""
    sequence = model.sequence
    if not sequence.strategy:
        return
    if sequence.strategy == DIRECT and sequence.max_candidate_sequences:
        raise BadModelConfig("max_candidate_sequences has no effect without the strategy 'oldest'")
    if sequence.strategy == DIRECT and model.batching.preserve_ordering:
        raise BadModelConfig("preserve_ordering has no effect on sequences without the strategy 'oldest'")
    if sequence.strategy == OLDEST and sequence.minimum_slot_utilization:
        raise BadModelConfig("minimum_slot_utilization has no effect without the strategy 'direct'")
    _check_names(sequence.controls, {one.name for one in model.inputs})
    if model.response_cache:
        raise BadModelConfig(
            f"Response Cache does not currently support model {model.name} with sequence batching scheduler. "
            "Please disable the response cache."
        )
    if model.queue.priority_levels or model.queue.policy != PolicySpec():
        raise BadModelConfig(
            "sequence batching goes with one level of priority and without a queue policy: the requests of a "
            "sequence are taken in their order"
        )
    if model.queue.fairness != NONE:
        raise BadModelConfig("fairness does not go with sequence batching, whose sequences have their seats")


def check_declared(sequence: SequenceBatching) -> None:
    """Raise ValueError or BadModelConfig unless a spec of another program could be declared."""
    if sequence != NO_SEQUENCES:
        for one in declared(SequenceBatching, sequence).controls:
            whole_control(one)


def whole_control(given: SequenceControl) -> SequenceControl:
    """A control with its v2 datatype: INT32 where none is named, or UINT64 for the correlation id. Raises
    BadModelConfig: it cannot be.
    """
    allowed = _CORRID_DTYPES if given.kind == CORRID else _FLAG_DTYPES
    dtype = datatype_of(given.dtype) if given.dtype else allowed[0]
    if dtype not in allowed:
        raise BadModelConfig(
            f"the dtype of sequence control {given.name!r} of kind {given.kind} must be one of "
            f"{', '.join(allowed)}, got {dtype}"
        )
    return dataclasses.replace(
        given, dtype=dtype, false_true=_false_true(given.name, dtype, given.false_true)
    )


def _false_true(name: str, dtype: str, given: Sequence[Any]) -> tuple[Any, Any]:
    kinds = {"BOOL": bool | int, "FP32": int | float}.get(dtype, int)
    is_pair = isinstance(given, list | tuple) and len(given) == 2
    if not is_pair or not all(isinstance(one, kinds) for one in given):
        raise BadModelConfig(
            f"false_true of sequence control {name!r} must be two values of {dtype}, got {given!r:.100}"
        )
    false, true = given
    if false == true or (dtype == "INT32" and not all(-(1 << 31) <= one < 1 << 31 for one in given)):
        raise BadModelConfig(
            f"false_true of sequence control {name!r} must be two different values of {dtype}, got {given!r}"
        )
    return false, true


def _check_names(controls: Iterable[SequenceControl], inputs: set[str]) -> None:
    names, kinds = set(inputs), set[str]()
    for one in controls:
        if one.name in names:
            raise BadModelConfig(f"sequence control {one.name!r} has the name of another input")
        if one.kind in kinds:
            raise BadModelConfig(f"two sequence controls are of kind {one.kind}, expected one at most")
        names.add(one.name)
        kinds.add(one.kind)


def with_controls(warmups: Iterable[tuple[Any, ...]], sequence: SequenceBatching) -> tuple[Any, ...]:
    """Warm-ups of a model (``wire.Init.warmup``) with the inputs that tell of the sequence, all zero."""
    controls = tuple((one.name, one.dtype, (1,), "zero", "") for one in sequence.controls)
    return tuple((name, size, count, (*inputs, *controls)) for name, size, count, inputs in warmups)
