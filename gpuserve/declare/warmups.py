"""From ``ModelWarmup`` to the warm-ups of a ``ModelSpec``. No array is made here; the workers do that."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from gpuserve.declare.model import ModelWarmup, WarmupInput
from gpuserve.declare.rules import told_as_config
from gpuserve.errors import BadModelConfig
from gpuserve.options import integer
from gpuserve_worker.protocol.tensor import TensorSpec, datatype_of

#: (name, batch size, count, inputs), as in ``wire.Init.warmup``.
Warmup: TypeAlias = tuple[str, int, int, tuple[tuple[str, str, tuple[int, ...], str, str], ...]]
#: Where the values come from.
ZERO: Final = "zero"
RANDOM: Final = "random"
FILE: Final = "file"


def warmups(
    declared: Sequence[ModelWarmup] | None, inputs: Sequence[TensorSpec], max_batch_size: int
) -> tuple[Warmup, ...]:
    """The warm-ups of a model with these inputs.

    Raises:
        BadModelConfig: a value that cannot be, or an input that the model does not declare like this.
    """
    if declared is None:
        return ()
    if not isinstance(declared, Sequence) or not all(isinstance(one, ModelWarmup) for one in declared):
        raise BadModelConfig(f"model_warmup must be a list of ModelWarmup, got {declared!r:.200}")
    with told_as_config():
        return tuple(_warmup(one, inputs, max_batch_size) for one in declared)


def check_input(where: str, declared: TensorSpec, datatype: str, shape: Sequence[int]) -> None:
    """Do nothing if a warm-up may give this input with this datatype and shape, both without batch axis.

    Raises:
        BadModelConfig: its requests would be refused.
    """
    if datatype != declared.datatype:
        raise BadModelConfig(f"{where} is {datatype}, but the model declares it as {declared.datatype}")
    fits = len(shape) == len(declared.shape) and all(
        want in (-1, dim) for want, dim in zip(declared.shape, shape, strict=True)
    )
    if not fits:
        raise BadModelConfig(
            f"{where} has the shape {list(shape)}, but the model declares {list(declared.shape)}, "
            "both without the batch axis"
        )


def check_known(where: str, given: Iterable[str], inputs: Sequence[TensorSpec]) -> None:
    """Do nothing if a warm-up names inputs of the model alone.

    Raises:
        BadModelConfig: it names another.
    """
    known = [one.name for one in inputs]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise BadModelConfig(
            f"{where}: the model has no input {unknown[0]!r}; its inputs are {', '.join(known) or 'none'}"
        )


def _check_complete(where: str, given: Iterable[str], inputs: Sequence[TensorSpec]) -> None:
    missing = [one.name for one in inputs if not one.optional and one.name not in given]
    if missing:
        raise BadModelConfig(f"{where}: the input {missing[0]!r} is missing")


def check_batch_size(where: str, batch_size: int, max_batch_size: int) -> None:
    """Do nothing if the model runs batches of this size; one that does not batch runs one request.

    Raises:
        BadModelConfig: it does not.
    """
    if max_batch_size and batch_size > max_batch_size:
        raise BadModelConfig(
            f"{where}: batch_size must be at most max_batch_size ({max_batch_size}), got {batch_size}"
        )


def _warmup(one: ModelWarmup, inputs: Sequence[TensorSpec], max_batch_size: int) -> Warmup:
    if not isinstance(one.name, str) or not one.name:
        raise BadModelConfig(f"the name of a ModelWarmup must be a non-empty string, got {one.name!r}")
    where = f"warm-up {one.name!r}"
    batch_size = integer(f"{where}: batch_size", one.batch_size, 1)
    check_batch_size(where, batch_size, max_batch_size)
    count = integer(f"{where}: count", one.count, 1)
    if not isinstance(one.inputs, Mapping):
        raise BadModelConfig(
            f"{where}: inputs must be a mapping of names to WarmupInput, got {one.inputs!r:.200}"
        )
    check_known(where, one.inputs, inputs)
    _check_complete(where, one.inputs, inputs)
    given = tuple(
        _input(where, tensor, one.inputs[tensor.name]) for tensor in inputs if tensor.name in one.inputs
    )
    return one.name, batch_size, count, given


def _input(where: str, declared: TensorSpec, given: Any) -> tuple[str, str, tuple[int, ...], str, str]:
    where = f"{where}: input {declared.name!r}"
    if not isinstance(given, WarmupInput):
        raise BadModelConfig(f"{where} must be a WarmupInput, got an object of type {type(given).__name__}")
    try:
        datatype = datatype_of(given.dtype)
    except ValueError as error:
        raise BadModelConfig(f"{where}: {error}") from None
    shape = _shape(where, given.shape)
    check_input(where, declared, datatype, shape)
    return declared.name, datatype, shape, *_values(where, given)


def _shape(where: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list | tuple):
        raise BadModelConfig(f"{where}: shape must be a tuple of integers, got {shape!r}")
    return tuple(integer(f"{where}: every dimension of shape", dim) for dim in shape)


def _values(where: str, given: WarmupInput) -> tuple[str, str]:
    """Where the values come from, and the file, absolute: a worker's current directory may be another."""
    if given.input_data_file:
        path = os.path.abspath(given.input_data_file)
        if not os.path.isfile(path):
            raise BadModelConfig(f"{where}: there is no file {path}")
        return FILE, path
    if given.zero_data:
        return ZERO, ""
    if given.random_data:
        return RANDOM, ""
    raise BadModelConfig(
        f"{where}: One of 'zero_data', 'random_data', or 'input_data_file' must be provided for warmup input."
    )
