"""From ``ModelWarmup`` to the warm-ups of a ``ModelSpec``. No array is made here; the workers do that."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from gpuserve.declare.model import FILE, RANDOM, ZERO, ModelWarmup, WarmupInput
from gpuserve.declare.rules import DeclarationFault, told_as_config
from gpuserve.errors import BadModelConfig
from gpuserve.options import checked, integer, rows
from gpuserve_worker.protocol.tensor import TensorSpec, datatype_of

#: (name, datatype, shape, source, file) and (name, batch size, count, inputs), as in ``wire.Init.warmup``.
WarmedInput: TypeAlias = tuple[str, str, tuple[int, ...], str, str]
Warmup: TypeAlias = tuple[str, int, int, tuple[WarmedInput, ...]]


def warmups(
    declared: Sequence[ModelWarmup] | None, inputs: Sequence[TensorSpec], max_batch_size: int
) -> tuple[Warmup, ...]:
    """The warm-ups of a model with these inputs. Raises BadModelConfig: a value that cannot be, or an input
    that the model does not declare like this.
    """
    if declared is None:
        return ()
    if not isinstance(declared, Sequence) or not all(isinstance(one, ModelWarmup) for one in declared):
        raise BadModelConfig(f"model_warmup must be a list of ModelWarmup, got {declared!r:.200}")
    with told_as_config():
        return tuple(_warmup(one, inputs, max_batch_size) for one in declared)


def warmup_as_given(one: ModelWarmup, inputs: Sequence[TensorSpec]) -> Warmup:
    """A warm-up of just the inputs that it names, whether or not the model would take such a request. Raises
    BadModelConfig: a value cannot be.
    """
    with told_as_config():
        batch_size, count = _checked(one)
        known = {spec.name: spec for spec in inputs}
        named = []
        for name, given in one.inputs.items():
            spec = known.get(name) or _undeclared(f"warm-up {one.name!r}: input {name!r}", name, given)
            named.append(_input(spec, given))
    return one.name, batch_size, count, tuple(named)


def faults(one: ModelWarmup, inputs: Sequence[TensorSpec], max_batch_size: int) -> Iterator[DeclarationFault]:
    """Why the model would refuse a warm-up whose own values hold, by place in it."""
    where = f"warm-up {one.name!r}"
    if max_batch_size and one.batch_size > max_batch_size:
        text = f"batch_size must be at most max_batch_size ({max_batch_size}), got {one.batch_size}"
        yield DeclarationFault(("batch_size",), f"{where}: {text}")
    known = [spec.name for spec in inputs]
    if unknown := [name for name in one.inputs if name not in known]:
        text = f"the model has no input {unknown[0]!r}; its inputs are {', '.join(known) or 'none'}"
        yield DeclarationFault(("inputs",), f"{where}: {text}")
    for spec in inputs:
        if spec.name in one.inputs:
            yield from _input_faults(f"{where}: input {spec.name!r}", spec, one.inputs[spec.name])
        elif not spec.optional:
            yield DeclarationFault(("inputs",), f"{where}: the input {spec.name!r} is missing")


def _input_faults(where: str, spec: TensorSpec, given: WarmupInput) -> Iterator[DeclarationFault]:
    place = ("inputs", spec.name)
    _, datatype, shape, _, path = _input(spec, given)
    if datatype != spec.datatype:
        text = f"{where} is {datatype}, but the model declares it as {spec.datatype}"
        yield DeclarationFault(place, text)
    if -1 in shape:
        yield DeclarationFault(place, f"{where} has no shape, and the model declares {list(spec.shape)}")
    elif len(shape) != len(spec.shape) or any(
        want not in (-1, dim) for want, dim in zip(spec.shape, shape, strict=True)
    ):
        text = f"{where} has the shape {list(shape)}, but the model declares {list(spec.shape)}, "
        yield DeclarationFault(place, text + "both without the batch axis")
    if path and not os.path.isfile(path):
        yield DeclarationFault((*place, "file"), f"{where}: there is no file {path}")


def _warmup(one: ModelWarmup, inputs: Sequence[TensorSpec], max_batch_size: int) -> Warmup:
    batch_size, count = _checked(one)
    for _, text in faults(one, inputs, max_batch_size):
        raise BadModelConfig(text)
    named = tuple(_input(spec, one.inputs[spec.name]) for spec in inputs if spec.name in one.inputs)
    return one.name, batch_size, count, named


def _checked(one: ModelWarmup) -> tuple[int, int]:
    """The size of its batches and how many there are, if it says what can be, whatever the model."""
    if not isinstance(one.name, str) or not one.name:
        raise BadModelConfig(f"the name of a ModelWarmup must be a non-empty string, got {one.name!r}")
    where = f"warm-up {one.name!r}"
    batch_size, count = (integer(f"{where}: {key}", getattr(one, key), 1) for key in ("batch_size", "count"))
    if not isinstance(one.inputs, Mapping):
        raise BadModelConfig(
            f"{where}: inputs must be a mapping of names to WarmupInput, got {one.inputs!r:.200}"
        )
    for name, given in one.inputs.items():
        _check_values(f"{where}: input {name!r}", given)
    return batch_size, count


def _undeclared(where: str, name: str, given: WarmupInput) -> TensorSpec:
    if given.dtype is None or given.shape is None:
        raise BadModelConfig(f"{where} is none of the model, and has no dtype or no shape")
    return TensorSpec(name, datatype_of(given.dtype), tuple(given.shape))


def _check_values(where: str, given: Any) -> None:
    """Whether a warm-up's input says something that can be, whatever the model."""
    if not isinstance(given, WarmupInput):
        raise BadModelConfig(f"{where} must be a WarmupInput, got an object of type {type(given).__name__}")
    try:
        datatype_of("FP32" if given.dtype is None else given.dtype)
    except ValueError as error:
        raise BadModelConfig(f"{where}: {error}") from None
    if given.shape is not None and not isinstance(given.shape, list | tuple):
        raise BadModelConfig(f"{where}: shape must be a tuple of integers, got {given.shape!r}")
    for dim in given.shape or ():
        integer(f"{where}: every dimension of shape", dim)
    checked(rows(WarmupInput)["values"], given.values, f"{where}: values")
    if not (given.zero_data or given.random_data or given.file or given.values):
        raise BadModelConfig(
            f"{where}: One of 'zero_data', 'random_data', or 'input_data_file' must be provided for warmup "
            "input."
        )


def _input(spec: TensorSpec, given: WarmupInput) -> WarmedInput:
    """As ``wire.Init.warmup`` has it. A file is absolute: a worker's current directory may be another."""
    datatype = spec.datatype if given.dtype is None else datatype_of(given.dtype)
    shape = spec.shape if given.shape is None else tuple(given.shape)
    if given.file:
        return spec.name, datatype, shape, FILE, os.path.abspath(given.file)
    source = ZERO if given.zero_data or given.values == ZERO else RANDOM
    return spec.name, datatype, shape, source, ""
