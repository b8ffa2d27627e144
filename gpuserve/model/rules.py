"""Rules between several options of a model, and between an ensemble and the models of its steps.

The rules are the same for programs, files and clients. The rules of batching and of the queue read plain data
with the names of a file. The schema may have found mistakes in the same data, so these rules ignore values of
a wrong type: a file then shows all its mistakes at once. Each fault has a place in the model, so that a file
can show its position.

Every tensor of an ensemble has a name. A tensor is an input of the ensemble, or the output of one step; a
step waits for its input tensors. The steps are therefore a graph, which must have no cycle.
"""

from __future__ import annotations

import dataclasses
import graphlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.core.errors import BadModelConfig
from gpuserve.core.suggestions import nearest
from gpuserve.devices.names import CPU
from gpuserve.model.options import declared, rows
from gpuserve.model.spec import (
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
    StepSpec,
)
from gpuserve_worker.protocol.tensor import TensorSpec, datatype_of

Place: TypeAlias = tuple[str | int, ...]
#: Datatypes of control inputs: flags (start, end, ready), and the correlation id. The first one is the
#: default.
_FLAG_DTYPES: Final = ("INT32", "FP32", "BOOL")
_CORRID_DTYPES: Final = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")


class Violation(NamedTuple):
    """A broken rule: the keys that lead to the value that breaks it, and a sentence."""

    path: Place
    text: str


@contextmanager
def value_errors_as_bad_config() -> Iterator[None]:
    """Turn a ValueError into a BadModelConfig."""
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
    """Raise BadModelConfig unless the options go together; ``max_batch_size`` None is not checked."""
    batches, queued = dataclasses.asdict(batching), dataclasses.asdict(queue)
    batches["preferred_batch_sizes"] = list(batching.preferred_batch_sizes)
    queued["policies"] = dict(queued["policies"])
    model = {"max_batch_size": max_batch_size, "batching": batches, "queue": queued}
    for _, text in batching_faults(model):
        for row in (*rows(BatchingSpec).values(), *rows(QueueSpec).values()) if in_tritons_names else ():
            text = re.sub(rf"\b{row.name}\b", row.option.triton or row.name, text)
        raise BadModelConfig(text)


