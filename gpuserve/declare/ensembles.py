"""What must hold for an ensemble: in itself, and between it and the models of its steps. Pure. A fault has a
place within the declaration, so that a config file can show where it is. Every tensor of an ensemble has a
name. A tensor is an input of the ensemble, or one step makes it; whoever reads it waits for that. So the
steps are a graph, which must have no cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from gpuserve.declare.rules import DeclarationFault, Place
from gpuserve.declare.spec import ModelSpec, StepSpec
from gpuserve.errors import BadModelConfig
from gpuserve.options import nearest
from gpuserve_worker.protocol.tensor import TensorSpec

#: The versions of models by name.
Known: TypeAlias = Mapping[str, Sequence[ModelSpec]]
#: A shape with the batch axis in front, where there is one.
_Shape: TypeAlias = tuple[int, ...]


#: So deep may ensembles be nested.
MAX_DEPTH: Final = 64


class _Typed(NamedTuple):
    """What is known of a tensor of the ensemble before anything runs."""

    datatype: str
    shape: _Shape
    optional: bool


def check_ensemble(spec: ModelSpec) -> None:
    """Raise BadModelConfig unless the ensemble holds in itself; the text names both."""
    for place, text in faults(spec):
        raise BadModelConfig(f"ensemble {spec.name!r}: {_shown(place)}{text}")


def check_members(specs: Iterable[ModelSpec]) -> None:
    """Raise BadModelConfig unless every ensemble among these models fits the others."""
    known = by_name(specs)
    for spec in (one for versions in known.values() for one in versions if one.is_ensemble):
        for place, text in member_faults(spec, known):
            raise BadModelConfig(f"ensemble {spec.name!r}: {_shown(place)}{text}")


def by_name(specs: Iterable[ModelSpec]) -> dict[str, list[ModelSpec]]:
    """The versions of each model, the highest last."""
    found: dict[str, list[ModelSpec]] = {}
    for one in sorted(specs, key=lambda spec: spec.version):
        found.setdefault(one.name, []).append(one)
    return found


# ---- in itself ------------------------------------------------------------------------------


def faults(spec: ModelSpec) -> Iterator[DeclarationFault]:
    """All that is wrong with an ensemble, whatever its models are, by place in it."""
    inputs = [one.name for one in spec.inputs]
    makers: dict[str, int] = {}
    for number, step in enumerate(spec.steps):
        for theirs, ours in step.outputs:
            place = ("steps", number, "outputs", theirs)
            if ours in inputs:
                yield DeclarationFault(
                    place, f"tensor {ours!r} is an input of the ensemble, which no step may make"
                )
            elif ours in makers:
                yield DeclarationFault(place, f"tensor {ours!r} is made by steps[{makers[ours]}] already")
            else:
                makers[ours] = number
    yield from _unmade(spec, inputs, makers)
    if (cycle := _cycle(spec.steps, makers)) is not None:
        yield cycle
    else:
        yield from _unused(spec, makers)


def _unmade(spec: ModelSpec, inputs: Sequence[str], makers: Mapping[str, int]) -> Iterator[DeclarationFault]:
    there = [*inputs, *makers]
    for number, step in enumerate(spec.steps):
        for theirs, ours in step.inputs:
            if ours not in there:
                text = f"tensor {ours!r} is no input of the ensemble, and no step makes it"
                yield DeclarationFault(("steps", number, "inputs", theirs), text + nearest(ours, there))
    for number, output in enumerate(spec.outputs):
        if output.name not in makers:
            text = f"output {output.name!r} is made by no step{nearest(output.name, makers)}"
            yield DeclarationFault(("outputs", number), text)


def _unused(spec: ModelSpec, makers: Mapping[str, int]) -> Iterator[DeclarationFault]:
    """Inputs that nobody reads, and steps that no output needs."""
    needed = needed_steps(spec.steps, [one.name for one in spec.outputs])
    for number, step in enumerate(spec.steps):
        if number not in needed:
            text = f"no output of the ensemble needs anything that model {step.model!r} makes here"
            yield DeclarationFault(("steps", number), text)
    read = {ours for step in spec.steps for _, ours in step.inputs}
    for number, tensor in enumerate(spec.inputs):
        if tensor.name not in read:
            yield DeclarationFault(("inputs", number), f"input {tensor.name!r} is read by no step")


def needed_steps(steps: Sequence[StepSpec], outputs: Iterable[str]) -> list[int]:
    """The steps that these tensors come from, directly or not, in the order of declaration."""
    makers = {ours: number for number, step in enumerate(steps) for _, ours in step.outputs}
    wanted, found = list(outputs), set()
    while wanted:
        number = makers.get(wanted.pop())
        if number is not None and number not in found:
            found.add(number)
            wanted += [ours for _, ours in steps[number].inputs]
    return sorted(found)


def _cycle(steps: Sequence[StepSpec], makers: Mapping[str, int]) -> DeclarationFault | None:
    left = dict(enumerate(steps))
    while left:
        ready = [
            number
            for number, step in left.items()
            if not any(makers.get(ours) in left for _, ours in step.inputs)
        ]
        if not ready:
            stuck = ", ".join(f"steps[{number}] (model {step.model!r})" for number, step in left.items())
            return DeclarationFault(
                ("steps", min(left)), f"these steps wait for one another in a cycle: {stuck}"
            )
        for number in ready:
            del left[number]
    return None


# ---- between it and its models --------------------------------------------------------------


def member_faults(spec: ModelSpec, known: Known) -> Iterator[DeclarationFault]:
    """All that is wrong between an ensemble that holds in itself and the models of its steps."""
    members: dict[int, ModelSpec] = {}
    for number, step in enumerate(spec.steps):
        member = _member(step, known)
        if isinstance(member, str):
            yield DeclarationFault(("steps", number, "model"), member)
            continue
        members[number] = member
        yield from _misnamed(number, step, member)
        yield from _misfit(spec, number, member, known)
    yield from _mistyped(spec, members)


def _member(step: StepSpec, known: Known) -> ModelSpec | str:
    """The model of a step, or why there is none."""
    versions = known.get(step.model, ())
    if not versions:
        return f"there is no model {step.model!r}{nearest(step.model, known)}"
    if not step.version:
        return versions[-1]
    for one in versions:
        if one.version == step.version:
            return one
    there = ", ".join(str(one.version) for one in versions)
    return f"model {step.model!r} has no version {step.version}, but {there}"


def _misnamed(number: int, step: StepSpec, member: ModelSpec) -> Iterator[DeclarationFault]:
    for key, pairs, tensors in (
        ("inputs", step.inputs, member.inputs),
        ("outputs", step.outputs, member.outputs),
    ):
        names = [one.name for one in tensors]
        for theirs, _ in pairs:
            if theirs not in names:
                there = ", ".join(map(repr, names)) or "none"
                text = f"model {member.name!r} has no {key[:-1]} {theirs!r}; its {key} are {there}"
                yield DeclarationFault(("steps", number, key, theirs), text)
    given = {theirs for theirs, _ in step.inputs}
    missing = [one.name for one in member.inputs if not one.optional and one.name not in given]
    if missing:
        text = f"model {member.name!r} needs the input {missing[0]!r}, which it is not given here"
        yield DeclarationFault(("steps", number, "inputs"), text)


def _misfit(spec: ModelSpec, number: int, member: ModelSpec, known: Known) -> Iterator[DeclarationFault]:
    place = ("steps", number, "model")
    if member.decoupled:
        yield DeclarationFault(
            place, f"model {member.name!r} is decoupled, and a step gives one response to a request"
        )
    if _is_deep(member, known):
        text = f"model {member.name!r} leads back to the ensemble itself"
        if not reaches(member, spec.name, known):
            text = f"by model {member.name!r} the ensemble has more than {MAX_DEPTH} others below one another"
        yield DeclarationFault(place, text)
    if member.max_batch_size and spec.max_batch_size > member.max_batch_size:
        text = (
            f"the ensemble has a max_batch_size of {spec.max_batch_size}, "
            f"model {member.name!r} one of {member.max_batch_size}"
        )
        yield DeclarationFault(place, text)


def _is_deep(spec: ModelSpec, known: Known) -> bool:
    """Return whether over ``MAX_DEPTH`` models lie below one another from this model on, as in a cycle."""
    level = [spec]
    for _ in range(MAX_DEPTH):
        found = {(step.model, step.version): step for one in level for step in one.steps}
        level = [one for step in found.values() if isinstance(one := _member(step, known), ModelSpec)]
        if not level:
            return False
    return True


def reaches(spec: ModelSpec, name: str, known: Known) -> bool:
    """Whether a model is of that name, or is an ensemble one of whose steps leads there."""
    seen: set[tuple[str, int]] = set()
    left = [spec]
    while left:
        one = left.pop()
        if one.name == name:
            return True
        if (one.name, one.version) not in seen:
            seen.add((one.name, one.version))
            members = [_member(step, known) for step in one.steps]
            left += [member for member in members if isinstance(member, ModelSpec)]
    return False


def _mistyped(spec: ModelSpec, members: Mapping[int, ModelSpec]) -> Iterator[DeclarationFault]:
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


def _differences(
    place: Place, name: str, made: _Typed, wanted: _Typed, where: str
) -> Iterator[DeclarationFault]:
    if made.datatype != wanted.datatype:
        yield DeclarationFault(place, f"tensor {name!r} is {made.datatype}, {where} is {wanted.datatype}")
    elif not _fits(made.shape, wanted.shape):
        yield DeclarationFault(
            place,
            f"tensor {name!r} has shape {list(made.shape)}, {where} has {list(wanted.shape)} "
            "(with the batch axis where there is one)",
        )
    elif made.optional and not wanted.optional:
        yield DeclarationFault(place, f"tensor {name!r} is optional, {where} is not")


def _typed(tensor: TensorSpec, of: ModelSpec) -> _Typed:
    shape = (-1, *tensor.shape) if of.max_batch_size else tensor.shape
    return _Typed(tensor.datatype, shape, tensor.optional)


def _fits(made: _Shape, wanted: _Shape) -> bool:
    if len(made) != len(wanted):
        return False
    return all(-1 in pair or pair[0] == pair[1] for pair in zip(made, wanted, strict=True))


# ---- words ----------------------------------------------------------------------------------


def _shown(place: Place) -> str:
    text = ""
    for one in place:
        text += f"[{one}]" if isinstance(one, int) else f".{one}" if text else one
    return f"{text}: "
