"""The warm-ups of a config file: what they come to, and what is wrong with them.

They are looked at once the rest of their model is known to hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from gpuserve.config.model_entry import ModelEntry, WarmupEntry, WarmupInputEntry
from gpuserve.config.plain import Violation
from gpuserve.config.positions import Path
from gpuserve.declared_warmup import FILE, Warmup, check_batch_size, check_input, check_known
from gpuserve.errors import BindError
from gpuserve_worker.tensor import TensorSpec, datatype_of


def warmups(entry: ModelEntry, inputs: Sequence[TensorSpec], base_dir: str) -> tuple[Warmup, ...]:
    """The warm-ups of a model without violations."""
    return tuple(
        (
            one.name,
            one.batch_size,
            one.count,
            tuple(_input(one, spec, base_dir) for spec in _given(one, inputs)),
        )
        for one in entry.warmup
    )


def violations(
    entry: ModelEntry, inputs: Sequence[TensorSpec], base_dir: str, path: Path
) -> Iterator[Violation]:
    """Every warm-up whose requests the model would refuse, or whose file is not there."""
    for index, one in enumerate(entry.warmup):
        where = (*path, "warmup", index)
        try:
            check_batch_size(f"warm-up {one.name!r}", one.batch_size, entry.max_batch_size)
        except BindError as error:
            yield Violation((*where, "batch_size"), str(error))
        yield from _input_violations(one, inputs, base_dir, where)


def _input_violations(
    one: WarmupEntry, inputs: Sequence[TensorSpec], base_dir: str, where: Path
) -> Iterator[Violation]:
    try:
        check_known(f"warm-up {one.name!r}", one.inputs, inputs)
    except BindError as error:
        yield Violation((*where, "inputs"), str(error))
    for spec in _given(one, inputs):
        at: Path = (*where, "inputs", spec.name) if spec.name in one.inputs else where
        text = f"warm-up {one.name!r}: input {spec.name!r}"
        _, datatype, shape, source, file = _input(one, spec, base_dir)
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


def _input(one: WarmupEntry, spec: TensorSpec, base_dir: str) -> tuple[str, str, tuple[int, ...], str, str]:
    entry = one.inputs.get(spec.name, WarmupInputEntry())
    datatype = spec.datatype if entry.dtype is None else datatype_of(entry.dtype)
    shape = spec.shape if entry.shape is None else tuple(entry.shape)
    if entry.file is None:
        return spec.name, datatype, shape, entry.values, ""
    return spec.name, datatype, shape, FILE, os.path.join(base_dir, entry.file)