def batching_faults(model: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield every broken rule of ``batching`` and ``queue`` in the plain data of one model."""
    batching, queue = mapping(model.get("batching")), mapping(model.get("queue"))
    yield from _batching(batching, model.get("max_batch_size", 0))
    yield from _priorities(queue)
    if queue.get("fairness_header") and queue.get("fairness") != CLIENT:
        text = "fairness_header has no effect without fairness: client"
        yield Violation(("queue", "fairness_header"), text)
    if batching.get("preserve_ordering") is True:
        yield from _ordering(queue)


def _batching(batching: Mapping[str, Any], limit: Any) -> Iterator[Violation]:
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
            yield Violation(
                ("batching", "preferred_batch_sizes", index),
                f"expected a preferred batch size of at most max_batch_size, which is {limit}, given {size}",
            )


def _without_effect(batching: Mapping[str, Any], without: str) -> Iterator[Violation]:
    for key in ("preferred_batch_sizes", "max_queue_delay_us", "max_batch_elements", "bucket_boundaries"):
        if batching.get(key):
            yield Violation(("batching", key), f"{key} has no effect without {without}")


def check_ragged(model: ModelSpec) -> None:
    """Raise BadModelConfig unless the ragged tensors of a model go with its other options."""
    tensors = {
        key: [{"name": one.name, "shape": list(one.shape), "ragged": one.ragged} for one in specs]
        for key, specs in (("inputs", model.inputs), ("outputs", model.outputs))
    }
    batching = {"bucket_boundaries": list(model.batching.bucket_boundaries)}
    ensemble = model.steps or None
    plain = {**tensors, "max_batch_size": model.max_batch_size, "batching": batching, "ensemble": ensemble}
    for _, text in ragged_faults(plain):
        raise BadModelConfig(text)


def ragged_faults(model: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield every broken rule of ragged tensors in the plain data of one model."""
    ragged: dict[str, int] = {"inputs": 0, "outputs": 0}
    for key in ragged:
        tensors = model.get(key)
        for index, one in enumerate(tensors if isinstance(tensors, list) else ()):
            if mapping(one).get("ragged") is True:
                ragged[key] += 1
                if (text := _ragged_problem(one, model)) is not None:
                    yield Violation((key, index, "ragged"), f"tensor {one.get('name')!r}: {text}")
    boundaries = mapping(model.get("batching")).get("bucket_boundaries")
    if not isinstance(boundaries, list) or not boundaries or not all(map(is_int, boundaries)):
        return
    place = ("batching", "bucket_boundaries")
    if not ragged["inputs"] and "inputs" in model:
        yield Violation(place, "bucket_boundaries has no effect without an input that is ragged")
    if any(left >= right for left, right in itertools.pairwise(boundaries)):
        yield Violation(place, f"bucket_boundaries must ascend, given {boundaries}")


def _ragged_problem(tensor: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    if model.get("ensemble") is not None:
        return "ragged does not go with an ensemble: it is for the models of its steps"
    if model.get("max_batch_size", 0) == 0:
        return "ragged has no effect without a max_batch_size of at least 1; the model does not batch"
    shape = tensor.get("shape")
    if isinstance(shape, list) and -1 not in shape:
        return f"ragged needs a size of -1 in the shape, given {shape}"
    return None


def _priorities(queue: Mapping[str, Any]) -> Iterator[Violation]:
    levels, default = queue.get("priority_levels", 0), queue.get("default_priority", 0)
    if not is_int(levels) or levels < 0:
        return
    at = ("queue", "default_priority" if "default_priority" in queue else "priority_levels")
    if is_int(default) and levels and not 1 <= default <= levels:
        yield Violation(at, f"The `default_priority` must be between 1 and {levels}. Got {default}.")
    if is_int(default) and default and not levels:
        text = f"Provide the `priority_levels` for a `default_priority`, which is {default}."
        yield Violation(at, text)
    for level in mapping(queue.get("policies")):
        if not levels:
            text = "Provide the `priority_levels` if you want to define `policies` for Dynamic Batching."
            yield Violation(("queue", "policies"), text)
            return
        if str(level).isdecimal() and not 1 <= int(level) <= levels:
            text = f"Invalid `priority`={level} provided. The value must be between 1 and {levels}."
            yield Violation(("queue", "policies", level), text)


def _ordering(queue: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield the options that reorder requests, which do not go with ``preserve_ordering``."""
    levels = queue.get("priority_levels", 0)
    if is_int(levels) and levels > 1:
        text = f"preserve_ordering goes with one level of priority, given {levels}"
        yield Violation(("queue", "priority_levels"), text)
    if queue.get("fairness") == CLIENT:
        text = "preserve_ordering does not go with fairness; expected 'none'"
        yield Violation(("queue", "fairness"), text)
    policies: dict[Place, Any] = {("policy",): queue.get("policy")}
    policies |= {("policies", level): one for level, one in mapping(queue.get("policies")).items()}
    for place, one in policies.items():
        policy = mapping(one)
        if policy.get("timeout_action") == DELAY and policy.get("default_timeout_us"):
            text = "preserve_ordering does not go with delay; expected 'reject'"
            yield Violation(("queue", *place, "timeout_action"), text)


def check_ranks(model: ModelSpec) -> None:
    """Raise BadModelConfig unless a model's instances of several ranks can run on their devices."""
    for one in (one for one in model.instances if one.ranks > 1):
        if one.device != CPU and len(one.devices) != one.ranks:
            raise BadModelConfig(
                f"ranks: expected the CPU, or a list of {one.ranks} GPUs as device, one for each rank, given "
                f"{one.device!r}"
            )
        if model.decoupled or model.max_active:
            raise BadModelConfig(
                f"ranks does not go with {'max_active' if model.max_active else 'decoupled'}: ranks run one "
                "batch at a time, with one response for each request"
            )
        if "object" in one.source:
            raise BadModelConfig("ranks does not go with isolation='thread': each rank is a process")


def check_gpu_shares(model: ModelSpec) -> None:
    """Raise BadModelConfig unless instances with a share of a GPU are processes on GPUs. Instances have the
    devices that were declared: ``auto`` may turn out to be the CPU, where a share has no effect.
    """
    for one in (one for one in model.instances if one.gpu_share):
        if one.device == CPU:
            text = f"gpu_share is {one.gpu_share:g} for instance {one.name!r} on the CPU"
            raise BadModelConfig(f"{text}: expected a GPU as device, or no gpu_share")
        if "object" in one.source:
            raise BadModelConfig("gpu_share does not go with isolation='thread': the share is of a process")


# ---- sequences ----------------------------------------------------------------------------------


def check_sequences(model: ModelSpec) -> None:
    """Raise BadModelConfig unless a model's options go with its sequence batching, if any."""
    sequence = model.sequence
    if not sequence.strategy:
        return
    if sequence.strategy == DIRECT and sequence.max_candidate_sequences:
        raise BadModelConfig("max_candidate_sequences has no effect without the strategy 'oldest'")
    if sequence.strategy == DIRECT and model.batching.preserve_ordering:
        raise BadModelConfig("preserve_ordering has no effect on sequences without the strategy 'oldest'")
    if sequence.strategy == OLDEST and sequence.minimum_slot_utilization:
        raise BadModelConfig("minimum_slot_utilization has no effect without the strategy 'direct'")
    names = [*(one.name for one in model.inputs), *(one.name for one in sequence.controls)]
    kinds = [one.kind for one in sequence.controls]
    for one in sequence.controls:
        if names.count(one.name) > 1:
            raise BadModelConfig(f"sequence control {one.name!r} has the name of another input")
        if kinds.count(one.kind) > 1:
            raise BadModelConfig(f"two sequence controls are of kind {one.kind}, expected one at most")
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
    """Raise ValueError or BadModelConfig unless the sequence batching of another program's spec is valid."""
    if sequence != NO_SEQUENCES:
        for one in declared(SequenceBatching, sequence).controls:
            complete_control(one)


def complete_control(given: SequenceControl) -> SequenceControl:
    """Return a control input with its datatype, INT32 or UINT64 by default; raise BadModelConfig."""
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


def with_control_inputs(warmups: Iterable[tuple[Any, ...]], sequence: SequenceBatching) -> tuple[Any, ...]:
    """Return warm-ups of a model (``wire.Init.warmup``) with the control inputs added, all of them zero."""
    controls = tuple((one.name, one.dtype, (1,), "zero", "") for one in sequence.controls)
    return tuple((name, size, count, (*inputs, *controls)) for name, size, count, inputs in warmups)


#: The versions of each model, by the name of the model.
Known: TypeAlias = Mapping[str, Sequence[ModelSpec]]
MAX_DEPTH: Final = 64


class _Typed(NamedTuple):
    """The declared type of a tensor of the ensemble, with the batch axis in front if there is one."""

    datatype: str
    shape: tuple[int, ...]
    optional: bool


def check_ensemble(spec: ModelSpec) -> None:
    """Raise BadModelConfig, with the place, unless the ensemble is valid without its models."""
    for place, text in ensemble_faults(spec):
        raise BadModelConfig(f"ensemble {spec.name!r}: {_shown_place(place)}{text}")


def check_members(specs: Iterable[ModelSpec]) -> None:
    """Raise BadModelConfig unless every ensemble fits the models of its steps."""
    known = by_name(specs)
    for spec in (one for versions in known.values() for one in versions if one.is_ensemble):
        for place, text in member_faults(spec, known):
            raise BadModelConfig(f"ensemble {spec.name!r}: {_shown_place(place)}{text}")


def by_name(specs: Iterable[ModelSpec]) -> dict[str, list[ModelSpec]]:
    """Return the versions of each model by name, the highest version last."""
    found: dict[str, list[ModelSpec]] = {}
    for one in sorted(specs, key=lambda spec: spec.version):
        found.setdefault(one.name, []).append(one)
    return found


# ---- an ensemble by itself ----------------------------------------------------------------------


def ensemble_faults(spec: ModelSpec) -> Iterator[Violation]:
    """Yield the faults of an ensemble that do not depend on the models of its steps."""
    inputs = [one.name for one in spec.inputs]
    makers: dict[str, int] = {}
    for number, step in enumerate(spec.steps):
        for theirs, ours in step.outputs:
            place = ("steps", number, "outputs", theirs)
            if ours in inputs:
                yield Violation(place, f"tensor {ours!r} is an input of the ensemble, which no step may make")
            elif ours in makers:
                yield Violation(place, f"tensor {ours!r} is made by steps[{makers[ours]}] already")
            else:
                makers[ours] = number
    available = [*inputs, *makers]
    for number, step in enumerate(spec.steps):
        for theirs, ours in step.inputs:
            if ours not in available:
                text = f"tensor {ours!r} is no input of the ensemble, and no step makes it"
                yield Violation(("steps", number, "inputs", theirs), text + nearest(ours, available))
    for number, output in enumerate(spec.outputs):
        if output.name not in makers:
            text = f"output {output.name!r} is made by no step{nearest(output.name, makers)}"
            yield Violation(("outputs", number), text)
    graph = {
        at: {makers[ours] for _, ours in one.inputs if ours in makers} for at, one in enumerate(spec.steps)
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        stuck = sorted(set(error.args[1]))
        shown = ", ".join(f"steps[{number}] (model {spec.steps[number].model!r})" for number in stuck)
        yield Violation(("steps", stuck[0]), f"these steps wait for one another in a cycle: {shown}")
    else:
        yield from _unused(spec)


def _unused(spec: ModelSpec) -> Iterator[Violation]:
    """Yield inputs that no step reads, and steps that no output needs."""
    needed = needed_steps(spec.steps, [one.name for one in spec.outputs])
    for number, step in enumerate(spec.steps):
        if number not in needed:
            text = f"no output of the ensemble needs anything that model {step.model!r} makes here"
            yield Violation(("steps", number), text)
    read = {ours for step in spec.steps for _, ours in step.inputs}
    for number, tensor in enumerate(spec.inputs):
        if tensor.name not in read:
            yield Violation(("inputs", number), f"input {tensor.name!r} is read by no step")


def needed_steps(steps: Sequence[StepSpec], outputs: Iterable[str]) -> list[int]:
    """Return the positions of the steps that contribute to the outputs, in the order of declaration."""
    makers = {ours: number for number, step in enumerate(steps) for _, ours in step.outputs}
    wanted, found = list(outputs), set()
    while wanted:
        number = makers.get(wanted.pop())
        if number is not None and number not in found:
            found.add(number)
            wanted += [ours for _, ours in steps[number].inputs]
    return sorted(found)


# ---- an ensemble and the models of its steps ----------------------------------------------------


def member_faults(spec: ModelSpec, known: Known) -> Iterator[Violation]:
    """Yield the faults between a valid ensemble and the models of its steps."""
    members: dict[int, ModelSpec] = {}
    for number, step in enumerate(spec.steps):
        member = _member(step, known)
        if isinstance(member, str):
            yield Violation(("steps", number, "model"), member)
            continue
        members[number] = member
        yield from _misnamed(number, step, member)
        yield from _misfit(spec, number, member, known)
    yield from _mistyped(spec, members)


def _member(step: StepSpec, known: Known) -> ModelSpec | str:
    """Return the model of a step, or a sentence that says why there is none."""
    versions = known.get(step.model, ())
    if not versions:
        return f"there is no model {step.model!r}{nearest(step.model, known)}"
    if not step.version:
        return versions[-1]
    for one in versions:
        if one.version == step.version:
            return one
    available = ", ".join(str(one.version) for one in versions)
    return f"model {step.model!r} has no version {step.version}, but {available}"


def _misnamed(number: int, step: StepSpec, member: ModelSpec) -> Iterator[Violation]:
    for key in ("inputs", "outputs"):
        names = [one.name for one in getattr(member, key)]
        for theirs, _ in getattr(step, key):
            if theirs not in names:
                available = ", ".join(map(repr, names)) or "none"
                text = f"model {member.name!r} has no {key[:-1]} {theirs!r}; its {key} are {available}"
                yield Violation(("steps", number, key, theirs), text)
    given = {theirs for theirs, _ in step.inputs}
    if missing := [one.name for one in member.inputs if not one.optional and one.name not in given]:
        text = f"model {member.name!r} needs the input {missing[0]!r}, which it is not given here"
        yield Violation(("steps", number, "inputs"), text)


def _misfit(spec: ModelSpec, number: int, member: ModelSpec, known: Known) -> Iterator[Violation]:
    place = ("steps", number, "model")
    if member.decoupled and (text := _stream_problem(spec, spec.steps[number])):
        yield Violation(place, f"model {member.name!r} is decoupled, {text}")
    level, leads_back = [member], member.name == spec.name
    for _ in range(MAX_DEPTH):
        steps = {(step.model, step.version): step for one in level for step in one.steps}
        level = [one for step in steps.values() if isinstance(one := _member(step, known), ModelSpec)]
        leads_back |= any(one.name == spec.name for one in level)
        if not level:
            break
    else:
        text = f"by model {member.name!r} the ensemble has more than {MAX_DEPTH} others below one another"
        if leads_back:
            text = f"model {member.name!r} leads back to the ensemble itself"
        yield Violation(place, text)
    if member.max_batch_size and spec.max_batch_size > member.max_batch_size:
        text = (
            f"the ensemble has a max_batch_size of {spec.max_batch_size}, "
            f"model {member.name!r} one of {member.max_batch_size}"
        )
        yield Violation(place, text)


def _stream_problem(spec: ModelSpec, step: StepSpec) -> str | None:
    """Return why a step cannot have any number of responses, or None."""
    made = {ours for _, ours in step.outputs}
    if not spec.decoupled:
        return "and a step gives one response to a request, unless the ensemble is decoupled too"
    if read := sorted(ours for one in spec.steps for _, ours in one.inputs if ours in made):
        return f"so it can only be the last step, but a step reads {read[0]!r}"
    if other := [one.name for one in spec.outputs if one.name not in made]:
        return f"so it must make all outputs of the ensemble, but does not make {other[0]!r}"
    return None


def _mistyped(spec: ModelSpec, members: Mapping[int, ModelSpec]) -> Iterator[Violation]:
    tensors = {one.name: _typed(one, spec) for one in spec.inputs}
    for number, member in members.items():
        theirs = {one.name: one for one in member.outputs}
        for name, ours in spec.steps[number].outputs:
            if name in theirs:
                tensors[ours] = _typed(theirs[name], member)
    for number, member in members.items():
        theirs = {one.name: one for one in member.inputs}
        for name, ours in spec.steps[number].inputs:
            if name in theirs and ours in tensors:
                place = ("steps", number, "inputs", name)
                where = f"input {name!r} of model {member.name!r}"
                yield from _differences(place, ours, tensors[ours], _typed(theirs[name], member), where)
    for number, output in enumerate(spec.outputs):
        if output.name in tensors:
            made, wanted = tensors[output.name], _typed(output, spec)
            where = "the output of the ensemble"
            yield from _differences(("outputs", number), output.name, made, wanted, where)


def _differences(place: Place, name: str, made: _Typed, wanted: _Typed, where: str) -> Iterator[Violation]:
    if made.datatype != wanted.datatype:
        yield Violation(place, f"tensor {name!r} is {made.datatype}, {where} is {wanted.datatype}")
    elif len(made.shape) != len(wanted.shape) or not all(
        -1 in pair or pair[0] == pair[1] for pair in zip(made.shape, wanted.shape, strict=True)
    ):
        yield Violation(
            place,
            f"tensor {name!r} has shape {list(made.shape)}, {where} has {list(wanted.shape)} "
            "(with the batch axis where there is one)",
        )
    elif made.optional and not wanted.optional:
        yield Violation(place, f"tensor {name!r} is optional, {where} is not")


def _typed(tensor: TensorSpec, of: ModelSpec) -> _Typed:
    shape = (-1, *tensor.shape) if of.max_batch_size else tensor.shape
    return _Typed(tensor.datatype, shape, tensor.optional)


def _shown_place(place: Place) -> str:
    text = ""
    for one in place:
        text += f"[{one}]" if isinstance(one, int) else f".{one}" if text else one
    return f"{text}: "
